"""Run a schedule that is known before the first pass. LlamaGen, PAR, ZipAR and Tar's first stage all generate images in
this way; only their schedules are different.

A schedule (``schedule.py``) states which cells a pass decides, which tokens the pass feeds, and to which tokens each
fed token attends. The index tensors of all passes are on the device before the loop over the passes starts, so the loop
never waits for the device.

- :func:`decode_settings` generates images with the schedule that the settings choose. Most samplers call it.
- :func:`decode_schedule` runs the passes of a schedule on a canvas. Tar and MuLo-SD call it directly.
"""

from __future__ import annotations

from typing import Any

import torch

from ...networks.llama import TokenModel, is_16_bit
from ...networks.torch_state import in_own_state
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler, run_passes
from .canvas import TokenCanvas, token_canvas
from .device_table import plan_on_device
from .jacobi import decode_in_windows, padded_row_count
from .looks import CachedTransformer, ScheduleLook, last_guided_pass
from .prepare import PreparedCondition
from .sampling import TokenDraw, guided_passes
from .schedule import Schedule
from .token_noise import TokenNoise


@in_own_state
def decode_settings(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: Any,
    noise: TokenNoise,
    edit: Edit | None,
) -> Sampler:
    """Generate images with the schedule that the settings choose. For the other arguments see :func:`.llamagen`.

    ``name``: the sampler's name in the report. ``settings``: TokenSettings that also have the field *parallel*.
    """
    schedule = settings.schedule(model)
    canvas, prepared = token_canvas(name, model, condition, settings, noise, edit)
    return (yield from decode_schedule(canvas, prepared, schedule, settings.parallel))


@torch.inference_mode()  # no_grad would cost 10 % more time, because a pass makes many tensor views
def decode_schedule(
    canvas: TokenCanvas,
    condition: PreparedCondition,
    schedule: Schedule,
    parallel: int = 0,
    *,
    stream: str = "token",
    span: tuple[int, int] | None = None,
    penalty: float = 1.0,
) -> Sampler:
    """Run a schedule pass by pass or, if ``parallel`` is above 1, in windows of ``parallel`` passes (``jacobi.py``).

    With 16-bit weights, the passes also run in windows at ``parallel`` 1. The image is then identical for all values
    from 1 to the side of the image in tokens. In fp32, the passes run without windows at 1, as at 0.

    Args:
        canvas, condition: the canvas and the packed condition, see :func:`.token_canvas`.
        schedule: the passes.
        parallel: number of passes in a window; 0: no windows.
        stream: name of the stream of random numbers.
        span: half-open range of the token values that are image codes; None: all values.
        penalty: repetition penalty; 1 turns it off.

    Yields :class:`Step` after each pass; in windows, after the prefill and after each call. The report's map "step"
    holds the index of the pass or call that decided a cell, or -1 for a cell that an edit fixes.
    """
    in_16_bit = is_16_bit(canvas.model.net)
    in_windows = parallel > 1 or (parallel == 1 and in_16_bit)
    padded_to = padded_row_count(schedule, parallel) if in_windows and in_16_bit else 0

    guided = guided_passes(canvas.sampling, schedule)
    first_value = span[0] if span else 0
    draw = TokenDraw(
        canvas,
        guided,
        stream,
        span=span,
        penalty=penalty,
        part_share=condition.part_share,
        padded_to=padded_to,
    )
    if in_windows:
        transformer = CachedTransformer(canvas, condition, first_value, padded_to)
        return (yield from decode_in_windows(canvas, transformer, draw, schedule, parallel))

    look = ScheduleLook(canvas, condition, schedule, last_guided_pass(guided), first_value=first_value)
    plan = plan_on_device(schedule, canvas.device)
    canvas.total = len(plan)
    yield from run_passes(canvas, plan, look, draw)
    return canvas.finish()
