"""Sweep: a sampler over the values of one or two axes and over seeds, as a grid, a plot and a table.

An axis is a setting, the preset, or a subject: a checkpoint, a label or a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from comfy_api.v0_0_2 import io, ui

from ..errors import UserError
from ..networks.torch_state import in_own_state
from ..reports.quality import measure
from ..reports.record import Report
from ..reports.sweep import Cell
from ..reports.values import parse_texts, parse_values
from ..runs import presets
from ..runs.baseline import quality_word
from ..runs.choice import PRESET, Choice, choose, names_of_settings, parse_settings
from ..runs.registry import find
from ..samplers.settings import (
    Settings,
    default_or_full_size,
    in_words,
    knob,
    knobs,
    setting_in_words,
    settings_from,
    unknown_setting_error,
)
from ..sweeps.images import AUTO, MEASURES, measured_by, side_by_side, sweep_grid, sweep_plot
from ..sweeps.keys import cell_key, cell_name, digest
from ..sweeps.plan import CHECKPOINT, LABEL, MOST_CELLS, PROMPT, SUBJECTS, combinations, distinct
from ..sweeps.store import CellStore, completed
from ..sweeps.sweep import Axis, Sweep, sweep_lines, sweep_table
from . import graph, host, samplers
from .host.images import to_image
from .host.loaded import Loaded
from .preview import Bar
from .remaking import Remaker
from .running import (
    CONDITIONS,
    ModelFirst,
    as_labels,
    baseline_choice,
    draw_images,
    expect_loaded,
    expect_pair,
    expect_runnable,
    expect_suited_settings,
    runnable,
    warm_up,
)
from .schema import ANY_DRAFT, ANY_SOCKETS, HIDDEN, SEED_LIMIT, expect_text, output, schema, widgets
from .sent import facts_of
from .sharing import line_of
from .sockets import LabelText, expect_condition

NONE = "none"
_NAME = re.compile(r"[^A-Za-z0-9 ._-]+")


# The preset, the subjects, and the settings of all samplers.
_AXES = (PRESET, *SUBJECTS, *(name for name in names_of_settings(runnable()) if name != PRESET))


@dataclass(frozen=True)
class SweepSettings(Settings):
    """Choices of the node Sweep."""

    sampler: str = knob(
        "fasthybrid",
        "The sampler for all cells. If the name of a sampler contains a plus sign, the sampler combines two methods.",
        choices=tuple(runnable()),
    )
    x: str = knob(
        "threshold",
        "What changes from column to column: a setting or the preset of the chosen sampler, the checkpoint, the "
        "label, or the prompt.",
        choices=_AXES,
        more="For *checkpoint*, the sweep runs the loader that is connected to *model* once for each value. For "
        "*label* or *prompt*, the sweep runs the node that is connected to *condition* once for each value; "
        "this node must be Class Label, Prompt (FastAR), LlamaGen Prompt or Tar Prompt, and must be connected "
        "directly. The models of all checkpoints are in system memory at the same time.",
    )
    y: str = knob(
        NONE,
        "What changes from row to row, with the same choices as x. Usual: none, which gives a single row.",
        choices=(NONE, *_AXES),
    )


@dataclass(frozen=True)
class ViewSettings(Settings):
    """How the node Sweep shows its cells."""

    cell_size: int = knob(
        256,
        "Width of a cell of the grid in pixels. Usual: 256; the sweep makes the cells smaller if the grid would "
        "otherwise be larger than 4096 pixels.",
        low=32,
        high=1024,
        step=8,
        unit="pixels",
        advanced=True,
    )
    measure: str = knob(
        AUTO,
        "What the horizontal axis of the plot shows: closeness to the unaccelerated sampler's image (PSNR, SSIM), "
        "the share of the drafts that were accepted, or the number of transformer passes. Usual: auto, which takes "
        "PSNR. If no cell has a PSNR, auto takes the share of accepted drafts (acceptance); if no cell has drafts "
        "either, auto takes passes.",
        choices=(AUTO, *MEASURES),
        advanced=True,
    )


# Texts of a new node.
_X_VALUES = "0.8, 0.95, 0.99, 1"
_SEEDS = "7"
_FOLDER = "sweep"


def _text(name: str, default: str, tooltip: str, **about: Any) -> io.Input:
    return io.String.Input(name, default=default, tooltip=tooltip, optional=True, **about)


class SweepNode(ModelFirst):
    more = {
        "x_values": (
            "For a setting with choices, write the names of the choices. For checkpoints, write names of files, or "
            "names from the loader's menu without the size, such as *demo, mar-base*."
        ),
        "seeds": "The table and the plot show the medians of times, speed-ups and PSNR, and the means of all other "
        "numbers. A sweep has at most 1024 cells.",
        "folder": "Each cell is a PNG file with its report in the metadata.",
    }
    more_of_outputs = {
        "image": "The image has a column for each value of x, and a row for each value of y and each seed.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        x_values = _text(
            "x_values",
            _X_VALUES,
            "Values of x, one for each column. Separate the values by commas, but prompts by semicolons. Write "
            "0.8..1 x 5 for five evenly spaced values from 0.8 to 1, and 4..8 for the whole numbers from 4 to 8.",
        )
        y_values = _text(
            "y_values",
            "",
            "Values of y, one for each row, written as in x_values. Leave this empty if 'y' is 'none'.",
        )
        seeds = _text(
            "seeds",
            _SEEDS,
            "Write 7 for one seed, or 7..9 for the three seeds 7, 8 and 9. The table and the plot combine the runs "
            "of all seeds.",
        )

        settings = _text(
            "settings",
            "",
            "Settings that all cells share, as name=value, separated by commas, such as preset=fast, steps=32. If "
            "you name no preset here, the sweep uses the preset balanced, if the sampler has it. For all other "
            "settings, the sweep uses the values that the model's file recommends, or else the paper's values.",
            multiline=True,
        )
        folder = _text(
            "folder",
            _FOLDER,
            "Folder in output/fastar_sweeps in which the sweep saves its cells. If a cell is already in this folder, "
            "the sweep does not generate the cell again.",
            advanced=True,
        )

        return schema(
            node_id="FastARSweep",
            display_name="Sweep (FastAR)",
            category="FastAR/compare",
            description="Runs a sampler for every combination of seeds and of values on one or two axes, and shows all "
            "images with their numbers. The node saves finished cells, so an interrupted sweep can go on.",
            search_aliases=["xy plot", "x/y plot", "image grid", "parameter sweep", "grid search", "benchmark"],
            is_output_node=True,
            hidden=HIDDEN,
            sockets=ANY_SOCKETS,
            widgets=[*widgets(SweepSettings), x_values, y_values, seeds, settings, folder, *widgets(ViewSettings)],
            optional=[ANY_DRAFT],
            outputs=[
                output(io.Image, "image", "All cells as one image, with their numbers below them."),
                output(io.String, "table", "The numbers as a Markdown table."),
                output(
                    io.Image, "plot", "Speed-up against the chosen measure, one dot for each combination of values."
                ),
            ],
        )

    @classmethod
    @in_own_state
    def execute(
        cls,
        model: Any,
        condition: Any,
        folder: str = _FOLDER,
        draft: Any = None,
        cell_size: Any = ViewSettings.cell_size,
        measure: Any = ViewSettings.measure,
        **plan: str,
    ) -> io.NodeOutput:
        view = settings_from(ViewSettings, {"cell_size": cell_size, "measure": measure})
        sweep, told = run(cls, model, condition, folder, draft, **plan)

        # 1. The plot.
        warnings: list[str] = []
        axis = measured_by(sweep, view.measure)
        if view.measure not in (AUTO, axis):
            warnings.append(f"measure: this sweep has no {view.measure}, so the horizontal axis shows {axis}.")
        shown = sweep_plot(sweep, axis)
        plot = to_image(shown[None])

        # 2. The grid. Finished cells stay, even if the grid of a large sweep does not fit into an image.
        try:
            cells = sweep_grid(sweep, view.cell_size)
            grid = to_image(cells[None])
            shown = side_by_side(cells, shown)
        except UserError as problem:
            grid = host.queue.ExecutionBlocker(str(problem))  # for a node that needs it
            warnings.append(str(problem))
        images = ui.PreviewImage(to_image(shown[None]), cls=cls).as_dict()

        # 3. The table, as lines if it is short and goes nowhere else.
        lines = [] if graph.taken(cls, 1) else sweep_lines(sweep)
        if len(lines) >= host.text.MOST_LINES:
            lines = []
        shared = in_words(find(sweep.cells[0].report.sampler).settings, _shared(sweep))
        said = host.text.output([told, *lines], warnings, f"all cells: {shared}.")

        told_of_cells = {CELLS: as_samplers(sweep)}
        return io.NodeOutput(grid, sweep_table(sweep), plot, ui={**said, **images, **told_of_cells})


def run(
    node: Any, model: Any, condition: Any, folder: str = _FOLDER, draft: Any = None, **plan: str
) -> tuple[Sweep, str]:
    """Sample what the folder of a sweep does not have yet; returns the sweep, and a sentence about what was sampled."""
    # 1. Check all inputs.
    folder = expect_text(folder, "folder")
    base, x_axis, y_axis, seeds = _plan(**plan)
    loaded, small = expect_pair(model, draft)
    subjects = _subjects(node, _Subject(loaded, condition), x_axis, y_axis)
    for subject in subjects.values():
        expect_runnable(base, subject.loaded, small)

    # 2. Plan the runs: for each seed the plain sampler, then its cells, to keep the two close in time.
    runs = _runs(base, subjects, x_axis, y_axis, seeds)
    for each in runs:
        expect_suited_settings(each.choice, each.subject.loaded)
    names = _names(runs, small)  # reports mistakes in settings before the first cell
    store = CellStore(host.folders.sweep_folder(_folder_name(folder)))
    begins = not store.exists

    # 3. Sample what the folder does not have yet, and measure each cell against the plain sampler with its seed.
    drawer = _Drawer(node, runs, small)
    cells = _cells(runs, names, completed(store, names, drawer.draw))
    cells.sort(key=lambda cell: (cell.y, seeds.index(cell.seed), cell.x))

    # 4. Say what was sampled.
    found = len(names) - drawer.drawn
    told = f"{len(names)} cells generated, including the unaccelerated sampler's cells"
    if begins:
        told = f"{told}, in the new folder {store.name}"
    if found:
        told = f"{found} of {len(names)} cells {'was' if found == 1 else 'were'} in the folder {store.name} already"

    return Sweep(_title(base, runs), store, x_axis, y_axis, tuple(seeds), tuple(cells)), told


class _Drawer:
    """Draws the runs of a sweep, with the node's progress."""

    def __init__(self, node: Any, runs: Sequence[_Run], draft: Loaded[Any] | None) -> None:
        self.drawn = 0
        self._node = node
        self._runs = runs
        self._draft = draft
        self._warm: set[int] = set()
        self._bar = Bar(previews=False)

    def draw(self, k: int) -> tuple[np.ndarray, Report]:
        """Images and report of a run."""
        self.drawn += 1
        run = self._runs[k]
        loaded = run.subject.loaded
        if id(loaded) not in self._warm:  # takes initialisation out of the first cell's seconds
            warm_up(loaded, run.subject.condition)
        self._warm.add(id(loaded))

        host.text.show(self._node, f"cell {k + 1} of {len(self._runs)}")
        self._bar.begin(k, len(self._runs))
        return draw_images(run.choice, loaded, run.subject.condition, run.seed, self._draft, self._bar)


