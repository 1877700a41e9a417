"""Pictures of a cell in the files of other programs."""

from __future__ import annotations

import io
import json
import tracemalloc

import numpy as np
import pytest
from fastar_nodes.bench.export import FORMATS, export
from fastar_nodes.bench.records import Cell, Shard, shard_key
from fastar_nodes.bench.store import Store
from PIL import Image


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


def test_npz_holds_all_images_and_labels(address):
    store, cell, pictures = filled(address)
    data = store.folder.read(export(store, cell, "npz"), 1 << 20)
    with np.load(io.BytesIO(data)) as file:
        assert np.array_equal(file["arr_0"], pictures) and file["arr_1"].tolist() == [0, 1, 2, 0, 1]
    export(store, cell, "npz")
    assert store.folder.read("export/mar-0000.npz", 1 << 20) == data, "the bytes depend on the pictures alone"


def test_npz_of_a_large_cell_needs_the_memory_of_a_few_shards(tmp_path):
    store, cell, pictures = filled(tmp_path, images=200, batch=4, size=(128, 128))
    del pictures
    tracemalloc.start()
    export(store, cell, "npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 4 * 128 * 128 * 3, "the cell has 50 shards"


def test_png_holds_one_file_an_image(address):
    store, cell, pictures = filled(address)
    name = export(store, cell, "png")
    assert list(store.folder.sizes(name)) == [f"{i:07d}.png" for i in range(5)]
    for i, picture in enumerate(pictures):
        assert np.array_equal(Image.open(io.BytesIO(store.folder.read(f"{name}/{i:07d}.png", 1 << 20))), picture)


def test_prompts_go_to_genevals_folders(address):
    prompts = [{"tag": "colors", "prompt": "a red boat"}, {"tag": "counting", "prompt": "two cats"}]
    store, cell, pictures = filled(address, prompts=prompts)
    name = export(store, cell, "png", prompts)
    assert json.loads(store.folder.read(f"{name}/00001/metadata.jsonl", 999)) == prompts[1]
    assert list(store.folder.sizes(f"{name}/00000/samples")) == ["00000.png", "00001.png", "00002.png"]
    assert np.array_equal(
        Image.open(io.BytesIO(store.folder.read(f"{name}/00001/samples/00001.png", 9999))), pictures[3]
    )


@pytest.mark.parametrize("form", FORMATS)
def test_an_interrupted_export_leaves_no_half_file(tmp_path, form, monkeypatch):
    store, cell, _ = filled(tmp_path)
    shard = store.shards(cell)[1]
    (tmp_path / "cells" / cell.id / f"{shard.stem}.npz").write_bytes(b"")
    with pytest.raises(ValueError):
        export(store, cell, form)
    left = [p.name for p in (tmp_path / "export").rglob("*") if p.is_file()]
    assert not any("part" in name or name.endswith(".npz") for name in left)
