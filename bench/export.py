"""The pictures of a finished cell in files for other programs. One shard is in memory at a time."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

import numpy as np
from PIL import Image

from .records import Cell
from .store import Store

NPZ, PNG = "npz", "png"
FORMATS = (NPZ, PNG)
FOLDER = "export"


def export(store: Store, cell: Cell, form: str, prompts: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write all images of a cell below the folder ``export`` of the sweep."""
    name = f"{FOLDER}/{cell.id}"
    if form == NPZ:
        with store.folder.open(f"{name}.npz") as file:
            _npz(store, cell, file)
        return f"{name}.npz"
    for i, about in enumerate(prompts):
        store.folder.write(f"{name}/{i:05d}/metadata.jsonl", json.dumps(about, ensure_ascii=False).encode())
    for shard in store.shards(cell):
        for index, picture in enumerate(store.pictures(cell, shard), shard.first):
            out = io.BytesIO()
            Image.fromarray(picture).save(out, "PNG", compress_level=4)
            path = f"{index:07d}.png"
            if prompts:
                path = f"{index % len(prompts):05d}/samples/{index // len(prompts):05d}.png"
            store.folder.write(f"{name}/{path}", out.getvalue())
    return name


def _npz(store: Store, cell: Cell, file: BinaryIO) -> None:
    """An npz file whose array is written shard by shard."""
    shards = store.shards(cell)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        with out.open(_member("arr_0"), "w", force_zip64=True) as part:
            shape = (sum(s.count for s in shards), *cell.size, 3)
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(cast(io.BufferedIOBase, part), header)
            for shard in shards:
                part.write(np.ascontiguousarray(store.pictures(cell, shard)).data)
        labels = [store.labels(cell, s) for s in shards]
        if labels and labels[0].dtype == np.int64:
            with out.open(_member("arr_1"), "w") as part:
                np.lib.format.write_array(cast(io.BufferedIOBase, part), np.concatenate(labels), allow_pickle=False)


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