def _cells(runs: Sequence[_Run], names: Sequence[str], made: Iterable[tuple[int, np.ndarray, Report]]) -> list[Cell]:
    """The cells of runs in their order, each measured against the plain sampler with its seed and subject.

    Args:
        made: index, images and report of every run.
    """
    cells: list[Cell] = []
    plain: tuple[np.ndarray, Report] | None = None
    plain_name = ""
    for k, images, report in made:
        run = runs[k]
        if run.plain:
            plain = images, report
            plain_name = names[k]
            continue

        assert plain is not None, "the plain sampler is first"
        plain_images, plain_report = plain
        if names[k] == plain_name:
            report = plain_report  # this cell is the plain sampler's run, not another one beside it
        quality = measure(images, plain_images, quality_word(report, plain_report))
        cells.append(Cell(run.x, run.y, run.seed, names[k], report, plain_report, quality))

    if all(cell.report is cell.baseline for cell in cells):
        return [replace(cell, baseline=None, quality=None) for cell in cells]
    return cells


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is sampled in a run: a model, and what it draws."""

    loaded: Loaded[Any]
    condition: Any


# Values of the axes that are subjects, by name in the order of SUBJECTS.
_Key = tuple[tuple[str, str], ...]


def _subjects(node: Any, usual: _Subject, x: Axis, y: Axis) -> dict[_Key, _Subject]:
    """What is sampled for every combination of the values of axes that are subjects; ``usual`` is on the sockets."""
    remaker = Remaker(node)
    made: dict[str, dict[str, Any]] = {}  # axis to value to what is on its socket
    for axis in (x, y):
        if axis.name in SUBJECTS:
            made[axis.name] = {value: remaker.made(axis.name, value) for value in axis.values}

    models = made.pop(CHECKPOINT, None)
    words = next(iter(made), "")
    found: dict[_Key, _Subject] = {}
    for checkpoint, model in (models or {"": usual.loaded}).items():
        for text, condition in made.get(words, {"": usual.condition}).items():
            asked = {CHECKPOINT: checkpoint, words: text}
            found[_key_of(asked)] = _Subject(expect_loaded(model, "model"), condition)
    return found


def _key_of(asked: Mapping[str, Any]) -> _Key:
    """The subjects among the values of axes."""
    return tuple((name, asked[name]) for name in SUBJECTS if asked.get(name))


@dataclass(frozen=True)
class _Run:
    """A run of a sweep: a sampler at one place of the grid, or the plain one, with one seed."""

    choice: Choice
    seed: int
    subject: _Subject
    x: int = 0
    y: int = 0
    plain: bool = False


def _runs(base: Choice, subjects: Mapping[_Key, _Subject], x: Axis, y: Axis, seeds: Sequence[int]) -> list[_Run]:
    """All runs in their order: of every seed and subject the plain sampler, then the cells."""
    grid: dict[str, Sequence[Any]] = {PRESET: [base.preset], **{name: [value] for name, value in base.values.items()}}
    if y.name:
        grid[y.name] = y.values
    grid[x.name] = x.values

    found = combinations(base.entry, grid)
    runs: list[_Run] = []
    for seed in seeds:
        for key, subject in subjects.items():
            runs.append(_Run(baseline_choice(base, subject.loaded), seed, subject, plain=True))
            for k, combination in enumerate(found):
                row, column = divmod(k, len(x.values))
                if _key_of(combination.asked) == key:
                    runs.append(_Run(combination.choice, seed, subject, column, row))

    return runs


def _title(base: Choice, runs: Sequence[_Run]) -> str:
    """The sampler's title, the preset, and the numbers that the preset and the user set for all cells."""
    cells = [run for run in runs if not run.plain]
    facts = facts_of(cells[0].subject.loaded)
    used = vars(cells[0].choice.settings(facts))
    set_here = presets.values(base.entry.settings, base.preset, facts.demo, facts.width)

    names = [name for name in {**set_here, **base.values} if used.get(name) is not None]
    varied = {name for run in cells for name in run.choice.values} - set(base.values)
    numbers = ", ".join(setting_in_words(name, used[name]) for name in names if name not in varied)

    preset = f", {base.preset}" if set_here else ""
    return f"{base.entry.title}{preset}: {numbers}" if numbers else base.entry.title


