"""LlamaGen: one token per pass in raster order. The same loop decodes every other schedule that is known before the
first pass.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv 2406.06525).
LlamaGen, PAR (``par.py``), ZipAR (``zipar.py``) and Tar's semantic codes (``tar.py``) differ in their schedules only:
which cells a pass decides, which tokens it feeds, and which slots of the cache these attend to. The index tensors of
all passes are on the device before the loop, which never waits for it.
"""

from __future__ import annotations

import numpy as np
import torch

from ...model_loaders.networks.llama import Llama, TokenModel, is_16_bit
from ...reports.record import PLAIN
from ..conditioning import AnyCondition
from ..editing import Edit
from .draws import PairedDraws
from .jacobi import windows
from .loop import TokenRun, TokenSampler, begin, decide, feed_tokens, prefill, raster_only, resolve
from .schedule import DeviceTable, Schedule, raster
from .settings import LlamaGenSettings


def check(model: TokenModel, settings: LlamaGenSettings) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: a PAR, or guidance of a model that was trained without a null class.
    """
    raster_only("LlamaGen", model)
    resolve(settings, model)


def llamagen(
    model: TokenModel,
    condition: AnyCondition,
    settings: LlamaGenSettings,
    noise: PairedDraws,
    edit: Edit | None = None,
) -> TokenSampler:
    """LlamaGen, or Tar's de-tokenizer.

    Args:
        model: the network with its metadata.
        condition: labels, text, semantic features or codes of B images.
        settings: see :class:`LlamaGenSettings`.
        noise: draws of B images.
        edit: part of an image to sample again; None for a whole new one.

    Yields:
        :class:`TokenStep` after every pass; returns :class:`TokenSampled`. See :func:`decode`.

    Raises:
        UserError: a condition or an edit that does not fit the model, a PAR, or logits that were not finite.
    """
    check(model, settings)
    # Reports of a de-tokenizer are compared with each other, not with those of a LlamaGen.
    name = "tar" if model.net.config.condition == "features" else "llamagen"
    run = begin(name, model, condition, settings, noise, edit)
    return (yield from decode(run, raster(model.grid), settings.parallel))


def decode(run: TokenRun, schedule: Schedule, parallel: int = 0) -> TokenSampler:
    """Decode a schedule pass by pass or, with ``parallel`` above 1, in windows of as many passes (``jacobi.py``).

    With 16-bit weights, ``parallel`` 1 is a window too, whose image those of larger windows equal; in fp32 it is the
    same as 0.

    Yields :class:`TokenStep` after the prefill and after each pass, or call of a window. The map "step" is the pass or
    call that decided a cell, -1 if it was given.

    Raises:
        UserError: logits that were not finite.
    """
    return windows(run, schedule, parallel) if in_windows(run.net, parallel) else serial(run, schedule)


def in_windows(net: Llama, parallel: int) -> bool:
    """Whether a network decodes in windows."""
    return parallel > 1 or (parallel == 1 and is_16_bit(net))


def serial(run: TokenRun, schedule: Schedule) -> TokenSampler:
    """The passes of a schedule one after another."""
    passes = len(schedule.passes)
    guided = run.guided(schedule)
    # The null condition is run up to the last guided pass.
    last_guided = max((k for k, g in enumerate(guided) if g), default=-1)

    # 1. Prefill: the condition fills the cache, and its last row predicts the first cells.
    with torch.inference_mode(), run.clock.phase("transformer"):
        hidden, cache = prefill(run, last_guided >= 0, schedule.slots)
        table = DeviceTable(schedule.table, cache.prefix, run.device)

    for k in range(passes):
        with torch.inference_mode():  # closed before each yield, or it would apply to the driver's code
            p = table.at(k)

            # 2. Feed the newest tokens: one in LlamaGen, one of every active row in ZipAR, a group in PAR.
            if k:
                with run.clock.phase("transformer"):
                    hidden = feed_tokens(run, cache, p.fed, p.position, p.slot, k <= last_guided, p.end, p.mask)

            # 3. Guidance, and a token for every cell of the pass.
            with run.clock.phase("sampling"):
                decide(run, p.cells, hidden[:, p.rows], guided[k])
        with run.clock.paused():
            yield run.step(k + 1, passes)

    step = np.repeat(schedule.fixed_at[None], len(run.tokens), axis=0)
    return run.finish(step, np.full(step.shape, PLAIN, np.uint8))
