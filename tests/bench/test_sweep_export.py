"""Pictures of a cell in the files of other programs."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from fastar_nodes.bench.sweep import export
from made_sweeps import SMALL, filled
from PIL import Image

pytestmark = pytest.mark.slow


def pictures_of(store) -> np.ndarray:
    return np.concatenate([store.pictures(SMALL, shard) for shard in store.shards(SMALL)])


def test_png_holds_one_file_an_image(address):
    store = filled(address)
    name, pictures = export(store, SMALL), pictures_of(store)
    assert list(store.folder.sizes(name)) == [f"{i:07d}.png" for i in range(5)]
    for i, picture in enumerate(pictures):
        assert np.array_equal(Image.open(io.BytesIO(store.folder.read(f"{name}/{i:07d}.png", 1 << 20))), picture)


def test_prompts_go_to_genevals_folders(address):
    prompts = [{"tag": "colors", "prompt": "a red boat"}, {"tag": "counting", "prompt": "two cats"}]
    store = filled(address, [prompts[i % 2]["prompt"] for i in range(5)])
    name, pictures = export(store, SMALL, prompts), pictures_of(store)
    assert json.loads(store.folder.read(f"{name}/00001/metadata.jsonl", 999)) == prompts[1]
    assert list(store.folder.sizes(f"{name}/00000/samples")) == ["00000.png", "00001.png", "00002.png"]
    assert np.array_equal(
        Image.open(io.BytesIO(store.folder.read(f"{name}/00001/samples/00001.png", 9999))), pictures[3]
    )