def _shared(sweep: Sweep) -> dict[str, Any]:
    """The settings in which no two cells differ."""
    first, *others = [cell.report.settings for cell in sweep.cells]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


# Name in the output of the node for the editor: its cells as samplers, see web/js/sweep.js.
CELLS = "fastar_cells"
_MOST_IN_MENU = 64
_SAMPLERS = {node.node_id for node in samplers.NODES if hasattr(node, "node_id")}


def as_samplers(sweep: Sweep) -> list[dict[str, Any]]:
    """Each cell of the first seed as a node that samples it again on the sweep's inputs, where they are no axis.

    Returns:
        "label" says which cell it is, "node" is the type of a node, and "widgets" holds the values of its widgets. None
        of a sweep with more cells than a menu can list.
    """
    if len(sweep.cells) > _MOST_IN_MENU * len(sweep.seeds):
        return []

    found: list[dict[str, Any]] = []
    for cell in sweep.cells:
        if cell.seed != sweep.seeds[0]:
            continue

        values = [(sweep.x, cell.x), (sweep.y, cell.y)]
        label = ", ".join(f"{axis.name} {axis.values[k]}" for axis, k in values if axis.name)
        node = find(cell.report.sampler).node
        given = {name: value for name, value in cell.report.settings.items() if value is not None}
        widgets: dict[str, Any] = {PRESET: presets.CUSTOM, **given}
        if node not in _SAMPLERS:  # a combination of two methods, or Tar, which is LlamaGen's
            node = "FastARAnySampler"
            line, _ = line_of(cell.report)
            widgets = {"sampler": line}
        found.append({"label": label, "node": node, "widgets": {**widgets, "seed": cell.seed}})

    return found


