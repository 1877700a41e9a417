"""LlamaGen: one token per pass in raster order. The same parts decode every other schedule that is known before the
first pass.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv 2406.06525).
LlamaGen, PAR (``par.py``), ZipAR (``zipar.py``) and Tar's semantic codes (``tar.py``) differ in their schedules only:
which cells a pass decides, which tokens it feeds, and which slots of the cache these attend to. The index tensors of
all passes are on the device before the loop starts, so the loop never waits for the device.

Three functions, each of which calls the next:

- :func:`scheduled` makes a sampler from a name and a check of models and settings; PAR and ZipAR are made with it;
- :func:`decode_settings` is a generation from a model, a condition and settings, which choose the schedule;
- :func:`decode_schedule` decodes a given schedule on a canvas; Tar and MuLo-SD call it directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from ...networks.llama import TokenModel, is_16_bit
from ...networks.torch_state import in_own_state
from ..conditioning import AnyCondition
from ..editing import Edit
from ..engine import Sampler, decode
from .cache_slots import serial_table
from .canvas import TokenCanvas, token_canvas
from .checks import check_raster
from .jacobi import decode_in_windows, padded_rows
from .looks import CachedTransformer, ScheduleLook, last_guided, plan_of
from .prepare import PreparedCondition
from .sampling import TokenDraw, guided_passes
from .schedule import Schedule
from .settings import LlamaGenSettings
from .token_noise import TokenNoise

# check(model, settings) raises what the sampler would, before anything is loaded or computed.
check = partial(check_raster, "LlamaGen")


def llamagen(
    model: TokenModel,
    condition: AnyCondition,
    settings: LlamaGenSettings,
    noise: TokenNoise,
    edit: Edit | None = None,
) -> Sampler:
    """LlamaGen, or Tar's de-tokenizer.

    Args:
        model: the network with its metadata.
        condition: labels, text, semantic features or codes of B images.
        settings: see :class:`LlamaGenSettings`.
        noise: noise of B images.
        edit: part of an image to sample again; None for a whole new one.

    Yields:
        :class:`Step` after every pass; returns :class:`Sampled`. See :func:`decode_schedule`.

    Raises:
        UserError: a condition or an edit that does not fit the model, a PAR, or logits that were not finite.
    """
    check(model, settings)
    # Reports of a de-tokenizer are compared with each other, not with reports of a LlamaGen.
    name = "tar" if model.condition == "features" else "llamagen"
    return decode_settings(name, model, condition, settings, noise, edit)


@in_own_state
def decode_settings(
    name: str, model: TokenModel, condition: AnyCondition, settings: Any, noise: TokenNoise, edit: Edit | None
) -> Sampler:
    """Decode images in the schedule that the settings choose; ``name``: the sampler's, for the report."""
    schedule = settings.schedule(model)
    canvas, prepared = token_canvas(name, model, condition, settings, noise, edit)
    return (yield from decode_schedule(canvas, prepared, schedule, settings.parallel))


class TokenSampler(Protocol):
    """A sampler of discrete tokens, with the arguments, steps and errors of :func:`llamagen`."""

    __name__: str

    def __call__(
        self,
        model: TokenModel,
        condition: AnyCondition,
        settings: Any,
        noise: TokenNoise,
        edit: Edit | None = None,
    ) -> Sampler: ...


def scheduled(name: str, check: Callable[[TokenModel, Any], None]) -> TokenSampler:
    """The sampler that decodes the schedule of its settings, see :meth:`.TokenSettings.schedule`.

    ``name``: its name in the registry; ``check(model, settings)`` raises what the sampler cannot run.
    """

    def run(
        model: TokenModel,
        condition: AnyCondition,
        settings: Any,
        noise: TokenNoise,
        edit: Edit | None = None,
    ) -> Sampler:
        check(model, settings)
        return decode_settings(name, model, condition, settings, noise, edit)

    run.__name__ = run.__qualname__ = name
    return run


@torch.inference_mode()  # the many views of a token's pass cost 10 % more with no_grad
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
    """Decode a schedule pass by pass or, with ``parallel`` above 1, in windows of ``parallel`` passes (``jacobi.py``).

    With 16-bit weights, ``parallel`` 1 is also decoded as a window, so it gives the same image as larger windows. In
    fp32, ``parallel`` 1 does the same as 0.

    Args:
        canvas, condition: of :func:`.token_canvas`.
        schedule: the passes.
        parallel: see above.
        stream: name of the stream of random numbers.
        span: token values that are image codes, half-open; None for all.
        penalty: repetition penalty; 1 is none.

    Yields :class:`Step` after the prefill and after each pass, or in windows after each call. The report's map "step"
    holds the pass or call that decided a cell, or -1 for a cell that an edit fixes.
    """
    in_16_bit = is_16_bit(canvas.model.net)
    in_windows = parallel > 1 or (parallel == 1 and in_16_bit)
    padded_to = padded_rows(schedule, parallel) if in_windows and in_16_bit else 0

    guided = guided_passes(canvas.sampling, schedule)
    first_value = span[0] if span else 0
    draw = TokenDraw(canvas, guided, stream, span=span, penalty=penalty, part=condition.part, padded_to=padded_to)
    if in_windows:
        transformer = CachedTransformer(canvas, condition, first_value, padded_to)
        return (yield from decode_in_windows(canvas, transformer, draw, schedule, parallel))

    look = ScheduleLook(canvas, condition, schedule, last_guided(guided), first_value=first_value)
    plan = plan_of(serial_table(schedule), canvas.device)
    canvas.total = len(plan)
    yield from decode(canvas, plan, look, draw)
    return canvas.finish()
