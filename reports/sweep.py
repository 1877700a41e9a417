"""A sweep: one sampler over the values of one or two settings and over seeds, one cell a combination.

Cells are written to a folder as they are made, one PNG file a cell with its report in the metadata. A cell's name is a
digest of all that its image depends on, so that an interrupted sweep goes on where it stopped and a changed one
repeats nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import UserError
from .drawing import check_batch
from .exchange import KEY, OtherFormat, add_runs, described, read_runs
from .quality import Quality, closeness
from .record import Report
from .table import figure, markdown, percent
from .timing import Speedup, how_timed, shown_seconds, speedup_of

MOST_CELLS = 1024
# Values of a weight that its digest reads.
_SAMPLED = 4096


# ------------------------------------------------------------------------------------------------ digests


def digest(*parts: Any) -> str:
    """32 hexadecimal digits by content, of numbers, text, tensors, mappings, sequences and dataclasses.

    Raises:
        TypeError: a part is none of these.
    """
    text = json.dumps(parts, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(part: Any) -> Any:
    """What JSON has no form for, as something it has one for."""
    if isinstance(part, torch.Tensor):
        flat = part.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes()
        return [str(part.dtype), part.shape, hashlib.sha256(content).hexdigest()]

    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, Sequence):
        return list(part)
    if is_dataclass(part) and not isinstance(part, type):
        return [type(part).__name__, {f.name: getattr(part, f.name) for f in fields(part)}]

    raise TypeError(f"no digest of a {type(part).__name__}")


def weights_digest(net: torch.nn.Module) -> str:
    """A digest of a network's weights: name, shape and dtype of every tensor, and up to 4096 evenly spaced values.

    Reading all values of a large model would take longer than many cells.
    """
    shapes = {}
    sampled = {}
    for name, tensor in net.state_dict().items():
        flat = tensor.detach().reshape(-1)
        stride = max(1, math.ceil(len(flat) / _SAMPLED))

        shapes[name] = tensor.shape
        sampled[name] = flat[::stride]

    return digest(shapes, sampled)


# ------------------------------------------------------------------------------------------------ cells on disk


class CellStore:
    """The folder of a sweep's cells. It is created with the first cell."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str) -> Path:
        """The file of a cell."""
        return self.folder / f"{key}.png"

    def write(self, key: str, images: np.ndarray, report: Report) -> None:
        """Write a cell: uint8 [N, H, W, 3], one below the other.

        Raises:
            UserError: the file cannot be written. It appears complete, or not at all.
        """
        n, h, w, _ = check_batch(images, "images").shape
        column = images.reshape(n * h, w, 3)

        metadata: dict[str, Any] = {}
        add_runs(metadata, described([report]))
        about = PngInfo()
        about.add_text(KEY, json.dumps(metadata[KEY]))

        with self._part(key) as part:
            Image.fromarray(column).save(part, "PNG", pnginfo=about, compress_level=4)
            os.replace(part, self.path(key))

    def check(self, key: str) -> None:
        """Check that a cell can be written, before it is sampled; raises as :meth:`write`."""
        with self._part(key) as part:
            part.touch()

    @contextmanager
    def _part(self, key: str) -> Iterator[Path]:
        """A name for a cell's unfinished file, which is removed afterwards. An OSError becomes a UserError."""
        part = self.folder / f".{key}.{os.getpid()}.part"

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.path(key).is_dir():
                raise UserError(f"sweep: {self.path(key).name} in {self.folder.name} is a folder; rename it.")
            yield part
        except OSError as error:
            raise UserError(
                f"sweep: {self.folder.name} cannot be written to ({error.strerror or error}); "
                "free space there or choose another folder. Finished cells are kept."
            ) from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def read(self, key: str) -> tuple[np.ndarray, Report] | None:
        """Images and report of a cell; None if it is missing or damaged, so that it is made again.

        Raises:
            UserError: the file holds a report of another format, which a newer version wrote and this one must not
                overwrite.
        """
        try:
            saved = read_runs(self.path(key))
        except OtherFormat:
            raise UserError(
                f"sweep: {self.path(key).name} in {self.folder.name} was written by another version of FastAR; "
                "choose another folder."
            ) from None
        except UserError:
            return None

        report = saved.reports[0]
        column = np.asarray(saved.image)
        if len(column) % report.images:
            return None

        height = len(column) // report.images
        return column.reshape(report.images, height, *column.shape[1:]), report


# ------------------------------------------------------------------------------------------------ the sweep


@dataclass(frozen=True)
class Axis:
    """A setting and its values."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep."""

    x: int  # index of the value
    y: int
    seed: int
    key: str  # name in the store
    report: Report  # without maps
    baseline: Report | None = None  # of the plain sampler with this seed
    quality: Quality | None = None  # of the images against the baseline's


