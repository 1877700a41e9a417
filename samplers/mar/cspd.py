"""CSpD: a small MAR drafts tokens, a large one (the target) verifies them.

Source: Wang et al. 2024, "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv 2411.11925), and its
published code. Equation numbers are the paper's; p is the target, q the draft. Three modes:

``lossless`` (``cspd_lossless.py``): exactly the target's distribution, whatever the draft. The draft model samples some AR
steps; the target's z of each is computed given the drafts before it, in one pass; the target's head is evaluated at all states
of the drafted diffusion paths in one batch. A path is kept up to its first rejected diffusion step, that step is replaced by
a coupling of the two Gaussians (``coupling.py``), and the rest of the path is sampled by the target. Each coupling's output is
a sample of the target's kernel at a state of the target's own path, so every token is a sample of the target given the tokens
before it. A token counts as accepted if its whole path is the draft's. After the first AR step with a rejected token, the
target's z was computed from discarded tokens: all later drafts are discarded. The resulting tokens depend neither on the
draft length nor on the batch; the speed does. Two different models rarely agree on a whole path, because the last diffusion
steps are almost without noise.

``paper`` (``cspd_paper.py``): the criterion as the paper derives it; approximate. A token is accepted with probability
min(1, ratio), where

    ratio = Sigma p(x_0 | x_1) / q(x_0 | x_1),    Sigma = product over t >= 2 of sigma_q,t / sigma_p,t         (4), (5)

with both models' kernels at the states of one trajectory, the draft's. The exponents of the steps t >= 2 are left out as in
(14) to (20), because the models share their noise; on one trajectory they do not cancel, which is the approximation. Without
alignment they are included, and almost nothing is accepted. A rejected token is redrawn as in (7) to (11): from the last
kernel of the target's own trajectory, accepting a draw with probability max(0, 1 - 1 / ratio), with both models' kernels on
that trajectory. The prefix rule is that of ``lossless``.

``published`` (``cspd_published.py``): the rule of the published code; approximate.
"""

from __future__ import annotations

import torch

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ..conditioning import MaskedCondition
from ..noise import Noise
from .cspd_lossless import Lossless
from .cspd_models import Models, RejectionDraws, TwoModels
from .cspd_paper import Paper
from .cspd_published import Published
from .editing import Edit
from .loop import Decide, Sampler, Transformer, begin, loop
from .memory import WEIGHTS
from .settings import CSpDSettings
from .transformer import FullTransformer

MODES: dict[str, type[TwoModels]] = {"lossless": Lossless, "paper": Paper, "published": Published}


def _check(draft: MARModel, target: MARModel) -> None:
    """Check that one model can draft for the other.

    Raises:
        UserError: other tokens, another grid, other classes, another device.
    """
    d, t = draft.net.config, target.net.config
    pairs = (
        ("channels per token", d.channels, t.channels),
        ("latent scale", draft.latent_scale, target.latent_scale),
        ("patch", draft.patch, target.patch),
        ("tokens", d.tokens, t.tokens),
        ("the kind of condition", draft.condition, target.condition),
        ("classes", d.classes, t.classes),
        ("the largest beta of their diffusion", draft.max_beta, target.max_beta),
        ("label set", draft.label_set or target.label_set, target.label_set or draft.label_set),
        ("device", next(draft.net.parameters()).device, next(target.net.parameters()).device),
    )
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise UserError(
                f"draft: {draft.name} and the target {target.name} differ in {what}, {theirs} and {ours}; "
                "take a draft that was trained on the target's tokens and classes."
            )


def cspd(
    model: MARModel,
    condition: MaskedCondition,
    settings: CSpDSettings,
    noise: Noise,
    seed: int | None = None,
    transformer: Transformer | None = None,
    edit: Edit | None = None,
    *,
    draft: MARModel,
    draft_transformer: Transformer | None = None,
    draws: RejectionDraws | None = None,
) -> Sampler:
    """CSpD with ``model`` as target.

    Args:
        model, condition, noise, seed: as :func:`samplers.mar.mar`.
        settings: see :class:`CSpDSettings`.
        transformer: how the target's networks are run; None for in full. Asked at verifications only (and in the pre-fill).
        edit: part of a picture to be drawn anew; None for a whole new one.
        draft: the model that drafts.
        draft_transformer: how the draft's networks are run; None for in full.
        draws: random numbers of the approximate modes; None for those of the noise.

    Yields:
        :class:`Step` after every AR step, drafts shown; returns :class:`Sampled`. Passes and head calls in the report are
        both models' together; ``draft_passes`` and ``draft_head_calls`` say how many of them were the draft's.

    Raises:
        UserError: what :func:`samplers.mar.mar` raises; a draft of other tokens, grid, classes or on another device.
    """
    _check(draft, model)
    run = begin("cspd", model, condition, settings, noise, seed, edit)
    run.report.model = f"{model.name}, drafted by {draft.name}"
    run.report.memory |= {f"{WEIGHTS}draft {name}": count for name, count in draft.weights().items()}
    with torch.no_grad():
        rows = condition.rows(draft, run.guided)
        models = Models(draft, rows, transformer or FullTransformer(), draft_transformer or FullTransformer(), draws)
        decide: Decide = MODES[settings.mode](run, settings, models)
    return (yield from loop(run, decide))
