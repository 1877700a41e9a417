"""Papers' tables: a file with several sweeps, and the figures that a paper printed for their cells.

    paper = "FastHybrid, CVPR 2026"
    images = 50000                        # entries of a spec, for all sweeps

    [set]
    steps = 64

    [not_measured]                        # figures of the paper that we have no measure for, and why
    GenEval = "it needs a detector"

    [[sweeps]]                            # a name, and entries of a spec
    name = "base"
    model = "mar-base-ema"
    samplers = ["mar", "fasthybrid"]      # speed-ups are relative to the first

    [[tables]]
    title = "Main results"
    rows = [
      { row = "MAR-B-64", cell = "base/mar", figures = { fid = "2.32" } },
      { row = "FastHybrid-B-64", cell = "base/fasthybrid", figures = { fid = "2.43", speedup = "1.97" } },
      { row = "DiT-XL/2", skipped = "not a model of this pack", figures = { fid = "2.27" } },
    ]

Figures are text, so that they are printed as the paper prints them. The folder of a paper holds ``paper.json``, a copy
of the file, and the folder of each sweep under its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...cli.planning import by_key, variant_words
from ...errors import UserError, first_line
from ...reports.table import figure, literal, markdown
from .folder import Folder
from .measures import MEASURES, Result, latest, read_results
from .records import ID, Cell
from .records import whole as in_range
from .spec import Spec, expand, from_table
from .store import Store, work_of
from .times import Time, paired

PAPER = "paper.json"


@dataclass(frozen=True)
class Measured:
    """A figure of papers that sweeps have too."""

    title: str  # in tables
    form: str  # format of our value
    scale: float = 1.0  # for display


# The first ones are measures of the command evaluate; all but tflop need its reference. The others come with a sweep.
FIGURES: dict[str, Measured] = {
    "fid": Measured("FID", ".2f"),
    "is": Measured("IS", ".1f"),
    "tflop": Measured("TFLOP", ".2f", 1e-12),
    "seconds": Measured("s / image", ".3f"),
    "speedup": Measured("speed-up", ".2f"),
    "memory": Measured("memory, MB", ".0f", 2**-20),
    "passes": Measured("passes", ".0f"),
    "acceptance": Measured("acceptance", ".2f"),
    "redraws": Measured("redraws a rejected token", ".2f"),
}


@dataclass(frozen=True)
class Row:
    """A row of a paper's table."""

    row: str  # its name in the paper
    cell: tuple[str, str] = ("", "")  # name of the sweep and entry of its samplers; empty if it cannot be run
    # The same of the cell that its seconds, speed-up, memory and acceptance are taken from, if that is another one.
    timed: tuple[str, str] = ("", "")
    skipped: str = ""  # why it cannot be run, or ""
    figures: Mapping[str, str] = field(default_factory=dict)  # the paper's, by names of FIGURES or not_measured


@dataclass(frozen=True)
class Table:
    """A table of a paper."""

    title: str  # with its number, where that is known
    rows: tuple[Row, ...]
    columns: tuple[str, ...]  # names of figures


@dataclass(frozen=True)
class Paper:
    """A paper's file."""

    paper: str  # its name
    sweeps: Mapping[str, Spec]  # by name
    tables: tuple[Table, ...]
    not_measured: Mapping[str, str]  # title of a figure to the reason why it is not measured
    notes: tuple[str, ...]  # what to know when the figures are compared
    source: Mapping[str, Any]  # the entries of the file

    def measures(self, sweep: str) -> list[str]:
        """Measures of the command evaluate that the tables have of a sweep; [] for one whose times alone they have."""
        wanted: set[str] = set()
        for table in self.tables:
            if any(row.cell[0] == sweep for row in table.rows):
                wanted.update(table.columns)

        return [name for name in FIGURES if name in wanted and name in MEASURES]


def is_paper(table: Mapping[str, Any]) -> bool:
    """Whether the entries of a file are a paper's; otherwise they are a spec's."""
    return "paper" in table


# Entries of a paper's file that are no entries of a spec.
_OWN = ("paper", "sweeps", "tables", "not_measured", "notes")


def paper_of(source: Mapping[str, Any]) -> Paper:
    """A paper from the entries of a file.

    Raises:
        UserError: an entry is missing, unknown or of a wrong type, or a row names no cell.
    """
    try:
        return _paper(source)
    except (AttributeError, KeyError, TypeError) as problem:
        what = f"{type(problem).__name__}: {first_line(problem)}"
        raise UserError(
            f"paper: an entry is missing, unknown or of a wrong type ({what}); lab/papers has examples."
        ) from None