def _folder_name(text: str) -> str:
    """A typed text as the name of a folder."""
    return _NAME.sub("_", text.strip())[:80].strip(". ") or _FOLDER


def _plan(
    sampler: str = SweepSettings.sampler,
    x: str = SweepSettings.x,
    y: str = SweepSettings.y,
    x_values: str = _X_VALUES,
    y_values: str = "",
    seeds: str = _SEEDS,
    settings: str = "",
) -> tuple[Choice, Axis, Axis, list[int]]:
    """The choice that all cells share, both axes and the seeds."""
    texts = {"x_values": x_values, "y_values": y_values, "seeds": seeds, "settings": settings}
    for field, text in texts.items():
        expect_text(text, field)

    chosen = settings_from(SweepSettings, {"sampler": sampler, "x": x, "y": y})
    base = _base(chosen, parse_settings(settings, "settings"))

    if x == y:
        raise UserError(
            f"y: the input x already sweeps over {y}; choose a different setting for y, or set y to {NONE}."
        )
    if {x, y} == {LABEL, PROMPT}:
        raise UserError(
            "y: a model reads either labels or prompts, so one sweep cannot change both; choose something else for y, "
            f"or set y to {NONE}."
        )
    x_axis = _axis(base, "x", x, x_values)
    y_axis = Axis("", ("",)) if y == NONE else _axis(base, "y", y, y_values)

    for name in (x, y):
        preset_given = name == PRESET and base.preset != presets.CUSTOM
        if name in base.values or preset_given:
            raise UserError(f"settings: the sweep already changes {name!r}; remove {name!r} from settings.")

    numbers: list[int] = []
    for text in parse_values(seeds, "seeds", whole=True):
        if not text.isdecimal() or int(text) > SEED_LIMIT:
            raise UserError(
                f"seeds: {text[:60]!r} is not a whole number from 0 to {SEED_LIMIT}; give a number such as 7, or a "
                "range such as '7..9'."
            )
        numbers.append(int(text))
    numbers = list(dict.fromkeys(numbers))

    cells = len(x_axis.values) * len(y_axis.values) * len(numbers)
    if cells > MOST_CELLS:
        raise UserError(
            f"x_values: the sweep would have {cells} cells, but at most {MOST_CELLS} are allowed; give "
            "fewer values or seeds."
        )

    return base, x_axis, y_axis, numbers


