"""The pictures of a finished cell in files for other programs. One shard is in memory at a time."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import numpy as np
from PIL import Image

from .spec import from_manifest
from .store import Cell, Store

NPZ, PNG, WEBDATASET = "npz", "png", "webdataset"
FORMATS = (NPZ, PNG, WEBDATASET)
FOLDER = "export"
# Images of a tar file.
TAR_IMAGES = 10_000


def export(store: Store, cell: Cell, form: str) -> str:
    """Write all images of a cell below the folder ``export`` of the sweep.

    Args:
        form: one of :data:`FORMATS`. npz: ``arr_0`` uint8 [N, H, W, 3] and, of classes, ``arr_1`` int64 [N], as ADM's evaluator reads
            them. png: <index>.png; of prompts GenEval's folders, <prompt>/metadata.jsonl and <prompt>/samples/<number>.png. webdataset:
            tar files of at most 10,000 images, <index>.png with <index>.cls or <index>.txt.

    Returns:
        Name of the file or folder below the sweep's.
    """
    name = f"{FOLDER}/{cell.id}"
    if form == NPZ:
        with store.folder.open(f"{name}.npz") as file:
            _npz(store, cell, file)
        return f"{name}.npz"
    if form == WEBDATASET:
        _tars(store, cell, name)
        return name
    _pngs(store, cell, name)
    return name


def _npz(store: Store, cell: Cell, file: BinaryIO) -> None:
    """An npz file whose array is written shard by shard."""
    shards = store.shards(cell)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        with out.open(_member("arr_0"), "w", force_zip64=True) as part:
            shape = (sum(s.count for s in shards), *cell.size, 3)
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(cast(io.BufferedIOBase, part), header)
            for _, pictures in store.images(cell):
                part.write(np.ascontiguousarray(pictures).data)
        labels = [store.labels(cell, s) for s in shards]
        if labels and labels[0].dtype == np.int64:
            with out.open(_member("arr_1"), "w") as part:
                np.lib.format.write_array(cast(io.BufferedIOBase, part), np.concatenate(labels), allow_pickle=False)


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))


def _each(store: Store, cell: Cell) -> Iterator[tuple[int, bytes, str]]:
    """(index, PNG file, class id or prompt) of every image."""
    for shard in store.shards(cell):
        labels = store.labels(cell, shard)
        for i, picture in enumerate(store.pictures(cell, shard)):
            out = io.BytesIO()
            Image.fromarray(picture).save(out, "PNG", compress_level=4)
            yield shard.first + i, out.getvalue(), str(labels[i])


def _pngs(store: Store, cell: Cell, name: str) -> None:
    prompts = from_manifest(store.manifest()).prompts
    for i, about in enumerate(prompts):
        store.folder.write(f"{name}/{i:05d}/metadata.jsonl", json.dumps(about, ensure_ascii=False).encode())
    for index, png, _ in _each(store, cell):
        if prompts:
            number, sample = index % len(prompts), index // len(prompts)
            store.folder.write(f"{name}/{number:05d}/samples/{sample:05d}.png", png)
        else:
            store.folder.write(f"{name}/{index:07d}.png", png)


def _tars(store: Store, cell: Cell, name: str) -> None:
    each, count = _each(store, cell), 0
    ending = "txt" if from_manifest(store.manifest()).prompts else "cls"
    while count < cell.images:
        with store.folder.open(f"{name}/{count // TAR_IMAGES:06d}.tar") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for index, png, label in each:
                    for suffix, data in (("png", png), (ending, label.encode())):
                        about = tarfile.TarInfo(f"{index:07d}.{suffix}")
                        about.size = len(data)
                        tar.addfile(about, io.BytesIO(data))
                    count += 1
                    if count % TAR_IMAGES == 0:
                        break
