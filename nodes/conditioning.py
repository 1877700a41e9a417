"""What to draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from comfy_api.latest import io

from ..errors import UserError
from ..samplers.labels import label_sets, resolve_labels
from ..samplers.settings import knob, make
from .schema import CONDITION, expect, schema, widgets

MOST_IMAGES = 256
NONE = "none"


@dataclass(frozen=True)
class LabelSettings:
    """Widgets of Class Label beside the labels."""

    label_set: str = knob(
        "picture-book", "Which names are meant: the one the model was trained on. picture-book: the demo; imagenet-1k: the "
        "official models.", choices=tuple(label_sets()),
    )  # fmt: skip
    images_per_label: int = knob(
        1, "Pictures of every label; more makes the batch larger, which costs time and memory but less than separate runs. "
        "Usual: 1 to 8.", low=1, high=MOST_IMAGES, step=1,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _found() -> dict[str, tuple[str, str]]:
    """Menu text to label and its set."""
    return {f"{name} ({where})": (name, where) for where, names in label_sets().items() for name in names}


class ClassLabel(io.ComfyNode):
    """Class labels by name or id."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARClassLabel",
            display_name="Class Label",
            category="FastAR/condition",
            description="What to draw, by class name or id: one label an image. Several labels make a batch.",
            search_aliases=["class conditioning", "imagenet class", "label", "category", "prompt"],
            inputs=[
                io.String.Input(
                    "labels", default="cat", multiline=True, placeholder="names or ids, separated by commas or lines",
                    tooltip="Class names or ids, separated by commas or lines; each is one image of the batch, so more labels "
                    "make more pictures. A name that is not known is answered with the closest ones; all names of the demo are "
                    "on this node's help page. Usual: cat, or 281 for imagenet-1k's tabby.",
                ),
                *widgets(LabelSettings),
                io.Combo.Input(
                    "add_label", options=[NONE, *_found()], default=NONE,
                    tooltip="One more label, found by name: open the list and type a part of it. It comes after those in labels "
                    "(which may then be empty) and must be of the same label_set.",
                ),
            ],
            outputs=[CONDITION.Output("condition", display_name="condition", tooltip="For the samplers.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, labels: Any, add_label: Any = NONE, **values: Any) -> io.NodeOutput:
        settings = make(LabelSettings, values)
        text = expect(labels, str, "labels", "a text node, or type them")
        if add_label != NONE:
            if add_label not in _found():
                raise UserError(f"add_label: {add_label!r} is not in the list; choose one from it.")
            name, where = _found()[add_label]
            if where != settings.label_set:
                raise UserError(f"add_label: {name} is a label of {where}; set label_set to {where}, or add_label to {NONE}.")
            text = "\n".join(filter(None, (text.strip(), name)))
        condition = resolve_labels(text, settings.label_set, settings.images_per_label, field="labels")
        if len(condition) > MOST_IMAGES:
            raise UserError(f"labels: {len(condition)} images are asked for; {MOST_IMAGES} at once are the most.")
        return io.NodeOutput(condition)


NODES: list[type[io.ComfyNode]] = [ClassLabel]
