"""The folder of a sweep: what was asked, finished shards, and measures.

A shard is the images ``first .. last`` of a cell (sampler and settings). Its images and its times are written first,
its record last, each by renaming a finished file: a shard is complete exactly if its record exists. Records hold
reproducible values only; seconds are in files of their own.

    manifest.json                              what was asked, and the cells in order
    cells/<cell>/cell.json
    cells/<cell>/shard-<first>-<last>.npz      arr_0 uint8 [n, H, W, 3], as the ADM evaluator reads it; labels
    cells/<cell>/shard-<first>-<last>.json     the record
    cells/<cell>/shard-<first>-<last>.time.json
    results/<time>-<id>.jsonl                  measures; a new file for every cell that is evaluated
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ...reports.reading import read
from ...reports.work import Work
from ...runs.batches import SPLIT
from .folder import Folder
from .records import (
    Cell,
    Shard,
    from_npz,
    range_of,
    ranges,
    sha256,
    shard_key,
    stem,
    to_npz,
)

FORMAT = 2
MANIFEST = "manifest.json"
RESULTS = "results"


class Store:
    """The folder of a sweep."""

    def __init__(self, path: str | Path):
        self.folder = Folder(path)
        self._cells: dict[str, Cell] | None = None
        self._batch = 0

    def manifest(self) -> dict[str, Any] | None:
        """What was asked; None if the folder holds no sweep."""
        found = self.folder.read_json(MANIFEST)

        if found is not None and found.get("format") != FORMAT:
            form = str(found.get("format"))[:40]
            raise UserError(
                f"folder: {self.folder.path} has the format {form!r}, but this version of FastAR reads the format "
                f"{FORMAT}; use the version of FastAR that wrote the folder."
            )

        return found

    def cells(self) -> list[Cell]:
        """The cells in the order of the manifest; read once."""
        if self._cells is None:
            found = self.manifest()
            if found is None:
                raise UserError(f"folder: {self.folder.path} holds no sweep; generate one with the command sweep.")

            self._batch = found["batch"]
            self._cells = {name: self._cell(name) for name in found["cells"]}

        return list(self._cells.values())

    def _cell(self, name: str) -> Cell:
        """The record of a cell, whose id is the name of its folder."""
        path = f"cells/{name}/cell.json"

        try:
            return read(Cell, self.folder.read_json(path) or {})
        except ValueError:
            raise self.folder.damaged(path) from None

    def cell(self, name: str) -> Cell:
        """The cell with that id."""
        return next(cell for cell in self.cells() if cell.id == name)

    def ranges(self, cell: Cell) -> list[tuple[int, int]]:
        """(first, count) of all shards of a cell, finished or not."""
        self.cells()
        return ranges(cell.images, self._batch)

    def shard(self, cell: Cell, first: int, count: int) -> Shard | None:
        """A finished shard; None if it is missing, damaged, or belongs to another cell."""
        try:
            found = self.folder.read_json(f"cells/{cell.id}/{stem(first, count)}.json") or {}
            shard = read(Shard, found)
        except ValueError:  # a UserError for a damaged file among them
            return None

        wanted = (shard_key(cell.key, first, count), first, count)
        return shard if (shard.key, shard.first, shard.count) == wanted else None

    def shards(self, cell: Cell) -> list[Shard]:
        """The finished shards of a cell, sorted."""
        self.cells()
        parts = [range_of(name) for name in self.folder.sizes(f"cells/{cell.id}")]

        shards = []
        for first, count in sorted(part for part in parts if part is not None):
            is_wanted = first % self._batch == 0 and 0 < count == min(self._batch, cell.images - first)
            shard = self.shard(cell, first, count) if is_wanted else None
            if shard is not None:
                shards.append(shard)

        return shards

    def complete(self, cell: Cell, shard: Shard) -> bool:
        """Whether the images of a finished shard are as recorded: their digest, and the checksums of the file."""
        try:
            self.labels(cell, shard)  # reading an array compares its checksum
            return sha256(self.pictures(cell, shard)) == shard.sha256
        except UserError:
            return False

    def pictures(self, cell: Cell, shard: Shard) -> np.ndarray:
        """Images of a shard, uint8 [n, H, W, 3]."""
        found = self._array(cell, shard, "arr_0")
        if found.dtype != np.uint8 or found.shape != (shard.count, *cell.size, 3):
            raise self.folder.damaged(f"cells/{cell.id}/{shard.stem}.npz")
        return found

    def labels(self, cell: Cell, shard: Shard) -> np.ndarray:
        """Class ids of a shard, int64 [n], or its prompts, text [n]; raises as :meth:`pictures`."""
        found = self._array(cell, shard, "labels")
        if found.shape != (shard.count,) or found.dtype != np.int64 and found.dtype.kind != "U":
            raise self.folder.damaged(f"cells/{cell.id}/{shard.stem}.npz")
        return found

    def _array(self, cell: Cell, shard: Shard, name: str) -> np.ndarray:
        """An array of a shard's npz file."""
        path = f"cells/{cell.id}/{shard.stem}.npz"
        data = self.folder.read(path)

        try:
            return from_npz(data or b"", name)
        except ValueError:
            raise self.folder.damaged(path) from None

    def times(self, cell: Cell) -> dict[int, dict[str, Any]]:
        """What a worker recorded of each shard that was drawn at once, with its count, by first image."""
        out = {}
        for shard in self.shards(cell):
            found = self.folder.read_json(f"cells/{cell.id}/{shard.stem}.time.json")
            if found and SPLIT not in shard.note:
                out[shard.first] = {**found, "count": shard.count}

        return out

    def results(self) -> Iterator[Any]:
        """The lines of all results, oldest first."""
        for name in self.folder.sizes(RESULTS):
            data = self.folder.read(f"{RESULTS}/{name}") or b""

            try:
                lines = [json.loads(line) for line in data.splitlines() if line.strip()]
            except (ValueError, RecursionError):
                raise self.folder.damaged(f"{RESULTS}/{name}") from None

            yield from lines

    def write_manifest(self, manifest: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        """Write the cells' records and then the manifest.

        Samplers, their settings and the number of images may change between two runs: finished cells are taken as they
        are. All else decides every image, and is in the name of every cell.

        Raises:
            UserError: the folder holds a sweep, and no cell of it is among these.
        """
        before: Any = (self.manifest() or {}).get("cells")
        names = [cell.id for cell in cells]
        if isinstance(before, list) and before and set(names).isdisjoint(map(str, before)):
            raise UserError(
                f"out: {self.folder.path} holds a sweep of different cells, for example {str(before[0])[:80]}. The "
                "seed, batch, dtype, device, threads, labels, prompts or files of these cells are not those of this "
                f"run. Choose a different folder with --out, or remove {MANIFEST} from this folder to start again."
            )

        for cell in cells:
            self.folder.write_json(f"cells/{cell.id}/cell.json", asdict(cell))
        self.folder.write_json(MANIFEST, {"format": FORMAT, **manifest, "cells": names})

        self._cells = None

    def write_shard(
        self, cell: Cell, shard: Shard, pictures: np.ndarray, labels: np.ndarray, times: Mapping[str, Any]
    ) -> Shard:
        """Write a shard, its record last; returns the record with ``bytes`` and ``sha256``.

        For ``times`` see :meth:`times`.
        """
        name = f"cells/{cell.id}/{shard.stem}"
        data = to_npz(arr_0=pictures, labels=labels)

        self.folder.write(f"{name}.npz", data)
        self.folder.write_json(f"{name}.time.json", times)

        record = replace(shard, bytes=len(data), sha256=sha256(pictures))
        self.folder.write_json(f"{name}.json", asdict(record))
        return record

    def discard(self, cell: Cell, first: int, count: int) -> None:
        """Remove the record of a shard, so that it is drawn again."""
        self.folder.remove(f"cells/{cell.id}/{stem(first, count)}.json")

    def append_results(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add measures, in a file of their own: two evaluations at once lose nothing."""
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.jsonl"
        self.folder.write(f"{RESULTS}/{name}", text.encode())


def work_of(shards: Sequence[Shard]) -> Work:
    """The work of finished shards."""
    return Work.of((shard.count, shard.counts) for shard in shards)
