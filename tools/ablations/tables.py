"""Ablation tables: how the images of a row are sampled, measured against real images, and printed.

The images do not depend on the batch size (noise is paired per image), so batches are large; ``bench`` measures speed.
The tables are in ``mar.py``, ``hybrid.py``, ``tokens.py`` (LlamaGen, PAR, ZipAR), ``mulosd.py`` and ``tar.py``.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...reports.record import Report
from ...reports.table import markdown
from ...samplers.conditioning import Condition
from ...samplers.registry import find
from ...samplers.settings import make
from .. import files
from ..training import picture_book
from ..training.judge import load_judge, read
from ..training.quality import Figures, figures, shrunk
from ..training.recipes import RESOLUTION, to_signed

SEED, TEST_SEED = 2026, 2
# Batch size; the seconds in the tables refer to it.
BATCH = 100


@dataclass(frozen=True)
class Row:
    """One row of a table: first cell, sampler, settings in addition to the table's, checkpoint where the sampler has
    several, and settings of Tar's language model where it is used."""

    title: str
    sampler: str
    settings: dict[str, Any]
    model: str = ""
    prompt: dict[str, Any] = field(default_factory=dict)


Table = tuple[Row, ...]


@dataclass(frozen=True)
class Result:
    """Figures of a row: quality of its images, the report of all batches,
    and by name what the family adds; ``work``: cells by heading.
    """

    title: str
    sampler: str
    settings: dict[str, Any]
    figures: Figures
    counts: dict[str, int]
    acceptance: float | None
    seconds: float
    batches: int
    more: dict[str, Any] = field(default_factory=dict)
    work: dict[str, str] = field(default_factory=dict)

    def count(self, name: str) -> str:
        """A count an image; "" if the report lacks it."""
        return f"{self.counts[name] / self.figures.images:.0f}" if name in self.counts else ""

    @property
    def seconds_an_image(self) -> str:
        return f"{self.seconds / self.figures.images:.3f}"

    @property
    def cache(self) -> str:
        """kB of cache an image; "" without a cache."""
        return f"{self.counts['cache_bytes'] / self.figures.images / 1000:.0f}" if "cache_bytes" in self.counts else ""


def from_rgb(rgb: np.ndarray) -> Tensor:
    """Images uint8 [N, H, W, 3] to the input of an autoencoder, fp32 [N, 3, H, W] in -1..1."""
    return to_signed(torch.from_numpy(rgb).permute(0, 3, 1, 2))


def balanced_labels(images: int) -> np.ndarray:
    """Labels 0..9, repeated; int64 [images]."""
    return np.arange(images) % len(picture_book.LABELS)


class Ground:
    """Shared by all rows of a run: the labels, the judge, and the real images that the rows are compared with.

    Images above the judge's 64 x 64 pixels are averaged to that size, and so are the real ones. ``checkpoints``:
    folder, None for the repository's own. Seed 2026 chose presets and checkpoints, so report figures of another seed.
    """

    def __init__(self, images: int, checkpoints: Path | None = None, seed: int = SEED):
        if images < 100:
            raise UserError(f"images: {images} is too few for figures; use 100 or more.")
        self.images, self.checkpoints, self.seed = images, checkpoints, seed
        self.labels = balanced_labels(images)
        self.judge, self.tolerance = load_judge(self.file("judge"))
        self._references: dict[int, np.ndarray] = {}

    def file(self, name: str) -> Path:
        """Path of a checkpoint. Raises UserError if it is missing."""
        path = files.checkpoint(name, self.checkpoints)
        if not path.is_file():
            remedy = f"make it with train-demo --only {name}"
            raise UserError(f"tables: the demo's {path.name} is missing, which this run needs; {remedy}.")
        return path

    def condition(self, images: range) -> Condition:
        """Condition of the images with these indices."""
        labels = tuple(int(i) for i in self.labels[images.start : images.stop])
        return Condition(labels, tuple(picture_book.LABELS[i] for i in labels), "picture-book")

    def real(self, seed: int, side: int = RESOLUTION) -> np.ndarray:
        """Real images of all labels, uint8 [images, side, side, 3]."""
        return picture_book.render(picture_book.scenes(seed, self.images, labels=self.labels), side)[0]

    def reference(self, side: int) -> np.ndarray:
        """The judge's features of real images of that size, float32 [images, 64]."""
        if side not in self._references:
            self._references[side] = read(self.judge, shrunk(self.real(TEST_SEED, side))).features
        return self._references[side]

    def figures(self, rgb: np.ndarray) -> Figures:
        """Figures of images uint8 [images, S, S, 3] of all labels."""
        return figures(self.judge, self.tolerance, shrunk(rgb), self.labels, self.reference(rgb.shape[1]))


