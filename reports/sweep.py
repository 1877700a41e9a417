"""A sweep: one sampler over the values of one or two settings and over seeds, one cell a combination.

Cells are written to a folder as they are made, one PNG file a cell with its report in the metadata. A cell's name is a digest of all
that its picture depends on, so that an interrupted sweep goes on where it stopped and a changed one repeats nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .table import figure, markdown

MOST_CELLS = 1024
# Values of a weight that its digest reads.
_SAMPLED = 4096


# ------------------------------------------------------------------------------------------------ digests


def digest(*parts: Any) -> str:
    """32 hexadecimal digits by content; a TypeError for other than numbers, text, tensors, mappings, sequences and dataclasses."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_plain).encode()).hexdigest()[:32]


def _plain(part: Any) -> Any:
    """What JSON has no form for, as something it has one for."""
    if isinstance(part, torch.Tensor):
        values = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(part.dtype), part.shape, hashlib.sha256(values).hexdigest()]
    if isinstance(part, (Mapping, Sequence)):
        return dict(part) if isinstance(part, Mapping) else list(part)
    if is_dataclass(part) and not isinstance(part, type):
        return [type(part).__name__, {f.name: getattr(part, f.name) for f in fields(part)}]
    raise TypeError(f"no digest of a {type(part).__name__}")


def weights_digest(net: torch.nn.Module) -> str:
    """A digest of a network's weights: name, shape and dtype of every tensor, and up to 4096 evenly spaced values of each.

    Reading all values of a large model would take longer than many cells.
    """
    tensors = {name: tensor.detach().reshape(-1) for name, tensor in net.state_dict().items()}
    kept = {name: flat[:: max(1, -(-len(flat) // _SAMPLED))] for name, flat in tensors.items()}
    return digest({name: tensor.shape for name, tensor in net.state_dict().items()}, kept)


# ------------------------------------------------------------------------------------------------ cells on disk


class CellStore:
    """The folder of a sweep's cells. It is created with the first cell."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str) -> Path:
        """The file of a cell."""
        return self.folder / f"{key}.png"

    def write(self, key: str, pictures: np.ndarray, report: Report) -> None:
        """Write a cell: uint8 [N, H, W, 3], one below the other. The file appears complete, or not at all with a UserError."""
        n, h, w, _ = check_batch(pictures, "pictures").shape
        metadata: dict[str, Any] = {}
        add_runs(metadata, described([report]))
        about = PngInfo()
        about.add_text(KEY, json.dumps(metadata[KEY]))
        with self._part(key) as part:
            Image.fromarray(pictures.reshape(n * h, w, 3)).save(part, "PNG", pnginfo=about, compress_level=4)
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
            why = error.strerror or error
            remedy = "free space there or choose another folder. Finished cells are kept."
            raise UserError(f"sweep: {self.folder.name} cannot be written to ({why}); {remedy}") from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def read(self, key: str) -> tuple[np.ndarray, Report] | None:
        """Pictures and report of a cell; None if it is missing or damaged, so that it is made again.

        Raises:
            UserError: the file holds a report of another format, which a newer version wrote and this one must not overwrite.
        """
        try:
            shown, reports, *_ = read_runs(self.path(key))
        except OtherFormat:
            raise UserError(
                f"sweep: {self.path(key).name} in {self.folder.name} was written by another version of FastAR; choose another folder."
            ) from None
        except UserError:
            return None
        n, rows = reports[0].images, np.asarray(shown)
        if len(rows) % n:
            return None
        return rows.reshape(n, len(rows) // n, *rows.shape[1:]), reports[0]


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
    quality: Quality | None = None  # of the pictures against the baseline's


@dataclass(frozen=True)
class Sweep:
    """A finished sweep; its pictures are on disk."""

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
        places = itertools.product(range(len(self.y.values)), range(len(self.x.values)))
        return [summary([c for c in self.cells if (c.y, c.x) == place]) for place in places]


@dataclass(frozen=True)
class Point:
    """Figures of one combination of values: medians of times and means of the rest, over the seeds; None where unknown."""

    x: int
    y: int
    speedup: float | None
    seconds: float
    passes: float
    acceptance: float | None
    psnr: float | None
    ssim: float | None
    word: str


def summary(cells: Sequence[Cell]) -> Point:
    """Figures over the seeds of one combination of values, at least one cell."""
    ratios = [r for c in cells if (r := c.report.speedup(c.baseline)) is not None]
    found = [c.quality for c in cells if c.quality is not None]
    accepted = [c.report.acceptance for c in cells if c.report.acceptance is not None]
    near = [q.psnr for q in found if q.psnr is not None]
    alike = [q.ssim for q in found if q.ssim is not None]
    return Point(
        x=cells[0].x,
        y=cells[0].y,
        speedup=median(ratios) if ratios else None,
        seconds=median(c.report.seconds for c in cells),
        passes=mean(c.report.counts.get("transformer_passes", 0) for c in cells),
        acceptance=mean(accepted) if accepted else None,
        psnr=mean(near) if near else None,
        ssim=mean(alike) if alike else None,
        word=found[0].word if found and all(q.word == found[0].word for q in found) else "",
    )


def combinations(x: Axis, y: Axis, seeds: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index of x, index of y, seed) of all cells, by y, seed, x; a UserError if they are more than 1024."""
    count = len(x.values) * len(y.values) * len(seeds)
    if count > MOST_CELLS:
        raise UserError(f"x_values: {count} cells are more than {MOST_CELLS}; give fewer values or seeds.")
    return [(i, j, s) for j, s, i in itertools.product(range(len(y.values)), seeds, range(len(x.values)))]


def completed(
    store: CellStore, keys: Sequence[str], make: Callable[[int], tuple[np.ndarray, Report]]
) -> Iterator[tuple[int, np.ndarray, Report]]:
    """Index, pictures and report without maps of every cell in order; one cell is in memory at a time.

    What is on disk under its key is read; the others are made by ``make``, which takes an index, and written.
    """
    for i, key in enumerate(keys):
        found = store.read(key)
        if found is not None:
            yield i, *found
            continue
        store.check(key)
        pictures, report = make(i)
        bare = replace(report, maps={}, similarity=None)
        store.write(key, pictures, bare)
        yield i, pictures, bare


_HEAD = ("speed-up", "seconds", "passes", "accepted", "PSNR", "SSIM")


def sweep_table(sweep: Sweep) -> str:
    """A Markdown table with one row per combination of values; empty columns are omitted."""
    second = bool(sweep.y.name)
    rows = [[sweep.x.name, *([sweep.y.name] if second else []), *_HEAD]]
    for p in sweep.points():
        values = [sweep.x.values[p.x], *([sweep.y.values[p.y]] if second else [])]
        numbers = [figure(p.speedup, ".2f", "x"), figure(p.seconds, ".2f"), figure(p.passes, "g")]
        rows.append([*values, *numbers, figure(p.acceptance, ".1f", " %", 100), *closeness(p)])
    return markdown(rows, empty=False)