def _paper(source: Mapping[str, Any]) -> Paper:
    """See :func:`paper_of`; entries of a wrong type raise what Python raises."""
    shared = {name: value for name, value in source.items() if name not in _OWN}
    sweeps: dict[str, Spec] = {}
    for entry in source["sweeps"]:
        name, spec = _sweep(shared, **entry)
        if name in sweeps:
            raise UserError(f"sweeps: two are named {name!r}; give each its own name.")
        sweeps[name] = spec

    not_measured = {title: _text(why) for title, why in source.get("not_measured", {}).items()}
    known = [*FIGURES, *not_measured]
    tables = tuple(_table(sweeps, known, **entry) for entry in source["tables"])

    notes = source.get("notes", [])
    if not isinstance(notes, list):
        raise TypeError("notes are no list")
    return Paper(_text(source["paper"]), sweeps, tables, not_measured, tuple(map(_text, notes)), source)


def _text(value: Any) -> str:
    """An entry that is a text."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:60]!r} is no text")
    return value


def _sweep(shared: Mapping[str, Any], name: str, **own: Any) -> tuple[str, Spec]:
    """Name and spec of a sweep: the entries of all sweeps, then its own."""
    if not ID.fullmatch(name):
        raise UserError(f"sweeps: the name {name[:60]!r} cannot be that of a folder; write letters, digits and dashes.")

    try:
        settings = {**shared.get("set", {}), **own.get("set", {})}
        return name, from_table({**shared, **own, "set": settings})
    except UserError as problem:
        raise UserError(f"sweeps: in {name}, {problem}") from None


def _table(
    sweeps: Mapping[str, Spec],
    known: Sequence[str],
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | None = None,
) -> Table:
    """A table of the file; ``known``: names of figures. Its columns are those of its rows if it names none."""
    made = tuple(_row(sweeps, known, **row) for row in rows)
    if columns is None:
        columns = list(dict.fromkeys(name for row in made for name in row.figures))

    for name in columns:
        _known_figure(name, known)
    return Table(_text(title), made, tuple(columns))


def _row(
    sweeps: Mapping[str, Spec],
    known: Sequence[str],
    row: str,
    cell: str = "",
    timed: str = "",
    skipped: str = "",
    figures: Mapping[str, str] = MappingProxyType({}),
) -> Row:
    """A row of a table."""
    for name, value in figures.items():
        _known_figure(name, known)
        _text(value)

    if skipped:
        return Row(_text(row), skipped=_text(skipped), figures=dict(figures))

    place = _place(cell, row, sweeps)
    return Row(_text(row), place, _place(timed, row, sweeps) if timed else place, figures=dict(figures))


def _known_figure(name: Any, known: Sequence[str]) -> None:
    """Check the name of a figure."""
    if name not in known:
        raise UserError(
            f"figures: {str(name)[:60]!r} is not one of {', '.join(known)}; add it to not_measured, with a reason."
        )


def _place(text: str, row: str, sweeps: Mapping[str, Spec]) -> tuple[str, str]:
    """Sweep and sampler of "sweep/sampler"; the sampler has one cell in the sweep."""
    sweep, _, sampler = text.partition("/")
    found = [combination.title for combination in expand(sweeps[sweep])]
    keys = by_key(sweeps[sweep].samplers)
    if sampler not in keys or title_of(sampler) not in found:
        raise UserError(
            f"rows: {row} names {sampler[:60]!r} in {sweep}, which has no single cell of it; choose one of "
            f"{', '.join(keys)}, or write a variant for each value of a list."
        )

    return sweep, sampler


def title_of(sampler: str) -> str:
    """Title of the cell of an entry of a spec's samplers whose settings have one value each."""
    ((key, entry),) = by_key([sampler]).items()
    variant = variant_words(key)

    return f"{entry.title}, {variant}" if variant else entry.title


def place(folder: str | Path, sweep: str) -> Path:
    """The folder of a sweep of a paper."""
    return Path(folder) / sweep


def keep(folder: Folder, paper: Paper) -> None:
    """Write a copy of a paper's file to its folder.

    Raises:
        UserError: the folder holds another paper's.
    """
    before = stored(folder)
    if before is not None and before.paper != paper.paper:
        raise UserError(
            f"out: {folder.path} holds the sweeps of {before.paper}, and this file is of {paper.paper}; "
            "name another --out."
        )

    folder.write_json(PAPER, paper.source)


