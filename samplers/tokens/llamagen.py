"""LlamaGen: one token per pass in raster order. The functions here also run every other schedule that is known before
the first pass.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv 2406.06525).
LlamaGen, PAR (``par.py``), ZipAR (``zipar.py``) and Tar's first stage (``tar.py``) run passes in the same way; only
their schedules are different. A schedule (``schedule.py``) states which cells a pass decides, which tokens the pass
feeds, and to which tokens each fed token attends. The index tensors of all passes are on the device before the loop
over the passes starts, so the loop never waits for the device.

Each of these three functions calls the next:

- :func:`llamagen` is the sampler. It checks the model and the settings. PAR and ZipAR have such a function too.
- :func:`decode_settings` generates images with the schedule that the settings choose.
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
from .checks import check_raster
from .device_table import plan_on_device
from .jacobi import decode_in_windows, padded_row_count
from .looks import CachedTransformer, ScheduleLook, last_guided_pass
from .prepare import PreparedCondition
from .sampling import TokenDraw, guided_passes
from .schedule import Schedule
from .settings import LlamaGenSettings
from .token_noise import TokenNoise


def check(model: TokenModel, settings: LlamaGenSettings) -> None:
    """Check that LlamaGen can run a model with these settings, before anything is loaded or computed.

    Raises the errors of :func:`.check_raster`.
    """
    check_raster("LlamaGen", model, settings)


def llamagen(
    model: TokenModel,
    condition: AnyCondition,
    settings: LlamaGenSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> Sampler:
    """Generate images with a LlamaGen, a Janus, or Tar's de-tokenizer, which generates an image from semantic codes.

    Args:
        model: the network with its metadata.
        condition: the condition of B images. The model must read this kind of condition.
        settings: see :class:`LlamaGenSettings`.
        noise: the noise of B images.
        edit: the image to edit and the part to regenerate; None to generate whole new images.

    Yields:
        :class:`Step` after every pass; returns :class:`Sampled`. See :func:`decode_schedule`.

    Raises:
        UserError: the model is a PAR; the condition, the edit or the guidance does not fit the model; or the logits are
            not finite.
    """
    check(model, settings)
    # A de-tokenizer has its own name in reports, because its reports are compared only with a de-tokenizer's reports.
    name = "tar" if model.condition == "features" else "llamagen"
    return decode_settings(name, model, condition, settings, noise, edit)


@in_own_state
def decode_settings(
    name: str,
    model: TokenModel,
    condition: AnyCondition,
    settings: Any,
    noise: TokenNoise,
    edit: Edit | None,
) -> Sampler:
    """Generate images with the schedule that the settings choose. For the other arguments see :func:`llamagen`.

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
