"""The folder of a sweep: what was asked, finished shards, and tables made from them.

A shard is the images ``first .. last`` of a cell (sampler and settings). Its pictures and its times are written first, its record
last, each by renaming a finished file: a shard is complete exactly if its record exists. Records hold reproducible values only;
seconds are in files of their own.

    manifest.json                              what was asked, and the cells in order
    runs/<time>-<pid>-<host>.json              one per process that worked
    cells/<cell>/cell.json
    cells/<cell>/shard-<first>-<last>.npz      arr_0 uint8 [n, H, W, 3], as the ADM evaluator reads it; labels
    cells/<cell>/shard-<first>-<last>.json     the record
    cells/<cell>/shard-<first>-<last>.time.json
    reports.jsonl                              all records with counts per image
    results.jsonl, timing.json                 measures and paired times
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError
from .folder import Folder
from .records import Cell, Shard, checked, from_npz, ranges, sha256, shard_key, stem, to_npz

FORMAT = 1
MANIFEST, RESULTS, TIMING, REPORTS = "manifest.json", "results.jsonl", "timing.json", "reports.jsonl"
# Counts of calls that follow each other, which a batch shares.
SEQUENTIAL = ("transformer_passes", "head_calls", "draft_passes", "draft_head_calls", "decoder_passes", "waves")
_MOST_JSON = 64 << 20

# Names of the cells' folders.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,120}")

T = TypeVar("T")


class Store:
    """The folder of a sweep.

    Args:
        address: local path or fsspec address.
    """

    def __init__(self, address: str | Path):
        self.folder = Folder(address)
        self._cells: list[Cell] | None = None
        self._batch = 0

    # ---------------------------------------------------------------------------------------- reading

    def exists(self) -> bool:
        """Whether the folder holds a sweep."""
        return self.folder.read(MANIFEST) is not None

    def manifest(self) -> dict[str, Any]:
        """What was asked.

        Raises:
            UserError: the folder holds no sweep, or one of a later version.
        """
        found = self._json(MANIFEST)
        if found is None:
            raise UserError(f"folder: {self.folder.address} holds no sweep; draw one with the command sweep.")
        if found.get("format") != FORMAT:
            raise UserError(
                f"folder: {self.folder.address} has format {found.get('format')!r}; this version reads {FORMAT}."
            )
        return found

    def cells(self) -> list[Cell]:
        """The cells in the order of the manifest; read once."""
        if self._cells is None:
            names = self.manifest().get("cells")
            if not isinstance(names, list) or not all(isinstance(name, str) and _ID.fullmatch(name) for name in names):
                raise UserError(
                    f"folder: {MANIFEST} in {self.folder.address} is damaged; run the sweep again to write it anew."
                )
            self._cells = [self._record(Cell, f"cells/{name}/cell.json") for name in names]
        return self._cells

    def cell(self, name: str) -> Cell:
        """The cell with that id.

        Raises:
            UserError: there is none.
        """
        cells = {cell.id: cell for cell in self.cells()}
        if name not in cells:
            raise UserError(f"cell: the sweep has no cell {name!r}; it has {', '.join(cells)}.")
        return cells[name]

    def ranges(self, cell: Cell) -> list[tuple[int, int]]:
        """(first, count) of all shards of a cell, finished or not."""
        if not self._batch:
            self._batch = self.manifest().get("batch", 0)
            if not isinstance(self._batch, int) or self._batch < 1:
                raise UserError(
                    f"folder: {MANIFEST} in {self.folder.address} is damaged; run the sweep again to write it anew."
                )
        return ranges(cell.images, self._batch)

    def shard(self, cell: Cell, first: int, count: int) -> Shard | None:
        """A finished shard; None if it is missing or belongs to another cell."""
        return self._shard(cell, first, count, self.folder.read(f"cells/{cell.id}/{stem(first, count)}.json"))

    def _shard(self, cell: Cell, first: int, count: int, data: bytes | None) -> Shard | None:
        try:
            shard = checked(Shard, self._object("", data) or {})
        except (UserError, KeyError, TypeError, ValueError):
            return None
        right = (shard.key, shard.first, shard.count) == (shard_key(cell.key, first, count), first, count)
        return shard if right else None

    def shards(self, cell: Cell) -> list[Shard]:
        """The finished shards of a cell, sorted."""
        inside = f"cells/{cell.id}"
        there = set(self.folder.names(inside))
        wanted = {f"{inside}/{stem(*r)}.json": r for r in self.ranges(cell) if f"{stem(*r)}.json" in there}
        found = self.folder.read_all(list(wanted))
        shards = (self._shard(cell, *wanted[name], data) for name, data in found.items())
        return sorted((shard for shard in shards if shard is not None), key=lambda shard: shard.first)

    def sizes(self, cell: Cell) -> dict[str, int]:
        """Bytes of the files of a cell by name."""
        return self.folder.sizes(f"cells/{cell.id}")

    def complete(self, cell: Cell, shard: Shard) -> bool:
        """Whether the pictures of a finished shard are as recorded: their digest and the checksums of the file."""
        try:
            with zipfile.ZipFile(io.BytesIO(self.folder.read(f"cells/{cell.id}/{shard.stem}.npz") or b"")) as file:
                sound = file.testzip() is None  # the checksums also cover the labels
            return sound and sha256(self.pictures(cell, shard)) == shard.sha256
        except (UserError, zipfile.BadZipFile, NotImplementedError, OSError):
            return False

    def pictures(self, cell: Cell, shard: Shard) -> np.ndarray:
        """Pictures of a shard, uint8 [n, H, W, 3].

        Raises:
            UserError: the file is missing or damaged.
        """
        found = self._array(cell, shard, "arr_0")
        if found.dtype != np.uint8 or found.shape != (shard.count, *cell.size, 3):
            raise self._damaged(cell, shard)
        return found

    def images(self, cell: Cell) -> Iterator[tuple[int, np.ndarray]]:
        """(first index, pictures) shard by shard, in order. One shard is in memory at a time."""
        for shard in self.shards(cell):
            yield shard.first, self.pictures(cell, shard)

    def labels(self, cell: Cell, shard: Shard) -> np.ndarray:
        """Class ids of a shard, int64 [n], or its prompts, text [n]."""
        return self._array(cell, shard, "labels")

    def times(self, cell: Cell) -> list[dict[str, Any]]:
        """What differs from run to run, of every finished shard: ``first``, ``count``, ``seconds`` (sampler), ``wall`` (all but
        writing), ``ended`` (seconds since 1970), ``phases``, ``worker``, ``machine``, ``threads``, ``peak_memory_bytes``."""
        names = [f"cells/{cell.id}/{shard.stem}.time.json" for shard in self.shards(cell)]
        found = (self._object(name, data) for name, data in self.folder.read_all(names).items())
        return sorted((time for time in found if time is not None), key=lambda time: time["first"])

    def timing(self) -> dict[str, Any] | None:
        """The paired calibration, or None: ``cells``, by id ``seconds`` per image and ``ratio`` to the baseline."""
        return self._json(TIMING)

    def runs(self) -> list[dict[str, Any]]:
        """The processes that worked on the sweep, oldest first."""
        found = (self._json(f"runs/{name}") for name in self.folder.names("runs"))
        return [run for run in found if run is not None]

    def table(self) -> str:
        """A Markdown table of the finished images. It is a function of the pictures and counts alone."""
        rows = [["cell", "images", "pictures", "passes", "head calls", "head rows", "accepted"]]
        for cell in self.cells():
            rows.append(_row(cell, self.shards(cell)))
        width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        text = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |" for row in rows]
        return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *text[1:]])

    # ---------------------------------------------------------------------------------------- writing

    def write_manifest(self, manifest: Mapping[str, Any], cells: list[Cell]) -> None:
        """Write the cells' records and then the manifest, each only if it changes."""
        for cell in cells:
            self._write(f"cells/{cell.id}/cell.json", asdict(cell))
        self._write(MANIFEST, {"format": FORMAT, **manifest, "cells": [cell.id for cell in cells]})
        self._cells, self._batch = list(cells), 0

    def write_shard(
        self,
        cell: Cell,
        shard: Shard,
        pictures: np.ndarray,
        labels: np.ndarray,
        time: Mapping[str, Any],
    ) -> Shard:
        """Write a shard, its record last.

        Args:
            shard: its record; ``bytes`` and ``sha256`` are filled in here.
            time: see :meth:`times`.

        Returns:
            The record as written.
        """
        data, name = to_npz(arr_0=pictures, labels=labels), f"cells/{cell.id}/{shard.stem}"
        self.folder.write(f"{name}.npz", data)
        self._write(f"{name}.time.json", time)
        shard = replace(shard, bytes=len(data), sha256=sha256(pictures))
        self._write(f"{name}.json", asdict(shard))
        self.folder.remove_parts(name)
        return shard

    def discard(self, cell: Cell, first: int, count: int) -> None:
        """Remove the record of a shard, so that it is drawn again."""
        self.folder.remove(f"cells/{cell.id}/{stem(first, count)}.json")

    def write_run(self, name: str, run: Mapping[str, Any]) -> None:
        """Write the record of a process."""
        self._write(f"runs/{name}.json", run)

    def write_timing(self, timing: Mapping[str, Any]) -> None:
        """Write the paired calibration."""
        self._write(TIMING, timing)

    def write_reports(self) -> None:
        """Write reports.jsonl: a line per finished shard with its counts, and per image those that are sums over images."""
        lines = []
        for cell in self.cells():
            for shard in self.shards(cell):
                each = {name: n / shard.count for name, n in shard.counts.items() if name not in SEQUENTIAL}
                lines.append({"cell": cell.id, **asdict(shard), "per_image": each})
        self.folder.write(REPORTS, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def append_results(self, lines: list[Mapping[str, Any]]) -> None:
        """Append measures to results.jsonl."""
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
        self.folder.write(RESULTS, (self.folder.read(RESULTS) or b"") + text.encode())

    def results(self) -> list[dict[str, Any]]:
        """The lines of results.jsonl."""
        lines = (self.folder.read(RESULTS) or b"").decode("utf-8", "replace").splitlines()
        try:
            return [json.loads(line) for line in lines if line.strip()]
        except ValueError:
            raise UserError(f"folder: {RESULTS} in {self.folder.address} is damaged; delete it.") from None

    # ---------------------------------------------------------------------------------------- helpers

    def _json(self, name: str) -> dict[str, Any] | None:
        """An object in a JSON file; None if there is no such file.

        Raises:
            UserError: it holds something else.
        """
        return self._object(name, self.folder.read(name))

    def _object(self, name: str, data: bytes | None) -> dict[str, Any] | None:
        if data is None:
            return None
        try:
            found = json.loads(data) if len(data) <= _MOST_JSON else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(
                f"folder: {name} in {self.folder.address} is damaged; run the sweep again to write it anew."
            )
        return found

    def _record(self, kind: type[T], name: str) -> T:
        """A record from a JSON file, its fields checked by type.

        Raises:
            UserError: the file is missing or damaged.
        """
        found = self._json(name)
        try:
            return checked(kind, found or {})
        except (KeyError, TypeError, ValueError):
            what = "missing" if found is None else "damaged"
            raise UserError(
                f"folder: {name} in {self.folder.address} is {what}; run the sweep again to write it anew."
            ) from None

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        data = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
        if self.folder.read(name) != data:
            self.folder.write(name, data)

    def _array(self, cell: Cell, shard: Shard, name: str) -> np.ndarray:
        data = self.folder.read(f"cells/{cell.id}/{shard.stem}.npz")
        try:
            return from_npz(data or b"", name)
        except (ValueError, KeyError, OSError, EOFError, RecursionError, zipfile.BadZipFile, NotImplementedError):
            raise self._damaged(cell, shard) from None

    def _damaged(self, cell: Cell, shard: Shard) -> UserError:
        return UserError(
            f"folder: {cell.id}/{shard.stem}.npz in {self.folder.address} is missing or damaged; run the sweep again to draw it anew."
        )


def _row(cell: Cell, shards: list[Shard]) -> list[str]:
    """A cell's row of the table. Sequential calls are means per shard, other counts means per image."""
    images, counts = sum(s.count for s in shards), len(shards)
    all_pictures = hashlib.sha256("".join(s.sha256 for s in shards).encode()).hexdigest()[:16] if shards else ""

    def mean(name: str, by: int) -> str:
        found = [s.counts[name] for s in shards if name in s.counts]
        return f"{sum(found) / by:.2f}" if found else ""

    accepted, verified = sum(s.accepted for s in shards), sum(s.verified for s in shards)
    calls = [mean(name, counts) for name in ("transformer_passes", "head_calls")]
    share = f"{100 * accepted / verified:.2f} %" if verified else ""
    return [cell.id, str(images), all_pictures, *calls, mean("head_rows", images), share]
