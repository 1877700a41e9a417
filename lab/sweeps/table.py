"""Print one table of a sweep: speed, work and quality of every cell.

Several folders of one spec can be given, for example one with many images that was evaluated for quality, and others
with smaller or larger shards for the speed at these batch sizes. Speed-ups are medians over pairs of shards that one
worker drew one after the other, with the first and third quartile. Passes and calls are means per shard of the first
folder, rows are means per image. Figures of quality come from the command evaluate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...reports.table import figure, markdown, percent
from .measures import MEASURES, Result, latest, measured, read_results
from .records import Cell, Shard
from .store import Store, work_of
from .times import Time, paired

# Columns beside the measures: name to title.
WORK = {
    "images": "images",
    "seconds": "s / image",
    "speedup": "speed-up",
    "passes": "passes",
    "target-passes": "passes of the target",
    "head-calls": "head calls",
    "transformer-rows": "transformer rows an image",
    "head-rows": "head rows an image",
    "accepted": "accepted",
    "redraws": "redraws of a rejected token",
}
_USUAL = ("speedup", "passes", "head-calls")
# Mean of an image or of a shard: column to name of the count.
_OF_SHARDS = {"passes": "transformer_passes", "target-passes": "transformer_passes", "head-calls": "head_calls"}
_OF_IMAGES = {"transformer-rows": "transformer_tokens", "head-rows": "head_rows"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="folders of sweeps; those of one spec are printed in the same rows")
    add(
        "--columns",
        metavar="NAMES",
        help=f"separated by commas: {', '.join(WORK)}, and measures of evaluate ({', '.join(MEASURES)}); "
        "default speedup, passes, head-calls and all measures",
    )
    add("--plain", action="store_true", help="only the cells of plain samplers, the baselines")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    sweeps = [read(Store(folder)) for folder in options.folders]
    print(table(sweeps, columns_of(options.columns, sweeps), options.plain))
    return 0


@dataclass(frozen=True)
class Sweep:
    """What a folder holds, by id of the cell."""

    cells: Sequence[Cell]
    shards: Mapping[str, Sequence[Shard]]
    times: Mapping[str, Time]
    results: Mapping[tuple[str, str], Result]  # the last of every cell and measure
    dtype: str  # of the weights, "" if it is not recorded

    @property
    def batch(self) -> int:
        """Images of a whole shard."""
        return max((shard.count for shards in self.shards.values() for shard in shards), default=0)


def read(store: Store) -> Sweep:
    """The content of a folder."""
    cells = store.cells()
    numerics = (store.manifest() or {}).get("numerics")
    dtype = str(numerics.get("dtype", "")) if isinstance(numerics, Mapping) else ""

    shards = {cell.id: store.shards(cell) for cell in cells}
    return Sweep(cells, shards, paired(store), latest(read_results(store)), dtype)


def columns_of(text: str | None, sweeps: Sequence[Sweep]) -> list[str]:
    """The columns that an option names, or the usual ones."""
    if text is None:
        return [*_USUAL, *measured(result for sweep in sweeps for result in sweep.results.values())]

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in WORK and name not in MEASURES:
            raise UserError(f"columns: {name[:60]!r} is not one of {', '.join([*WORK, *MEASURES])}.")

    return names


def same(cell: Cell, dtype: str) -> str:
    """A text that is equal for cells of two folders with the same model, dtype, sampler and settings."""
    return json.dumps([cell.model_digest, dtype, cell.sampler, dict(cell.settings), cell.title], sort_keys=True)


def table(sweeps: Sequence[Sweep], columns: Sequence[str], plain: bool = False) -> str:
    """A Markdown table of folders, whose columns without any content are left out.

    ``plain``: only the rows of plain samplers.
    """
    # The cells of each row by the position of their folder, the rows in the order in which they first occur.
    rows: dict[str, dict[int, Cell]] = {}
    for i, sweep in enumerate(sweeps):
        for cell in sweep.cells:
            if not plain or cell.baseline is None:
                rows.setdefault(same(cell, sweep.dtype), {})[i] = cell

    several_models = len({cell.model for own in rows.values() for cell in own.values()}) > 1
    several_dtypes = len({sweep.dtype for sweep in sweeps}) > 1
    head = ["cell", *_heads(sweeps, columns)]

    out = [head]
    for own in rows.values():
        at, first = next(iter(own.items()))
        title = first.title
        if several_models:
            title = f"{title} ({first.model})"
        if several_dtypes:
            title = f"{title}, {sweeps[at].dtype}"

        row = [title]
        for name in columns:
            row += _entries(name, sweeps, own)
        out.append(row)

    return markdown(out, empty=False)


def _heads(sweeps: Sequence[Sweep], columns: Sequence[str]) -> list[str]:
    """Titles of the columns. Seconds and speed-ups have one for each folder."""
    heads = []
    for name in columns:
        if name in ("seconds", "speedup"):
            heads += [f"{WORK[name]}, batch {sweep.batch}" for sweep in sweeps]
        elif name in _OF_SHARDS:
            heads.append(f"{WORK[name]}, batch {sweeps[0].batch}")
        else:
            heads.append(WORK[name] if name in WORK else MEASURES[name].title)

    return heads


def _entries(name: str, sweeps: Sequence[Sweep], own: Mapping[int, Cell]) -> list[str]:
    """The entries of a row in a column, or in one for each folder."""
    if name in ("seconds", "speedup"):
        entries = []
        for i, sweep in enumerate(sweeps):
            time = sweep.times.get(own[i].id) if i in own else None
            entries.append(_time(name, time, own[i]) if time else "")
        return entries

    if name in WORK:
        i, cell = next(iter(own.items()))
        return [_count(name, sweeps[i].shards[cell.id])]

    found = ""
    for i, cell in own.items():
        result = sweeps[i].results.get((cell.id, name))
        if result is not None:
            found = result.show()
    return [found]


def _time(name: str, time: Time, cell: Cell) -> str:
    """Seconds an image, or the speed-up with its quartiles."""
    if name == "seconds":
        return f"{time.seconds:.3f}"
    if time.speedup is None or cell.baseline is None:
        return ""
    if time.low is None or time.high is None:
        return f"{time.speedup:.2f}"

    return f"{time.speedup:.2f} ({time.low:.2f} to {time.high:.2f})"


def _count(name: str, shards: Sequence[Shard]) -> str:
    """A count of finished shards."""
    work = work_of(shards)
    if name == "images":
        return str(work.images)
    if name == "accepted":
        return percent(work.acceptance, 1)
    if name == "redraws":
        return figure(work.redraws, ".2f")
    if name == "target-passes":
        return figure(work.own_a_run(_OF_SHARDS[name]), ".0f")
    if name in _OF_SHARDS:
        return figure(work.a_run(_OF_SHARDS[name]), ".0f")

    count = _OF_IMAGES[name]
    return figure(work.counts[count] / work.images if count in work.counts else None, ".0f")
