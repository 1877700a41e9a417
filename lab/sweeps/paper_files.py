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

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...cli.planning import by_key
from ...errors import UserError
from ...reports.table import figure, literal, markdown
from .folder import Folder
from .measures import MEASURES, Result, latest, read_results
from .records import Cell
from .records import whole as in_range
from .spec import Spec, from_table, variant_words
from .store import Store, work_of
from .times import Time, paired

PAPER = "paper.json"


@dataclass(frozen=True)
class Measured:
    """A figure of papers that sweeps have too."""

    title: str  # in tables
    form: str  # format of our value
    scale: float = 1.0  # for display


# The first two are measures of the command evaluate, which need its reference. The others come with a sweep.
FIGURES: dict[str, Measured] = {
    "fid": Measured("FID", ".2f"),
    "is": Measured("IS", ".1f"),
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
    cell: str = ""  # "sweep/entry of its samplers"; "" if it cannot be run
    timed: str = ""  # the cell of its seconds, speed-up, memory and acceptance; "" for the same
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
            if any(row.cell.startswith(f"{sweep}/") for row in table.rows):
                wanted.update(table.columns)

        return [name for name in FIGURES if name in wanted and name in MEASURES]


def is_paper(table: Mapping[str, Any]) -> bool:
    """Whether the entries of a file are a paper's; otherwise they are a spec's."""
    return "paper" in table


# Entries of a paper's file that are no entries of a spec.
_OWN = ("paper", "sweeps", "tables", "not_measured", "notes")


def paper_of(source: Mapping[str, Any]) -> Paper:
    """A paper from the entries of a file. Sweeps have the entries of all, then their own."""
    shared = {name: value for name, value in source.items() if name not in _OWN}
    sweeps: dict[str, Spec] = {}
    for own in source["sweeps"]:
        settings = {**shared.get("set", {}), **own.get("set", {})}
        entries = {**shared, **own, "set": settings}
        name = entries.pop("name")
        sweeps[name] = from_table(entries)

    tables = []
    for about in source["tables"]:
        rows = tuple(Row(**row) for row in about["rows"])
        columns = about.get("columns") or dict.fromkeys(name for row in rows for name in row.figures)
        tables.append(Table(about["title"], rows, tuple(columns)))

    return Paper(
        paper=source["paper"],
        sweeps=sweeps,
        tables=tuple(tables),
        not_measured=source.get("not_measured", {}),
        notes=tuple(source.get("notes", ())),
        source=source,
    )


def title_of(sampler: str) -> str:
    """Title of the cell of an entry of a spec's samplers whose settings have one value each."""
    ((key, entry),) = by_key([sampler]).items()
    variant = variant_words(key)

    return f"{entry.title}, {variant}" if variant else entry.title


def keep(folder: Folder, paper: Paper) -> None:
    """Write a copy of a paper's file to its folder.

    Raises:
        UserError: the folder holds another paper's.
    """
    before = stored(folder)
    if before is not None and before.paper != paper.paper:
        raise UserError(
            f"out: {folder.path} holds the sweeps of {before.paper}, but the given file is for the sweeps of "
            f"{paper.paper}; choose a different folder with --out."
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
        store = Store(folder.path / name)
        if store.manifest() is not None:
            found[name] = store

    return found


def comparison(paper: Paper, begun: Mapping[str, Store]) -> str:
    """The paper's tables in Markdown, our figures beside the paper's; ``begun``: the sweeps, see :func:`stores`."""
    ours: dict[str, dict[str, str]] = {}
    for name, store in begun.items():
        for sampler, figures in _figures(store, paper.sweeps[name]).items():
            ours[f"{name}/{sampler}"] = figures

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


def _compared(table: Table, ours: Mapping[str, Mapping[str, str]]) -> str:
    """A table in Markdown."""
    head = ["row", "images"]
    for name in table.columns:
        title = FIGURES[name].title if name in FIGURES else name
        head += [f"{title}, paper", f"{title}, here"] if name in FIGURES else [f"{title}, paper"]
    head.append("not run")

    rows = [head]
    for row in table.rows:
        own = ours.get(row.cell, {})
        timed = ours.get(row.timed or row.cell, {})

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
    return result.against not in cells and (bool(result.against) or result.measure == "is")


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
