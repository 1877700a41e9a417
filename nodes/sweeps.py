"""Sweep nodes: a sampler over the values of one or two settings and over seeds, as a grid and as a plot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from comfy_api.latest import io

from ..errors import UserError
from ..reports.quality import measure
from ..reports.record import Report
from ..reports.sweep import Axis, Cell, CellStore, Sweep, combinations, completed, digest, sweep_table, weights_digest
from ..reports.sweep_pictures import MEASURES, sweep_grid, sweep_plot
from ..reports.values import parse_values
from ..samplers import presets
from ..samplers.choice import PRESET, Choice, choose, names_of_settings, parse_settings
from ..samplers.settings import knob, knobs, make
from . import host, storage
from .comparison import to_image
from .conditioning import LabelText, as_labels
from .preview import to_bytes
from .running import RUNNABLE, baseline_choice, expect_any, run, settings_for
from .schema import SEED_LIMIT, checked_seed, expect, schema, widgets
from .status import hidden, show

SWEEP = io.Custom("FASTAR_SWEEP")
ANY_MODEL = io.Custom("FASTAR_MAR,FASTAR_TOKEN_MODEL")
ANY_CONDITION = io.Custom("FASTAR_LABEL,FASTAR_PROMPT,FASTAR_TEXT,FASTAR_CODES,FASTAR_CONDITION")
NONE = "none"
_NAME = re.compile(r"[^A-Za-z0-9 ._-]+")


@dataclass(frozen=True)
class SweepSettings:
    """Choices of the node Sweep."""

    sampler: str = knob("fasthybrid", "The sampler of all cells; a plus combines two.", choices=tuple(RUNNABLE))
    x: str = knob(
        "threshold",
        "The setting that changes from column to column. Every setting of every sampler is listed; the sampler must have it.",
        choices=tuple(names_of_settings(RUNNABLE)),
    )
    y: str = knob(
        NONE, "The setting that changes from row to row; none for one axis.", choices=(NONE, *names_of_settings(RUNNABLE))
    )


def _text(name: str, default: str, tooltip: str, **about: Any) -> io.Input:
    return io.String.Input(name, default=default, tooltip=tooltip, **about)


_VALUES = "Values, separated by commas. 0.8..1 x 5 are five evenly spaced ones, 4..8 whole numbers in steps of 1; words for a choice."


class SweepNode(io.ComfyNode):
    """A sweep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARSweep",
            display_name="Sweep",
            category="FastAR/compare",
            description="Runs a sampler for every combination of values of one or two settings and of seeds, and the plain sampler once a "
            "seed. Cells are written to the output folder as they are made: an interrupted sweep goes on where it stopped.",
            search_aliases=["xy plot", "x/y plot", "parameter sweep", "grid search", "benchmark"],
            hidden=hidden(),
            sockets=[
                ANY_MODEL.Input("model", tooltip="The model of all cells, from any loader of a MAR or a token model."),
                ANY_CONDITION.Input("condition", tooltip="What to draw, one entry an image; as for the sampler's own node."),
            ],
            widgets=[
                *widgets(SweepSettings),
                _text("x_values", "0.8, 0.9, 0.95, 0.99", f"{_VALUES} One column each."),
                _text("y_values", "", f"{_VALUES} One row each; left empty without a second setting."),
                _text("seeds", "7", "Seeds, written like values: 7, or 7..9. Figures are means over them."),
                _text(
                    "settings",
                    "",
                    "Settings that all cells share, as name=value, separated by commas: preset=balanced, ar_steps=32. The others come from "
                    "the preset, the model's file and the paper.",
                    multiline=True,
                ),
                _text(
                    "folder",
                    "sweep",
                    "Name of a folder in output/fastar_sweeps for the cells. Finished cells in it are not drawn again.",
                    advanced=True,
                ),
            ],
            optional=[ANY_MODEL.Input("draft", optional=True, tooltip="The draft model of CSpD and MuLo-SD.")],
            outputs=[
                SWEEP.Output("sweep", display_name="sweep", tooltip="For Sweep Grid and Sweep Plot."),
                io.String.Output("table", display_name="table", tooltip="The figures as a Markdown table."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, sampler: str, x: str, y: str, x_values: Any, y_values: Any, seeds: Any, settings: Any
    ) -> bool | str:
        """Check what is typed before anything runs; values that arrive over a link are None."""
        if None in (x_values, y_values, seeds, settings):
            return True
        try:
            _plan(sampler, x, y, x_values, y_values, seeds, settings)
        except UserError as problem:
            return str(problem)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        condition: Any,
        sampler: str,
        x: str,
        y: str,
        x_values: str,
        y_values: str,
        seeds: str,
        settings: str,
        folder: str = "sweep",
        draft: Any = None,
    ) -> io.NodeOutput:
        loaded = expect_any(model, "model")
        small = None if draft is None else expect_any(draft, "draft")
        base, axes, numbers = _plan(sampler, x, y, x_values, y_values, seeds, settings)
        plain = baseline_choice(base, loaded)
        cells = combinations(*axes, numbers)
        jobs: list[tuple[Choice, int]] = [(plain, seed) for seed in numbers]
        jobs += [(base.with_values(_values(axes, i, j)), seed) for i, j, seed in cells]
        resolved = [asdict(settings_for(choice, loaded)) for choice, _ in jobs]  # reports mistakes before the first cell
        keys = _keys(jobs, resolved, loaded, small, condition)
        store = CellStore(storage.sweep_folder(_NAME.sub("_", folder.strip())[:80].strip(". ") or "sweep"))

        def make_cell(k: int) -> tuple[np.ndarray, Report]:
            choice, seed = jobs[k]
            latent, report = run(choice, loaded, condition, seed, small).result
            assert loaded.vae is not None
            return to_bytes(loaded.vae.decode(latent["samples"])), report

        return cls._collect(store, keys, make_cell, cells, axes, tuple(numbers), base)

    @classmethod
    def _collect(
        cls,
        store: CellStore,
        keys: Sequence[str],
        make_cell: Any,
        cells: Sequence[tuple[int, int, int]],
        axes: tuple[Axis, Axis],
        seeds: tuple[int, ...],
        base: Choice,
    ) -> io.NodeOutput:
        """Make or read all cells and put the sweep together. The baselines come first; their pictures are read again when needed."""
        done: list[Cell] = []
        plain: dict[int, tuple[str, Report]] = {}
        step, made = host.progress(), 0
        warm = False
        for k, pictures, report, new in completed(store, keys, make_cell):
            made += new
            if k < len(seeds):
                plain[seeds[k]] = (keys[k], report)
            else:
                i, j, seed = cells[k - len(seeds)]
                key, reference = plain[seed]
                original = store.read(key)
                quality = None if original is None else measure(pictures, original[0], _word(report))
                done.append(Cell(i, j, seed, keys[k], report, reference, quality))
            step(k + 1, len(keys))
            warm = warm or new
        sweep = Sweep(f"{base.entry.title} ({base.text})", store, *axes, seeds, tuple(done), {s: k for s, (k, _) in plain.items()})
        show(cls, [f"{made} of {len(keys)} cells drawn, {len(keys) - made} taken from {store.folder.name}"])
        return io.NodeOutput(sweep, sweep_table(sweep))


def _word(report: Report) -> str:
    from ..reports.quality import DISTRIBUTION

    return DISTRIBUTION if presets.lossless(report) else ""
