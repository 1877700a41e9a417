"""Sweep nodes: a sampler over the values of one or two settings and over seeds, as a grid and as a plot."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from comfy_api.latest import io

from ..errors import UserError
from ..reports.quality import Quality, measure
from ..reports.record import Report
from ..reports.sweep import Axis, Cell, CellStore, Sweep, combinations, completed, digest, sweep_table, weights_digest
from ..reports.sweep_images import MEASURES, sweep_grid, sweep_plot
from ..reports.values import parse_values
from ..samplers import presets
from ..samplers.baseline import word_for
from ..samplers.choice import PRESET, Choice, choose, names_of_settings, parse_settings
from ..samplers.settings import Settings, knob, knobs, make, no_setting, number_of
from . import host
from .host import Loaded
from .images import to_image
from .running import (
    RUNNABLE,
    LabelText,
    ModelFirst,
    as_labels,
    baseline_choice,
    draw_images,
    expect_pair,
    expect_runnable,
    expect_suited_settings,
    settings_for,
    warm_up,
)
from .schema import ANY_DRAFT, ANY_SOCKETS, HIDDEN, SEED_LIMIT, expect, output, schema, widgets

SWEEP = io.Custom("FASTAR_SWEEP")
NONE = "none"
_NAME = re.compile(r"[^A-Za-z0-9 ._-]+")


@dataclass(frozen=True)
class SweepSettings(Settings):
    """Choices of the node Sweep."""

    sampler: str = knob("fasthybrid", "The sampler of all cells. A plus combines two methods.", choices=tuple(RUNNABLE))
    x: str = knob(
        "threshold",
        "The setting that changes from column to column. It must be one of the chosen sampler's.",
        choices=tuple(names_of_settings(RUNNABLE)),
    )
    y: str = knob(
        NONE,
        "The setting that changes from row to row. Usual: none, for a single row.",
        choices=(NONE, *names_of_settings(RUNNABLE)),
    )


def _text(name: str, default: str, tooltip: str, **about: Any) -> io.Input:
    return io.String.Input(name, default=default, tooltip=tooltip, **about)


class SweepNode(ModelFirst):
    @classmethod
    def define_schema(cls) -> io.Schema:
        x_values = _text(
            "x_values",
            "0.8, 0.9, 0.95, 0.99",
            "Values of x, one column each, separated by commas. 0.8..1 x 5 means five evenly spaced values, 4..8 whole "
            "numbers in steps of 1.",
        )
        y_values = _text(
            "y_values",
            "",
            "Values of y, one row each, written as in x_values. Leave it empty if y is none.",
        )
        seeds = _text("seeds", "7", "Seeds, such as 7, or 7..9 for three. The figures are means over them.")

        settings = _text(
            "settings",
            "",
            "Settings that all cells share, as name=value, separated by commas, such as preset=balanced, steps=32. "
            "All others come from the preset, the model's file and the paper.",
            multiline=True,
        )
        folder = _text(
            "folder",
            "sweep",
            "Folder for the cells, in output/fastar_sweeps. Finished cells in it are not drawn again.",
            advanced=True,
        )

        return schema(
            node_id="FastARSweep",
            display_name="Sweep (FastAR)",
            category="FastAR/compare",
            description="Runs a sampler for every combination of values of one or two settings and of seeds, and the "
            "plain sampler for comparison. Finished cells are saved, so that an interrupted sweep continues where it "
            "stopped.",
            search_aliases=["xy plot", "x/y plot", "parameter sweep", "grid search", "benchmark"],
            hidden=HIDDEN,
            sockets=ANY_SOCKETS,
            widgets=[*widgets(SweepSettings), x_values, y_values, seeds, settings, folder],
            optional=[ANY_DRAFT],
            outputs=[
                output(SWEEP, "sweep", "For Sweep Grid and Sweep Plot."),
                output(io.String, "table", "The figures as a Markdown table."),
            ],
        )

    @classmethod
    def execute(
        cls, model: Any, condition: Any, folder: str = "sweep", draft: Any = None, **plan: str
    ) -> io.NodeOutput:
        # 1. Check all inputs.
        base, x_axis, y_axis, seeds = _plan(**plan)
        loaded, small = expect_pair(model, draft)
        expect_runnable(base, loaded, small)

        # 2. Plan the runs: the plain sampler once a seed, then the cells.
        cells = combinations(x_axis, y_axis, seeds)
        plain = baseline_choice(base, loaded)
        jobs = [(plain, seed) for seed in seeds]
        for i, j, seed in cells:
            jobs.append((base.with_values(_values(x_axis, y_axis, i, j)), seed))

        for choice, _ in jobs:
            expect_suited_settings(choice, loaded)
        keys = _keys(jobs, loaded, small, condition)  # reports mistakes in settings before the first cell
        store = CellStore(host.sweep_folder(_folder_name(folder)))

        # 3. Sample what the folder does not have yet, and measure each cell against the plain sampler with its seed.
        sampled: list[int] = []

        def draw(k: int) -> tuple[np.ndarray, Report]:
            """Images and report of a cell."""
            choice, seed = jobs[k]
            if not sampled:  # takes the initialisation of libraries out of the first cell's seconds
                warm_up(loaded, condition)
            sampled.append(k)

            host.show(cls, f"cell {k + 1} of {len(jobs)}")
            return draw_images(choice, loaded, condition, seed, small)

        made: list[Cell] = []
        reports: list[Report] = []
        for k, images, report in completed(store, keys, draw):
            reports.append(report)
            if k < len(seeds):  # a run of the plain sampler
                continue

            i, j, seed = cells[k - len(seeds)]
            plain_run = seeds.index(seed)
            quality = _quality(images, report, store.read(keys[plain_run]))
            made.append(Cell(i, j, seed, keys[k], report, reports[plain_run], quality))

        # 4. Say what was sampled.
        found = len(keys) - len(sampled)
        said = host.text_output([f"{len(sampled)} of {len(keys)} cells sampled, {found} were in {store.folder.name}"])

        sweep = Sweep(_title(base), store, x_axis, y_axis, tuple(seeds), tuple(made))
        return io.NodeOutput(sweep, sweep_table(sweep), ui=said)


def _title(base: Choice) -> str:
    """The sampler's title and the settings that all cells share."""
    _, _, settings = base.text.partition(": ")
    return f"{base.entry.title}: {settings}" if settings else base.entry.title


