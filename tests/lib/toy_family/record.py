"""The toy family: its record, and its sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...model_loaders.toy.loader import SIDE, ToyModel, load_toy
from ...reports.record import Clock
from ...samplers.engine import Canvas, Sampler, new_report, run_passes
from ...samplers.settings import Guarantees, knob
from . import Entry, Family


@dataclass(frozen=True)
class ToySettings(Guarantees):
    """Settings of the toy's sampler."""

    rows: int = knob(1, "Rows of the image that a pass decides; more is faster.", low=1, high=SIDE, step=1)


class ToyCanvas(Canvas):
    """The image as a pass sees it."""

    def to_latents(self, values: Tensor) -> Tensor:
        latents: Tensor = self.model.to_latents(values)
        return latents


def toy(model: ToyModel, condition: Any, settings: ToySettings, noise: Any, edit: Any = None) -> Sampler:
    """Draws rows of the image in every pass: their noise, which the network scales, around the class."""
    channels = model.net.config.channels
    report = new_report("toy", model, settings, noise)
    values = torch.zeros(len(noise), SIDE**2, channels)
    canvas = ToyCanvas(model, settings, noise, (SIDE, SIDE), values, report, clock=Clock(values.device))
    drawn = noise.start_noise("full", SIDE**2, channels)
    classes = torch.tensor(condition.labels).view(-1, 1, 1)
    plan = dict(enumerate(torch.arange(SIDE**2).split(settings.rows * SIDE)))
    canvas.total = len(plan)

    def draw(k: int, cells: Tensor, z: Tensor) -> Tensor:
        return drawn[:, cells] * z + classes

    yield from run_passes(canvas, plan, lambda k, cells: model.net.toy_scale, draw)
    return canvas.finish()


class ToyFamily(Family):
    """Toys, whose latents ComfyUI's KL autoencoders decode."""

    kind = "toy"
    socket = "FASTAR_TOY"

    def grid(self, model: ToyModel, settings: Any = None) -> tuple[int, int]:
        return SIDE, SIDE

    def memory(self, model: ToyModel, condition: Any, settings: Any, **more: Any) -> dict[str, int]:
        return {"tokens": len(condition) * SIDE**2 * model.net.config.channels * 4}


FAMILY = ToyFamily(
    name="toy",
    words="a toy",
    load_file=load_toy,
    files="toy",
    reads=("class",),
    one_grid="a toy has one grid",
    usual_samplers=("toy",),
    samplers=(Entry("toy", "Toy", toy, lambda model, settings: None, ToySettings, ("toy",), baseline=True),),
)
