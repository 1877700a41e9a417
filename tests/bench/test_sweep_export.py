"""Pictures of a cell in the files of other programs."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from fastar_nodes.bench.records import Cell, Shard, shard_key
from fastar_nodes.bench.store import Store
from fastar_nodes.bench.sweep import export
from PIL import Image

pytestmark = pytest.mark.slow


def filled(address, images=5, batch=2, size=(8, 6), prompts=()):
    cell = Cell("mar-0000", "k" * 32, "MAR", "demo", "d", "mar", "mar", {}, {}, 0, images, size, None, "")
    store = Store(address)
    store.write_manifest({"batch": batch}, [cell])
    for first, count in store.ranges(cell):
        pictures = np.random.default_rng(first).integers(0, 256, (count, *size, 3), dtype=np.uint8)
        indices = range(first, first + count)
        labels = np.array(
            [prompts[i % len(prompts)]["prompt"] for i in indices] if prompts else [i % 3 for i in indices]
        )
        store.write_shard(cell, Shard(shard_key(cell.key, first, count), first, count, ""), pictures, labels, {})
    return store, cell, np.concatenate([store.pictures(cell, s) for s in store.shards(cell)])


@pytest.fixture(params=["local", "memory"])
def address(request, tmp_path):
    return tmp_path / "sweep" if request.param == "local" else f"memory://{tmp_path.name}/export"


def test_png_holds_one_file_an_image(address):
    store, cell, pictures = filled(address)
    name = export(store, cell)
    assert list(store.folder.sizes(name)) == [f"{i:07d}.png" for i in range(5)]
    for i, picture in enumerate(pictures):
        assert np.array_equal(Image.open(io.BytesIO(store.folder.read(f"{name}/{i:07d}.png", 1 << 20))), picture)


def test_prompts_go_to_genevals_folders(address):
    prompts = [{"tag": "colors", "prompt": "a red boat"}, {"tag": "counting", "prompt": "two cats"}]
    store, cell, pictures = filled(address, prompts=prompts)
    name = export(store, cell, prompts)
    assert json.loads(store.folder.read(f"{name}/00001/metadata.jsonl", 999)) == prompts[1]
    assert list(store.folder.sizes(f"{name}/00000/samples")) == ["00000.png", "00001.png", "00002.png"]
    assert np.array_equal(
        Image.open(io.BytesIO(store.folder.read(f"{name}/00001/samples/00001.png", 9999))), pictures[3]
    )