def _base(chosen: SweepSettings, settings: Mapping[str, str]) -> Choice:
    """The choice that all cells share: without a preset, that with which a new node of the sampler begins."""
    kind = find(chosen.sampler).settings
    has_presets = bool(presets.values(kind, presets.BALANCED, demo=True))
    usual = {PRESET: presets.BALANCED} if has_presets and PRESET not in (chosen.x, chosen.y) else {}
    return choose(chosen.sampler, {**usual, **settings})


def _axis(base: Choice, field: str, name: str, text: str) -> Axis:
    """An axis, its values checked."""
    if name in SUBJECTS:
        separators = ";" if name == PROMPT else ",;"
        return Axis(name, parse_texts(text, f"{field}_values", separators))

    known = knobs(base.entry.settings)
    if name in base.entry.settings.refused:
        raise unknown_setting_error(base.entry.settings, name)
    if name != PRESET and name not in known:
        raise UserError(
            f"{field}: {base.entry.name} has no setting {name}; choose one of {', '.join([PRESET, *known])}."
        )

    whole = False
    if name in known:
        whole = type(default_or_full_size(*known[name])) is int  # a switch is a bool
    values = parse_values(text, f"{field}_values", whole)

    try:
        return Axis(name, tuple(distinct(base.entry, name, values)))
    except UserError as problem:
        raise UserError(f"{field}_values: {problem}") from None


