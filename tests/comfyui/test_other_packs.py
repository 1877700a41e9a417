"""The example pack of docs/sockets.md beside ours in a real ComfyUI: it makes a condition, draws, reads a report."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from comfy_host import PACK, ROOT, Comfy, Missing, graph, widgets

PAGE = (ROOT / "docs" / "sockets.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class WithExample(Comfy):
    """A server with the example as a second pack."""

    def _copy_example(self) -> None:
        super()._copy_example()
        pack = self.base / "custom_nodes" / "example-pack"
        pack.mkdir()
        (pack / "__init__.py").write_text(EXAMPLE, encoding="utf-8")


class WithAnotherCopy(WithExample):
    """A server whose Python also has FastAR installed, which some pack has imported before ours is loaded."""

    def _copy_example(self) -> None:
        super()._copy_example()
        startup = self.base / "startup"
        unused = shutil.ignore_patterns(
            ".*", "tests", "docs", "web", "workflows", "subgraphs", "locales", "__pycache__"
        )
        shutil.copytree(ROOT, startup / "fastar_nodes", ignore=unused)
        with (startup / "sitecustomize.py").open("a", encoding="utf-8") as file:
            file.write("import fastar_nodes\n")


@pytest.fixture(scope="module", params=[WithExample, WithAnotherCopy])
def both(request: pytest.FixtureRequest) -> Iterator[Comfy]:
    try:
        server = request.param()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


def drawn(comfy: Comfy, **nodes: dict) -> tuple[list[np.ndarray], str]:
    """Images of the node "draw" and the text of the node "read", which follow the nodes."""
    prompt = {key: {"class_type": about.pop("type"), "inputs": about} for key, about in nodes.items()}
    prompt["save"] = {"class_type": "SaveImage", "inputs": {"images": ["draw", 0], "filename_prefix": "example"}}
    prompt["read"] = {"class_type": "ExamplePasses", "inputs": {"report": ["draw", 1]}}
    prompt["see"] = {"class_type": "PreviewAny", "inputs": {"source": ["read", 0]}}
    outputs = comfy.run(prompt)
    images = [np.asarray(comfy.picture(image)) for image in outputs["save"]["images"]]
    return images, outputs["see"]["text"][0]


LOADER = {"type": "FastARLoadMAR", **graph()["1"]["inputs"]}
LABELS = {"type": "FastARClassLabel", **widgets("FastARClassLabel"), "labels": "fish", "images_per_label": 2}


def test_the_three_nodes_of_the_example_work_with_ours(both):
    """Their condition and ours, their draw: the same image, whichever copy of the package they import."""
    fish = {"type": "ExampleFish", "images": 2}
    draw = {"type": "ExampleDraw", "model": ["load", 0], "condition": ["what", 0]}
    theirs, told = drawn(both, load=dict(LOADER), what=fish, draw=dict(draw))
    ours, _ = drawn(both, load=dict(LOADER), what=dict(LABELS), draw=dict(draw))

    assert len(theirs) == 2 and theirs[0].std() > 5 and not np.array_equal(*theirs)
    assert np.array_equal(theirs, ours)
    assert re.fullmatch(r"fasthybrid: \d+ passes, \d+\.\d s", told)


def test_our_sampler_draws_their_condition(both):
    sampler = {"type": "FastARAnySampler", "model": ["load", 0], "condition": ["what", 0], "seed": 7}
    sampler["sampler"] = "fasthybrid: preset=fast"

    def images(what: dict) -> list[np.ndarray]:
        prompt = {"load": dict(LOADER), "what": what, "draw": dict(sampler)}
        api = {key: {"class_type": about.pop("type"), "inputs": about} for key, about in prompt.items()}
        api["see"] = {"class_type": "VAEDecode", "inputs": {"samples": ["draw", 0], "vae": ["load", 1]}}
        api["save"] = {"class_type": "SaveImage", "inputs": {"images": ["see", 0], "filename_prefix": "ours"}}
        return [np.asarray(both.picture(image)) for image in both.run(api)["save"]["images"]]

    theirs = images({"type": "ExampleFish", "images": 2})
    assert np.array_equal(theirs, images(dict(LABELS)))

    # The same as the example's own node draws.
    draw = {"type": "ExampleDraw", "model": ["load", 0], "condition": ["what", 0]}
    alone, _ = drawn(both, load=dict(LOADER), what=dict(LABELS), draw=draw)
    assert np.array_equal(theirs, alone)


def test_the_log_says_which_copy_other_packs_import(both):
    said = [line for line in both.log.splitlines() if "other packs import fastar_nodes from" in line]
    elsewhere = both.base / "startup" / "fastar_nodes" / "__init__.py"
    assert len(said) == elsewhere.exists()
    assert all(str(elsewhere) in line and str(Path("custom_nodes") / PACK) in line for line in said)
    assert "IMPORT FAILED" not in both.log and "Traceback" not in both.log
