"""Plot a sweep: speed-up against quality of every cell with 95 % intervals, one curve per sampler.

Cells of the Pareto front have a ring. The figures come from the command evaluate.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError, first_line
from ...reports.files import Result, output, save
from .curve import Curve, Point, curve, lines, varying
from .measures import MEASURES
from .store import Store

_ENDINGS = (".png", ".jpg", ".pdf", ".svg")
_HEIGHT = "speed-up, measured: seconds an image, plain / cell\n(median of pairs of shards; bars: quartiles)"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", help="folder of a sweep that was evaluated")
    parser.add_argument("--measure", metavar="NAME", help="default FID, else judge-scene or psnr")
    parser.add_argument("--out", default="curve.png", metavar="FILE", help="the plot; default curve.png")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    figures()  # is matplotlib here?
    out = output(options.out, "out", _ENDINGS)
    assert out is not None

    store = Store(options.folder)
    found = curve(store, options.measure)

    models = ", ".join(dict.fromkeys(cell.model for cell in store.cells()))
    images = [p.images for p in found.points]
    shown = str(min(images)) if min(images) == max(images) else f"{min(images)}-{max(images)}"
    plot = curve_plot(found, f"{models}: {shown} images a cell")

    unsaved = save([Result("out", out, figure_bytes(plot, out))])
    if unsaved:
        raise UserError(unsaved)

    print(f"plot: {out}")
    return 0


def figures() -> Any:
    """matplotlib's Figure, which needs no screen."""
    try:
        from matplotlib.figure import Figure
    except Exception as e:  # beside another numpy it fails in several ways
        raise UserError(
            f"plot: matplotlib cannot be imported ({first_line(e)}); run pip install 'fastar-nodes[scale]'."
        ) from None

    return Figure


def curve_plot(found: Curve, title: str) -> Any:
    """Speed-up against a measure, as a matplotlib figure.

    It has a colour per sampler and a dot per cell with its 95 % interval; the Pareto front is ringed and joined.
    """
    drawn = [p for p in found.points if p.result is not None and p.speed is not None]
    if not drawn:
        raise UserError(
            "measure: no cell of this sweep has both this measure and a speed-up. If the measure is missing, run the "
            "command evaluate, or choose a different measure. If the speed-ups are missing, add the unaccelerated "
            "sampler to the sweep."
        )

    figure = figures()(figsize=(11, 6.8), layout="constrained")
    figure.suptitle(title)

    # A plot of the measure, and beside it a narrow one for every word that takes its place.
    words = list(dict.fromkeys(p.result.word for p in drawn if p.result is not None and p.result.value is None))
    widths = [8] + [1] * len(words)
    axes, *others = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
    axes.set(xlabel=found.title, ylabel=_HEIGHT)
    axes.grid(alpha=0.4)

    places = dict(zip(words, others, strict=True))
    for word, place in places.items():
        place.set_xticks([0], [word])
        place.grid(axis="x")

    for k, sampler in enumerate(dict.fromkeys(p.cell.sampler for p in drawn)):
        points = [p for p in drawn if p.cell.sampler == sampler]
        varied = varying([p.cell for p in points])
        names = ", ".join(name.replace("_", " ") for name in varied)
        label = f"{sampler}\n(labels: {names})" if names else sampler
        _series(axes, places, points, f"C{k}", label)

    _join_fronts(axes, drawn)
    figure.legend(loc="outside right upper", title="rings: Pareto front")
    axes.set_ylim(bottom=0)

    return figure


def _join_fronts(axes: Any, drawn: Sequence[Point]) -> None:
    """Draw a line through the Pareto front of each plain sampler's cells."""
    for plain in dict.fromkeys(p.plain for p in drawn):
        front = []
        for p in drawn:
            across, up = _place(p)
            if p.front and p.plain == plain and across is not None:
                front.append((across, up))

        if len(front) > 1:
            front.sort(key=lambda at: (at[1], at[0]))
            axes.plot(*zip(*front, strict=True), color="0.4", linewidth=0.8, zorder=1)


def _place(p: Point) -> tuple[float | None, float]:
    """The measure of a point, None for a word, and its speed-up."""
    assert p.result is not None
    up = p.speed or 0.0
    if p.result.value is None:
        return None, up

    return p.result.value * MEASURES[p.result.measure].scale, up


def _series(axes: Any, places: dict[str, Any], points: Sequence[Point], colour: str, name: str) -> None:
    """Lines, intervals, dots and rings of a sampler."""
    for line in lines(points):
        path = [_place(p) for p in line if _place(p)[0] is not None]
        axes.plot([x for x, _ in path], [y for _, y in path], color=colour, linewidth=1.5)

    axes.plot([], [], "o", color=colour, label=name)  # for the legend

    for p in points:
        x, y = _place(p)
        assert p.result is not None

        # A point with a word is in the plot of that word.
        on = axes
        across = x
        if x is None:
            on = places[p.result.word]
            across = 0

        if x is not None and p.result.low is not None and p.result.high is not None:
            scale = MEASURES[p.result.measure].scale
            ends = [[x - p.result.low * scale], [p.result.high * scale - x]]
            on.errorbar([x], [y], xerr=np.maximum(ends, 0), color=colour, capsize=3)

        if p.time is not None and p.time.low is not None and p.time.high is not None:
            ends = [[y - p.time.low], [p.time.high - y]]
            on.errorbar([across], [y], yerr=np.maximum(ends, 0), color=colour, linewidth=0.8)

        ring = {"markeredgecolor": "black", "markeredgewidth": 1.8} if p.front else {}
        on.plot([across], [y], "o", color=colour, markersize=9 if p.front else 7, **ring)
        on.annotate(p.label, (across, y), (6, 6), textcoords="offset points", fontsize=8)


def figure_bytes(figure: Any, path: Path) -> bytes:
    """The content of a file with a figure, in the format of the path's ending; images depend on the figure alone."""
    ending = path.suffix.lower()
    metadata = {"Software": None} if ending == ".png" else None

    content = io.BytesIO()
    figure.savefig(content, format=ending[1:], dpi=100, metadata=metadata)
    return content.getvalue()