class Bench(ABC):
    """The models of a family, loaded on first use, and its tables; ``batch``: images sampled at once."""

    tables: ClassVar[dict[str, Table]]
    # Settings of all rows.
    common: Mapping[str, Any] = {}

    def __init__(self, ground: Ground, device: str = "cpu", dtype: str = "fp32", batch: int = BATCH):
        self.ground, self.device, self.dtype, self.batch = ground, torch.device(device), dtype, batch
        self._rows: dict[str, tuple[Result, np.ndarray]] = {}

    @abstractmethod
    def needs(self, row: Row) -> tuple[str, ...]:
        """Names of the checkpoints of a row."""

    @abstractmethod
    def floors(self, name: str) -> dict[str, Figures]:
        """Figures of real images and of their reconstructions: the floors of a table."""

    @abstractmethod
    def draw(self, row: Row, settings: Any, images: range) -> tuple[np.ndarray, Report]:
        """Images uint8 [n, S, S, 3] with these indices, and the
        report; ``settings``: instance of the sampler's settings class.
        """

    def settings(self, row: Row, common: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a row, by name."""
        return {**common, **row.settings}

    def more(self, row: Row, made: Any, reports: Sequence[Report], result: Result) -> dict[str, Any]:
        """Figures of the family, from the reports of all batches; ``made``: instance of the
        sampler's settings class.
        """
        return {}

    @abstractmethod
    def work(self, result: Result) -> dict[str, str]:
        """Cells of the cost columns, by heading; "": none."""

    def expect(self, name: str) -> None:
        """Check that all checkpoints of a table exist."""
        for row in self.tables[name]:
            for file in self.needs(row):
                self.ground.file(file)

    @torch.no_grad()
    def pictures(self, row: Row, settings: dict[str, Any]) -> tuple[np.ndarray, list[Report]]:
        """All images of a row, uint8 [images, S, S, 3], and the reports of all batches."""
        made = make(find(row.sampler).settings, settings)
        every = range(self.ground.images)
        parts = [self.draw(row, made, every[at : at + self.batch]) for at in range(0, len(every), self.batch)]
        return np.concatenate([rgb for rgb, _ in parts]), [report for _, report in parts]

    def row(self, row: Row, common: Mapping[str, Any]) -> tuple[Result, np.ndarray]:
        """Result of a row and its images at the judge's input size, uint8
        [images, 64, 64, 3]. Rows of several tables are sampled once.
        """
        settings = self.settings(row, common)
        made = make(find(row.sampler).settings, settings)
        key = f"{row.sampler} {row.model} {made} {row.prompt}"
        if key not in self._rows:
            rgb, reports = self.pictures(row, settings)
            judged, total = self.ground.figures(rgb), merged(reports)
            numbers = total.counts, total.acceptance, total.seconds, len(reports)
            result = Result(row.title, row.sampler, settings, judged, *numbers)
            result = replace(result, more=self.more(row, made, reports, result))
            self._rows[key] = replace(result, work=self.work(result)), shrunk(rgb)

        result, rgb = self._rows[key]

        return replace(result, title=row.title), rgb


def merged(reports: Sequence[Report]) -> Report:
    """One report of all batches: counts, seconds and images are sums, the rest is that of the first batch."""
    total = replace(reports[0], counts=dict(reports[0].counts))
    for part in reports[1:]:
        total.add(**part.counts)
        total.seconds += part.seconds
        total.images += part.images
    return total


def bench_of(name: str, kinds: Sequence[type[Bench]]) -> type[Bench]:
    """The class of benches that has a table. Raises UserError if there is none."""
    for kind in kinds:
        if name in kind.tables:
            return kind
    known = ", ".join(table for kind in kinds for table in kind.tables)
    raise UserError(f"table: there is no {name!r}; there are {known}.")


def run_table(
    bench: Bench, name: str, log: Callable[[str], None] = print, keep: list[np.ndarray] | None = None
) -> list[Result]:
    """Results of all rows of a table; ``keep`` receives the first ten images of every row, uint8 [10, 64, 64, 3]."""
    out = []
    for row in bench_of(name, [type(bench)]).tables[name]:
        began = time.monotonic()
        result, rgb = bench.row(row, bench.common)
        if keep is not None:
            keep.append(rgb[:10])
        log(f"{name}: {row.title}: {result.figures} in {time.monotonic() - began:.0f} s")
        out.append(result)

    return out


def to_markdown(results: Sequence[Result], floors: Mapping[str, Figures]) -> str:
    """Markdown table of docs/benchmarks.md; seconds refer to batches of 100, without the decoder."""
    rows = [(f"*{name} images*", f.cells()) for name, f in floors.items()]
    rows += [(r.title, {**r.figures.cells(), **r.work}) for r in results]

    # Quality columns come first, because the floors have no cost columns.
    heads = list(dict.fromkeys(heading for _, cells in rows for heading in cells))

    table = [["setting", *heads]]
    for title, cells in rows:
        table.append([title, *(cells.get(head, "") for head in heads)])

    return markdown(table, empty=False, markup=True)
