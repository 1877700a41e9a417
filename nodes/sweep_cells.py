"""A node that shows pictures of a folder that the command sweep wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from comfy_api.latest import io

from ..errors import UserError
from ..samplers.settings import knob, make
from ..scale.curve import timed
from ..scale.curve_pictures import pick
from ..scale.results import latest, read_results
from ..scale.store import Cell, Store
from . import storage
from .comparison import to_image
from .schema import schema, widgets
from .sweeps import FOLDER, state_of

# Images of one run.
MOST_IMAGES = 64


@dataclass(frozen=True)
class CellSettings:
    """Numbers of Load Sweep Cell."""

    first: int = knob(0, "Index of the first image.", low=0, high=9_999_999, step=1)
    count: int = knob(
        6,
        "Number of images; fewer where the cell ends or is not finished.",
        low=1,
        high=MOST_IMAGES,
        step=1,
    )


class LoadSweepCell(io.ComfyNode):
    """Pictures and figures of a cell."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLoadSweepCell",
            display_name="Load Sweep Cell",
            category="FastAR/compare",
            description="Shows pictures of one cell of a sweep, sampler and settings, from a folder that the command sweep wrote, with its "
            "speed-up and measures. The same indices of two cells start from the same noise. Nothing is sampled.",
            search_aliases=["open sweep", "sweep folder", "read npz", "benchmark pictures"],
            widgets=[
                io.String.Input("folder", default="", tooltip=FOLDER),
                io.String.Input(
                    "cell",
                    default="1",
                    tooltip="Which cell: its number from 1 in the order of the sweep, or its name, or a part that only its name has. The "
                    "output lists all cells.",
                ),
                *widgets(CellSettings),
            ],
            outputs=[
                io.Image.Output("image", display_name="image", tooltip="The pictures, one batch."),
                io.String.Output(
                    "text",
                    display_name="text",
                    tooltip="The cell's settings, speed-up and measures, and the names of all cells.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, folder: Any, **_: Any) -> str:
        """A folder that has changed is read again."""
        return state_of(folder)

    @classmethod
    def execute(cls, folder: Any, cell: Any, **values: Any) -> io.NodeOutput:
        settings = make(CellSettings, values)
        store = Store(storage.drawn_sweep(str(folder)))
        chosen = find_cell(store, str(cell))
        last = min(chosen.images, settings.first + settings.count)
        if settings.first >= last:
            raise UserError(
                f"first: {chosen.id} has {chosen.images} images, 0 to {chosen.images - 1}; choose one of them."
            )
        found = pick(store, chosen, range(settings.first, last))
        pictures = [picture for picture in found if picture is not None]
        if not pictures:
            raise UserError(
                f"first: images {settings.first} to {last - 1} of {chosen.id} are not finished; choose others, or go on with the sweep."
            )
        return io.NodeOutput(to_image(np.stack(pictures)), describe_cell(store, chosen))


def find_cell(store: Store, text: str) -> Cell:
    """The cell of a number from 1, a name, or a part of one name.

    Raises:
        UserError: no cell or several.
    """
    cells, text = store.cells(), text.strip()
    names = ", ".join(c.id for c in cells)
    if not text:
        raise UserError(f"cell: it is empty; there are {names}.")
    if text.isdecimal() and len(text) < 7 and 1 <= int(text) <= len(cells):
        return cells[int(text) - 1]
    same = [c for c in cells if text in (c.id, c.title)]
    found = same or [c for c in cells if text.lower() in c.id.lower() or text.lower() in c.title.lower()]
    if len(found) != 1:
        what = "no cell has" if not found else f"{len(found)} cells have"
        raise UserError(f"cell: {what} {text!r} in the name; give a number from 1 to {len(cells)}, or one of {names}.")
    return found[0]


def describe_cell(store: Store, cell: Cell) -> str:
    """A cell as text: settings, images, speed-up, measures; then all cells."""
    images = sum(shard.count for shard in store.shards(cell))
    lines = [f"{cell.title or cell.id} on {cell.model}, seed {cell.seed}, {images} of {cell.images} images"]
    time = timed(store, [cell]).get(cell.id)
    if time is not None:
        lines.append(f"speed-up: {time.speedup:.2f}x, {time.seconds:.4f} s an image")
    own = [result for (name, _), result in latest(read_results(store)).items() if name == cell.id]
    lines += [f"{result.title}: {result.show()}" for result in own]
    lines.append("settings: " + ", ".join(f"{name}={value}" for name, value in cell.settings.items()))
    lines += ["", "cells:", *(f"{k + 1}: {c.id}" for k, c in enumerate(store.cells()))]
    return "\n".join(lines)


NODES: list[type[io.ComfyNode]] = [LoadSweepCell]
