"""A finished sweep of the nodes: one sampler over the values of one or two settings and over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import OfFastAR
from ..reports.quality import closeness
from ..reports.sweep import Cell, Point, summary
from ..reports.table import figure, markdown, percent
from .store import CellStore


@dataclass(frozen=True)
class Axis:
    """A setting and its values."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Sweep(OfFastAR):
    """A finished sweep; its images are on disk."""

    kind: ClassVar[str] = "sweep"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
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