@dataclass(frozen=True)
class Sweep:
    """A finished sweep; its images are on disk."""

    title: str  # sampler and the settings that all cells share
    store: CellStore
    x: Axis
    y: Axis  # with one value "" without a second setting
    seeds: tuple[int, ...]  # in the order of the cells
    cells: tuple[Cell, ...]  # ordered by y, seed, x

    def __str__(self) -> str:
        """For people: what core's Preview as Text shows."""
        return f"{self.title}\n\n{sweep_table(self)}"

    def points(self) -> list[Point]:
        """All combinations of values, by y and x."""
        points = []
        for y in range(len(self.y.values)):
            for x in range(len(self.x.values)):
                cells = [cell for cell in self.cells if cell.y == y and cell.x == x]
                points.append(summary(cells))

        return points


@dataclass(frozen=True)
class Point:
    """Figures of a combination of values over the seeds: medians of times and means of the rest; None where unknown.

    Passes and head calls are without those of a draft model.
    """

    x: int
    y: int
    speedup: Speedup | None
    seconds: float
    passes: float
    acceptance: float | None
    psnr: float | None
    ssim: float | None
    word: str
    head_calls: float | None = None
    seeds: int = 1
    first_run: bool = False  # whether a run of it was the first of its network

    @property
    def timed(self) -> str:
        """The seconds and how they were measured."""
        how = how_timed(self.seeds, self.first_run)
        return f"{shown_seconds(self.seconds)} ({how})"


def summary(cells: Sequence[Cell]) -> Point:
    """Figures over the seeds of one combination of values, at least one cell."""
    reports = [cell.report for cell in cells]
    qualities = [cell.quality for cell in cells if cell.quality is not None]

    acceptances = _known(report.acceptance for report in reports)
    psnrs = _known(quality.psnr for quality in qualities)
    ssims = _known(quality.ssim for quality in qualities)

    calls = _known(report.own("head_calls") for report in reports)

    # A word that holds for all.
    words = {quality.word for quality in qualities}

    return Point(
        x=cells[0].x,
        y=cells[0].y,
        speedup=_over_seeds([cell.report.speedup(cell.baseline) for cell in cells]),
        seconds=median(report.seconds for report in reports),
        passes=mean(report.own("transformer_passes") or 0 for report in reports),
        acceptance=mean(acceptances) if acceptances else None,
        psnr=mean(psnrs) if psnrs else None,
        ssim=mean(ssims) if ssims else None,
        word=words.pop() if len(words) == 1 else "",
        head_calls=mean(calls) if calls else None,
        seeds=len(cells),
        first_run=any(report.first_run for report in reports),
    )


def _over_seeds(found: Sequence[Speedup | None]) -> Speedup | None:
    """The speed-ups of a combination of values, one a seed, as one; None if one is unknown.

    The plain sampler's runs are the first of a sweep, so that other load on the machine may affect one of a pair alone:
    they are no repeats in turn.
    """
    known = [speedup for speedup in found if speedup is not None]
    if not known or len(known) < len(found):
        return None

    ratios = _known(speedup.value for speedup in known)
    if len(known) == 1 or len(ratios) < len(known):
        return next((speedup for speedup in known if speedup.value is None), known[0])
    return speedup_of(ratios, of="seeds")


def _known(values: Iterable[float | None]) -> list[float]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def combinations(x: Axis, y: Axis, seeds: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index of x, index of y, seed) of all cells, by y, seed, x; a UserError if they are more than 1024."""
    count = len(x.values) * len(y.values) * len(seeds)
    if count > MOST_CELLS:
        raise UserError(f"x_values: {count} cells are more than {MOST_CELLS}; give fewer values or seeds.")

    ordered = itertools.product(range(len(y.values)), seeds, range(len(x.values)))
    return [(i, j, seed) for j, seed, i in ordered]


def completed(
    store: CellStore, keys: Sequence[str], make: Callable[[int], tuple[np.ndarray, Report]]
) -> Iterator[tuple[int, np.ndarray, Report]]:
    """Index, images and report without maps of every cell in order; one cell is in memory at a time.

    What is on disk under its key is read; the others are made by ``make``, which takes an index, and written.
    """
    for i, key in enumerate(keys):
        found = store.read(key)
        if found is not None:
            yield i, *found
            continue

        store.check(key)
        images, report = make(i)
        bare = replace(report, maps={}, similarity=None)
        store.write(key, images, bare)
        yield i, images, bare


_HEAD = ("passes", "head calls", "accepted", "PSNR", "SSIM", "seconds", "speed-up")


def sweep_table(sweep: Sweep) -> str:
    """A Markdown table with one row per combination of values; empty columns are omitted."""
    axes = [sweep.x.name]
    if sweep.y.name:
        axes.append(sweep.y.name)
    rows = [[*axes, *_HEAD]]

    for point in sweep.points():
        values = [sweep.x.values[point.x]]
        if sweep.y.name:
            values.append(sweep.y.values[point.y])

        row = [
            *values,
            figure(point.passes, "g"),
            figure(point.head_calls, "g"),
            percent(point.acceptance, 1),
            *closeness(point),
            point.timed,
            point.speedup.text if point.speedup else "",
        ]
        rows.append(row)

    return markdown(rows, empty=False)