def _quality(images: np.ndarray, report: Report, reference: tuple[np.ndarray, Report] | None) -> Quality | None:
    """Distance of a cell's images from the plain sampler's; None if those are missing in the folder."""
    if reference is None:
        return None

    plain_images, plain_report = reference
    return measure(images, plain_images, word_for(report, plain_report))


def _folder_name(text: str) -> str:
    """A typed text as the name of a folder."""
    return _NAME.sub("_", text.strip())[:80].strip(". ") or "sweep"


def _plan(
    sampler: str, x: str, y: str, x_values: str, y_values: str, seeds: str, settings: str
) -> tuple[Choice, Axis, Axis, list[int]]:
    """The choice that all cells share, both axes and the seeds."""
    chosen = make(SweepSettings, {"sampler": sampler, "x": x, "y": y})
    base = choose(chosen.sampler, parse_settings(settings, "settings"))

    if x == y:
        raise UserError(f"y: {y} is on the other axis too; choose another setting, or none.")
    x_axis = _axis(base, "x", x, x_values)
    y_axis = Axis("", ("",)) if y == NONE else _axis(base, "y", y, y_values)

    for name in (x, y):
        preset_given = name == PRESET and base.preset != presets.CUSTOM
        if name in base.values or preset_given:
            raise UserError(f"settings: {name} is already an axis; leave it out here.")

    numbers: list[int] = []
    for text in parse_values(seeds, "seeds", whole=True):
        if not text.isdecimal() or int(text) > SEED_LIMIT:
            raise UserError("seeds: give whole numbers from 0 up, such as 7, or 7..9.")
        numbers.append(int(text))

    return base, x_axis, y_axis, numbers


def _axis(base: Choice, field: str, name: str, text: str) -> Axis:
    """The axis of a setting, its values checked."""
    known = knobs(base.entry.settings)
    if name in base.entry.settings.refused:
        raise no_setting(base.entry.settings, name, field, "")
    if name != PRESET and name not in known:
        raise UserError(f"{field}: {base.entry.name} has no setting {name}; it has {', '.join([PRESET, *known])}.")

    whole = False
    if name in known:
        whole = type(number_of(*known[name])) is int  # a switch is a bool
    values = parse_values(text, f"{field}_values", whole)

    for value in values:
        try:
            base.with_values({name: value})
        except UserError as problem:
            raise UserError(f"{field}_values: {problem}") from None

    return Axis(name, values)


