"""Run a schedule that is known before the first pass. LlamaGen, PAR, ZipAR and Tar's first stage all generate images in
this way; only their schedules are different.

A schedule (``schedule.py``) states which cells a pass decides, which tokens the pass feeds, and to which tokens each
fed token attends. The index tensors of all later passes are copied to the device right after the prefill. If these
passes run one by one, the host does not wait for the device between them.

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
from .cache_slots import serial_slots
from .canvas import TokenCanvas, token_canvas
from .jacobi import decode_in_windows, padded_row_count
from .looks import CachedTransformer, ScheduleLook, last_guided_pass, later_passes_on_device, run_first_pass
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


@torch.inference_mode()  # no_grad would take 10 % more time, because a pass makes many tensor views
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
    """Run a schedule pass by pass, or in windows of ``parallel`` passes (``jacobi.py``), see :func:`runs_in_windows`.

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
    in_windows = runs_in_windows(parallel, in_16_bit)
    padded_to = padded_row_count(schedule, parallel) if in_windows and in_16_bit else 0

    draw = TokenDraw(
        canvas,
        stream,
        span=span,
        penalty=penalty,
        part_share=condition.part_share,
        padded_to=padded_to,
    )
    first_value = span[0] if span else 0  # token value of image code 0
    transformer = CachedTransformer(canvas, condition, first_value, padded_to)
    if in_windows:
        return (yield from decode_in_windows(canvas, transformer, draw, schedule, parallel))
    return (yield from _decode_pass_by_pass(canvas, transformer, draw, schedule))


def runs_in_windows(parallel: int, in_16_bit: bool) -> bool:
    """Whether the passes run in windows. In 16 bits, all calls that compute windows are padded to one shape::

        parallel    in 16 bits                            in fp32
        0           pass by pass                          pass by pass
        1           in windows of one pass, padded        pass by pass
        above 1     in windows, padded                    in windows

    In 16 bits, the image is identical for all values of ``parallel`` from 1 to the side of the image in tokens. At 0,
    sums are rounded differently, so the image may be different. In fp32, the image is identical for all values.
    """
    if in_16_bit:
        return parallel >= 1
    return parallel > 1


def _decode_pass_by_pass(
    canvas: TokenCanvas, transformer: CachedTransformer, draw: TokenDraw, schedule: Schedule
) -> Sampler:
    """Run the passes of a schedule one after another. Yields a step after each pass."""
    guided = guided_passes(canvas.sampling, schedule)
    # Guidance that has ended may start again, see guidance_steps. A guided pass needs the keys and values of all
    # earlier passes in the null branch too. So every pass up to the last guided one feeds this branch, guided or not.
    last_guided = last_guided_pass(guided)
    reads_null = [k <= last_guided for k in range(len(guided))]
    canvas.total = len(guided)

    # 1. The prefill.
    slot_count = serial_slots(schedule).count_without_padding
    run_first_pass(canvas, transformer, draw, schedule, slot_count, reads_null[0])
    look = ScheduleLook(transformer, schedule, reads_null)
    later_passes = later_passes_on_device(schedule, canvas.device)
    yield from canvas.yield_step(1)

    # 2. The other passes.
    yield from run_passes(canvas, later_passes, look, draw.of_schedule(schedule), passes_before=1)
    return canvas.finish()
