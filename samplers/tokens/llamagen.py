"""LlamaGen: one token per pass in raster order. The same loop decodes every other schedule that is known before the first pass.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv 2406.06525). LlamaGen, PAR
(``par.py``), ZipAR (``zipar.py``) and Tar's semantic codes (``tar.py``) differ in their schedules only: which cells a pass decides, which
tokens it feeds, and which slots of the cache these attend to. The index tensors of all passes are on the device before the loop, which
never waits for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...model_loaders.networks.llama import Cache, TokenModel
from ...reports.record import PLAIN
from ..conditioning import AnyCondition
from ..driver import timed
from .draws import Draws, ahead
from .editing import EditDraws
from .jacobi import windows
from .loop import TokenRun, TokenSampled, TokenSampler, TokenSteps, begin, feed, guide, prefill, raster_only, sample
from .schedule import DevicePass, Schedule, on_device, raster
from .settings import LlamaGenSettings


def llamagen(
    model: TokenModel, condition: AnyCondition, settings: LlamaGenSettings, noise: Draws, seed: int | None = None
) -> TokenSampler:
    """LlamaGen, or Tar's de-tokenizer.

    Args:
        model: the network with its metadata.
        condition: labels, text, semantic features or codes of B images.
        settings: see :class:`LlamaGenSettings`.
        noise: draws of B images.
        seed: only recorded in the report.

    Yields:
        :class:`TokenStep` after every pass; returns :class:`TokenSampled`. See :func:`decode`.

    Raises:
        UserError: a condition that does not fit the model, or a PAR.
    """
    raster_only("LlamaGen", model)
    # Reports of a de-tokenizer are compared with each other, not with those of a LlamaGen.
    name = "tar" if model.net.config.condition in ("features", "codes") else "llamagen"
    return (
        yield from decode(begin(name, model, condition, settings, noise, seed), raster(model.grid), settings.parallel)
    )


def decode(run: TokenRun, schedule: Schedule, parallel: int = 0) -> TokenSampler:
    """Decode a schedule pass by pass or, with ``parallel`` above 1, in windows of as many passes (``jacobi.py``).

    Yields:
        :class:`TokenStep` after the prefill and after each pass, or call of a window.

    Returns:
        :class:`TokenSampled`. Maps: "step", the pass or call that decided a cell, -1 if it was given, and "outcome".

    Raises:
        UserError: a window of a schedule whose rows attend to slots that are not written yet.
    """
    steps = windows(run, schedule, parallel) if parallel > 1 else serial(run, schedule)
    sampled = yield from timed(steps, run.clock, run.report, run.device)
    if isinstance(run.draws, EditDraws):
        run.draws.mark(run.report)
    return sampled


def serial(run: TokenRun, schedule: Schedule) -> TokenSteps:
    """The passes of a schedule one after another."""
    guided = run.guided(schedule)
    # The null condition is run up to the last guided pass.
    last_guided = max((k for k, g in enumerate(guided) if g), default=-1)
    # 1. Prefill: the condition fills the cache, and its last row predicts the first cells.
    with torch.inference_mode(), run.clock.phase("transformer"):
        hidden, cache = prefill(run, last_guided >= 0, schedule.slots)
        passes = on_device(schedule, cache.prefix, run.device)
        run.draws = ahead(run.draws, [p.cells for p in passes])
    for k, p in enumerate(passes):
        with torch.inference_mode():  # closed before each yield, or it would apply to the driver's code
            advance(run, p, cache, k <= last_guided, guided[k], None if k else hidden)
        yield run.step(k + 1, len(passes))
    run.report.maps["step"] = np.repeat(schedule.fixed_at[None], len(run.tokens), axis=0)
    run.report.maps["outcome"] = np.full((len(run.tokens), run.grid, run.grid), PLAIN, np.uint8)
    return TokenSampled(run.codes(), run.report)


def advance(run: TokenRun, p: DevicePass, cache: Cache, null: bool, guided: bool, hidden: Tensor | None) -> None:
    """One pass. ``hidden``: of the prefill, whose last row predicts all cells of the first pass."""
    transformer, sampling = run.phases
    # 2. Feed the newest tokens: one in LlamaGen, one of every active row in ZipAR, a group in PAR.
    if hidden is None:
        with run.clock.phase(transformer):
            hidden = feed(run, cache, p.fed, p.position, p.slot, null, p.end, p.mask, p.special)
            hidden = hidden if p.rows is None else hidden[:, p.rows]
    with run.clock.phase(sampling):
        # 3. Guidance; 4. draw a token for every cell of the pass.
        logits = guide(run, hidden, guided).expand(-1, len(p.cells), -1)
        run.tokens.index_copy_(1, p.cells, sample(run, logits, p.cells))
        run.decided.index_fill_(1, p.cells, True)