def _values(x: Axis, y: Axis, i: int, j: int) -> dict[str, str]:
    """The settings of a cell; ``y`` has no name if there is one axis only."""
    values = {x.name: x.values[i]}
    if y.name:
        values[y.name] = y.values[j]
    return values


def _keys(
    jobs: Sequence[tuple[Choice, int]], loaded: Loaded[Any], draft: Loaded[Any] | None, condition: Any
) -> list[str]:
    """A digest for every cell, of all that its image and its seconds depend on."""
    assert loaded.vae is not None
    if isinstance(condition, LabelText):
        condition = as_labels(condition, loaded.model.label_set)

    # What all cells share.
    models = [loaded] if draft is None else [loaded, draft]
    nets = [loaded.vae.first_stage_model, *(one.model.net for one in models)]
    weights = [weights_digest(net) for net in nets]
    how = [host.device_name(), *(one.speed for one in models)]
    shared = digest([loaded.model.name, *weights], condition, how)

    keys: list[str] = []
    for choice, seed in jobs:
        settings = asdict(settings_for(choice, loaded))
        keys.append(digest(shared, choice.entry.name, settings, seed))
    return keys


@dataclass(frozen=True)
class GridSettings(Settings):
    """Widgets of Sweep Grid."""

    cell_size: int = knob(
        192,
        "Width of a cell in pixels. Usual: 192; it is reduced if the grid would be larger than 4096 pixels.",
        low=32,
        high=1024,
        step=8,
        unit="pixels",
    )


@dataclass(frozen=True)
class PlotSettings(Settings):
    """Widgets of Sweep Plot."""

    measure: str = knob(
        MEASURES[0],
        "The horizontal axis: PSNR and SSIM are closeness to the plain sampler's image. acceptance is the share of "
        "drafts that were accepted, passes the number of transformer passes.",
        choices=MEASURES,
    )


class _SweepImage(io.ComfyNode):
    """A sweep as one image. The classes below hold texts, the class of the widgets, and what draws."""

    title: ClassVar[str]
    description: ClassVar[str]
    aliases: ClassVar[list[str]]
    shown: ClassVar[str]  # tooltip of the image
    settings: ClassVar[type]
    draw: ClassVar[Callable[..., np.ndarray]]

    @classmethod
    def define_schema(cls) -> io.Schema:
        sweep = SWEEP.Input("sweep", tooltip="The sweep, from Sweep (FastAR).")

        return schema(
            node_id=f"FastAR{cls.title.replace(' ', '')}",
            display_name=cls.title,
            category="FastAR/compare",
            description=cls.description,
            search_aliases=cls.aliases,
            sockets=[sweep],
            widgets=widgets(cls.settings),
            outputs=[output(io.Image, "image", cls.shown)],
        )

    @classmethod
    def execute(cls, sweep: Any, **values: Any) -> io.NodeOutput:
        settings = asdict(make(cls.settings, values))
        drawn = cls.draw(expect(sweep, Sweep, "sweep", "Sweep"), *settings.values())

        return io.NodeOutput(to_image(drawn[None]))


class SweepGrid(_SweepImage):
    title = "Sweep Grid"
    shown = "The grid."
    settings = GridSettings
    draw = staticmethod(sweep_grid)
    description = (
        "Shows all cells of a sweep as one image: columns for x, rows for y and the seeds. Below each cell are its "
        "speed-up, its acceptance and how close it is to the plain sampler's image."
    )
    aliases = ["xy plot", "image grid", "sweep", "contact sheet"]


class SweepPlot(_SweepImage):
    title = "Sweep Plot"
    shown = "The plot."
    settings = PlotSettings
    draw = staticmethod(sweep_plot)
    description = (
        "Plots the speed-up of every cell of a sweep against PSNR, SSIM, acceptance or passes. It draws one line per "
        "value of y and one dot per value of x."
    )
    aliases = ["xy plot", "chart", "speed quality plot", "pareto"]


NODES: list[type[io.ComfyNode]] = [SweepNode, SweepGrid, SweepPlot]
