"""A finished sweep of the nodes: one sampler over the values of one or two settings and over seeds."""

from __future__ import annotations

from dataclasses import dataclass

from ..reports.quality import closeness
from ..reports.sweep import Cell, Point, summary
from ..reports.table import figure, markdown, percent, plain
from ..reports.timing import shown_seconds
from .store import CellStore


@dataclass(frozen=True)
class Axis:
    """A setting and its values."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A finished sweep; its images are on disk."""

    title: str  # sampler and the settings that all cells share
    store: CellStore
    x: Axis
    y: Axis  # with one value "" without a second setting
    seeds: tuple[int, ...]  # in the order of the cells
    cells: tuple[Cell, ...]  # ordered by y, seed, x

    def points(self) -> list[Point]:
        """All combinations of values, by y and x."""
        points = []
        for y in range(len(self.y.values)):
            for x in range(len(self.x.values)):
                cells = [cell for cell in self.cells if cell.y == y and cell.x == x]
                points.append(summary(cells))

        return points


def sweep_table(sweep: Sweep) -> str:
    """A Markdown table with one row per combination of values; empty columns are omitted."""
    return markdown(_rows(sweep), empty=False)


def sweep_lines(sweep: Sweep) -> list[str]:
    """The table as lines of text, the head first, which say less about how the times were measured."""
    return plain(_rows(sweep, brief=True))


def _rows(sweep: Sweep, brief: bool = False) -> list[list[str]]:
    """The table, the head first: the values of the axes, and the figures."""
    axes = [axis for axis in (sweep.x, sweep.y) if axis.name]
    rows = [
        [*(axis.name for axis in axes), "passes", "diffusion calls", "accepted", "PSNR", "SSIM", "seconds", "speed-up"]
    ]

    for point in sweep.points():
        values = [sweep.x.values[point.x], sweep.y.values[point.y]]
        speedup = ""
        if point.speedup:
            speedup = point.speedup.brief if brief else point.speedup.text

        row = [
            *values[: len(axes)],
            figure(point.passes, "g"),
            figure(point.head_calls, "g"),
            percent(point.acceptance, 1),
            *closeness(point),
            shown_seconds(point.seconds) if brief else point.timed,
            speedup,
        ]
        rows.append(row)

    return rows
