"""The images of a cell as one npz file, which the ADM evaluator takes."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...errors import UserError, first_line
from .records import Cell
from .store import Store


def write_joined(store: Store, folder: Path, prefix: str = "") -> list[Path]:
    """Write ``arr_0`` uint8 [N, H, W, 3] of every cell with images to ``folder``; returns the files, PREFIXCELL.npz.

    One shard is in memory at a time.

    Raises:
        UserError: a file cannot be written, or a shard is damaged.
    """
    written = []
    for cell in store.cells():
        if store.shards(cell):
            path = folder / f"{prefix}{cell.id}.npz"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _write(store, cell, path)
            except OSError as e:
                raise UserError(
                    f"npz: {path.name} cannot be written ({first_line(e)}); free disk space, or choose a different "
                    "folder with --npz."
                ) from None
            written.append(path)

    return written


def _write(store: Store, cell: Cell, path: Path) -> None:
    """Write the images of a cell; a file of that name is replaced when the new one is complete."""
    shards = store.shards(cell)
    shape = (sum(shard.count for shard in shards), *cell.size, 3)
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}

    part = path.with_name(f"{path.name}.part")
    with zipfile.ZipFile(part, "w") as archive, archive.open("arr_0.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(cast(Any, file), header)
        for shard in shards:
            file.write(np.ascontiguousarray(store.pictures(cell, shard)).tobytes())
    os.replace(part, path)
