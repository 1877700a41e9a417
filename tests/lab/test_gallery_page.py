"""The gallery: forty seeds, each with a graph of nodes that exist."""

import argparse
import json
from types import SimpleNamespace

import pytest
from fastar_nodes.lab.docs import gallery
from PIL import Image


@pytest.fixture
def drawn(root, tmp_path, monkeypatch):
    """The page and the folder of a run whose models draw grey images."""
    pipe = SimpleNamespace(samplers=["mar"])

    class Grey(SimpleNamespace):
        def __call__(self, wish, seed):
            return [Image.new("RGB", (8, 8), (seed, seed, seed))], None

    monkeypatch.setattr(gallery, "load", lambda name, device: Grey(**vars(pipe)))
    monkeypatch.setattr(gallery, "FOLDER", tmp_path / "gallery")
    monkeypatch.setattr(gallery, "PAGE", tmp_path / "gallery.md")
    assert gallery.run(argparse.Namespace(models=[])) == 0
    return tmp_path


def test_forty_images_none_left_out_each_with_its_graph(drawn):
    files = sorted(path.name for path in (drawn / "gallery").iterdir())
    assert [int(name[:2]) for name in files] == list(range(40))
    page = (drawn / "gallery.md").read_text(encoding="utf-8")
    assert all(f"gallery/{name}" in page for name in files)
    for name in files:
        with Image.open(drawn / "gallery" / name) as image:
            nodes = json.loads(image.text["prompt"])
        assert nodes["3"]["inputs"]["seed"] == int(name[:2])


def test_graphs_are_of_nodes_that_exist(root):
    schemas = json.loads((root / "tests" / "nodes" / "schemas.json").read_text(encoding="utf-8"))
    for model, sampler in zip(gallery.MODELS, ("mar", "llamagen", "mar", "tar", "bitdance"), strict=True):
        for about in gallery.graph(model, sampler, 0).values():
            if about["class_type"].startswith("FastAR"):
                schema = schemas[about["class_type"]]
                known = {one[0] for one in (*schema["widgets"], *schema["inputs"])}
                assert {*about["inputs"]} <= known