def stored(folder: Folder) -> Paper | None:
    """The paper whose sweeps a folder holds; None if it holds none."""
    found = folder.read_json(PAPER)
    return None if found is None else paper_of(found)


def stores(folder: Folder, paper: Paper) -> dict[str, Store]:
    """The sweeps of a paper that are begun, by name."""
    found = {}
    for name in paper.sweeps:
        store = Store(place(folder.path, name))
        if store.manifest() is not None:
            found[name] = store

    return found


def comparison(paper: Paper, begun: Mapping[str, Store]) -> str:
    """The paper's tables in Markdown, our figures beside the paper's; ``begun``: the sweeps, see :func:`stores`."""
    ours: dict[tuple[str, str], dict[str, str]] = {}
    for name, store in begun.items():
        for sampler, figures in _figures(store, paper.sweeps[name]).items():
            ours[name, sampler] = figures

    parts = [f"# {literal(paper.paper)}"]
    for table in paper.tables:
        parts.append(f"## {literal(table.title)}\n\n{_compared(table, ours)}")

    shown = {name for table in paper.tables for name in table.columns}
    remarks = []
    for title, why in paper.not_measured.items():
        if title in shown:
            remarks.append(f"- {literal(title)} is not measured here: {literal(why)}.")
    for note in paper.notes:
        remarks.append(f"- {literal(note)}")

    if remarks:
        parts.append("\n".join(remarks))

    return "\n\n".join(parts)


# Figures that are taken from the cell that is timed.
_OF_TIMES = ("seconds", "speedup", "memory", "acceptance", "redraws")


def _compared(table: Table, ours: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """A table in Markdown."""
    head = ["row", "images"]
    for name in table.columns:
        title = FIGURES[name].title if name in FIGURES else name
        head += [f"{title}, paper", f"{title}, here"] if name in FIGURES else [f"{title}, paper"]
    head.append("not run")

    rows = [head]
    for row in table.rows:
        own = ours.get(row.cell, {})
        timed = ours.get(row.timed, {})

        cells = [row.row, own.get("images", "")]
        for name in table.columns:
            cells.append(row.figures.get(name, ""))
            if name in FIGURES:
                cells.append((timed if name in _OF_TIMES else own).get(name, ""))
        rows.append([*cells, row.skipped])

    return markdown(rows, empty=False)


def _figures(store: Store, spec: Spec) -> dict[str, dict[str, str]]:
    """Our figures of a sweep as text, by entry of its samplers and by name of the figure; "images" is their number."""
    cells = {cell.title: cell for cell in store.cells()}
    samplers = [sampler for sampler in by_key(spec.samplers) if title_of(sampler) in cells]
    if not samplers:
        return {}

    ids = {cell.id for cell in cells.values()}
    results = latest(result for result in read_results(store) if _of_reference(result, ids))
    times = paired(store, cells[title_of(samplers[0])])

    found = {}
    for sampler in samplers:
        cell = cells[title_of(sampler)]
        values = {**_of_shards(store, cell), **_of_time(times.get(cell.id))}
        for name in FIGURES:
            result = results.get((cell.id, name))
            if result is not None:
                values[name] = result.value

        figures = {"images": str(sum(shard.count for shard in store.shards(cell)))}
        for name, about in FIGURES.items():
            figures[name] = figure(values.get(name), about.form, scale=about.scale)
        found[sampler] = figures

    return found


def _of_reference(result: Result, cells: Collection[str]) -> bool:
    """Whether a result compares with reference images or with nothing, as papers do, and not with another cell."""
    return result.against not in cells and (bool(result.against) or result.measure in ("is", "tflop"))


def _of_time(time: Time | None) -> dict[str, float | None]:
    """Figures of a cell's times."""
    return {} if time is None else {"seconds": time.seconds, "speedup": time.speedup}


def _of_shards(store: Store, cell: Cell) -> dict[str, float]:
    """Figures of what a cell's shards recorded: passes, share of accepted drafts, peak memory."""
    work = work_of(store.shards(cell))
    known = {
        "passes": work.a_run("transformer_passes"),
        "acceptance": work.acceptance,
        "redraws": work.redraws,
    }
    found = {name: value for name, value in known.items() if value is not None}

    peaks: list[int] = []
    for times in store.times(cell).values():
        peak: Any = times.get("peak_memory_bytes")
        if in_range(peak, 1, 1 << 50):
            peaks.append(peak)
    if peaks:
        found["memory"] = max(peaks)

    return found