def _names(runs: Sequence[_Run], draft: Loaded[Any] | None) -> list[str]:
    """A name for every run, by all that its image and its seconds depend on."""
    digests = {id(run.subject): _digests(run.subject, draft) for run in runs}

    names: list[str] = []
    for run in runs:
        models, drawn = digests[id(run.subject)]
        settings = asdict(run.choice.settings(facts_of(run.subject.loaded)))
        key = cell_key(models, drawn, host.devices.device_name(), run.choice.entry.name, settings, run.seed)
        # Without the values of the axes: a cell of other axes with the same settings is the same.
        names.append(cell_name(f"{run.choice.entry.name} seed {run.seed}", key, digits=16))
    return names


def _digests(subject: _Subject, draft: Loaded[Any] | None) -> tuple[str, str]:
    """Digests of everything that the loaders decided, and of what is drawn."""
    loaded = subject.loaded
    assert loaded.vae is not None
    condition = expect_condition(subject.condition, CONDITIONS)
    if isinstance(condition, LabelText):
        condition = as_labels(condition, loaded.model.label_set)

    made = [[one.model.name, one.model, one.speed] for one in (loaded, draft) if one is not None]
    parts = {name: part.model for name, part in loaded.parts.items()}
    return digest(made, parts, loaded.vae.first_stage_model), digest(condition)


# Nodes of earlier versions that drew a sweep: the output of Sweep that has their image, and their widget, which is
# Sweep's too. The editor has the same in web/js/sweep.js.
_EARLIER = {"FastARSweepGrid": (0, "cell_size"), "FastARSweepPlot": (2, "measure")}


def convert(request: Any) -> None:
    """Let what takes the image of Sweep Grid or Sweep Plot take it from their Sweep, in a prompt of an earlier version.

    Args:
        request: the JSON of the request, of any shape; the graph in it is changed.
    """
    nodes = request.get("prompt") if isinstance(request, dict) else None
    if not isinstance(nodes, dict):
        return

    for number, entry in list(nodes.items()):
        earlier = _EARLIER.get(graph.type_of(entry))
        inputs = graph.inputs_of(entry)
        source = graph.source_of(inputs.get("sweep"))
        if earlier is None or source is None or graph.type_of(nodes.get(source[0])) != "FastARSweep":
            continue

        sweep = nodes[source[0]]
        output_number, widget = earlier
        if widget in inputs and isinstance(sweep.get("inputs"), dict):
            sweep["inputs"].setdefault(widget, inputs[widget])

        del nodes[number]
        for other in nodes.values():
            for name, value in graph.inputs_of(other).items():
                if graph.source_of(value) == (number, 0):
                    other["inputs"][name] = [source[0], output_number]


NODES: list[type[io.ComfyNode]] = [SweepNode]
