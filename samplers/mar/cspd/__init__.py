"""CSpD: a small MAR model drafts tokens, and a large MAR model (the target) verifies the drafts.

Source: Wang et al. 2024, "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv 2411.11925), and
its published code. In the *prefill*, the first AR steps, the target samples all tokens itself, as in MAR. All later AR
steps are divided into *segments*. A segment is one AR step or several consecutive ones: the draft model drafts all of
them before the target verifies their drafts. The *mode* says how the target verifies:

- ``published``: the rule of the published code, which approximates the target's distribution (``rejection.py``).
- ``paper``: the paper's algorithm 1 (``rejection.py``).
- ``lossless``: FastAR's own mode. Its images have exactly the target's distribution, whatever the draft model is
  (``lossless.py``).

A mode is a class whose method ``segment`` drafts, verifies and decides a segment. ``mode.py`` has what the modes share,
such as the draft model. This file has the checks, the sampler, and the loop over the segments. Read this file first,
then ``mode.py``, and then the modes.

In the names of this folder, ``step`` alone is an AR step. Names that come from the files about diffusion mean diffusion
steps: ``step_table``, ``step_count``, ``drafted_steps`` and ``accepted_steps``. The setting ``speculation`` is about
diffusion steps, too (``samplers/speculation.py``), but the function :func:`speculate` drafts AR steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ....errors import UserError
from ....networks.mar import MARModel
from ....networks.torch_state import in_own_state
from ....reports.record import DRAFTED_BY
from ...conditioning import ClassOrPrompt
from ...editing import Edit
from ...engine import Sampler, remark_draft, run_passes
from ...noise import PairedNoise
from ..canvas import MARCanvas
from ..mar import Diffusion
from ..mar import check as check_mar
from ..prepare import mar_canvas
from ..transformer import FullTransformer, Transformer
from .lossless import Lossless
from .mode import MARDrafter, Mode
from .rejection import Paper, Published
from .settings import CSpDSettings

# The keys are the choices of the setting ``mode``, see settings.py.
MODES: dict[str, type[Mode]] = {
    "published": Published,
    "paper": Paper,
    "lossless": Lossless,
}


def check(model: MARModel, settings: CSpDSettings) -> None:
    """Check the settings for a target model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens, or ``speculation`` above 1 in a mode other than *lossless*.
    """
    check_mar(model, settings)
    _expect_use_of_speculation(settings)


def _expect_use_of_speculation(settings: CSpDSettings) -> None:
    """Raise a UserError if ``speculation`` is above 1 in a mode other than *lossless*. In the other modes, the target
    would draft its own diffusion steps only in the prefill.
    """
    if settings.speculation > 1 and settings.mode != "lossless":
        raise UserError(
            f"speculation: {settings.speculation} is not possible in the mode {settings.mode}, because it would speed "
            "up only the AR steps before the first draft; set speculation to 0, or set mode to lossless."
        )


def check_pair(target: MARModel, draft: MARModel) -> None:
    """Check that two models generate tokens of the same kind, on the same grid, from the same kind of condition.

    Raises:
        UserError: the models differ in tokens, grid, condition, classes or diffusion.
    """
    target_config = target.net.config
    draft_config = draft.net.config
    pairs = {
        "channels per token": (draft_config.channels, target_config.channels),
        "latent scale": (draft.latent_scale, target.latent_scale),
        "patch": (draft.patch, target.patch),
        "tokens": (draft_config.tokens, target_config.tokens),
        "the kind of condition": (draft.condition, target.condition),
        "classes": (draft_config.classes, target_config.classes),
        "the largest beta of their diffusion": (draft.max_beta, target.max_beta),
        # A model without a label set fits every label set.
        "label set": (draft.label_set or target.label_set, target.label_set or draft.label_set),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise UserError(
                f"draft: {draft.name} and the target {target.name} differ in {what} ({found} and {expected}); use a "
                "draft model that was trained with the tokens and classes of the target."
            )


def _expect_one_device(target: MARModel, draft: MARModel) -> None:
    """Raise a UserError if the models are on different devices."""
    if draft.device != target.device:
        raise UserError(
            f"draft: {draft.name} is on {draft.device}, but the target {target.name} is on {target.device}; load both "
            "models on one device."
        )


@in_own_state
@torch.no_grad()
def cspd(
    model: MARModel,
    condition: ClassOrPrompt,
    settings: CSpDSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
    *,
    draft: MARModel,
    make_draft_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
) -> Sampler:
    """Generate images by CSpD with ``model`` as the target. :func:`samplers.mar.mar.mar` explains all other arguments.

    Args:
        make_transformer, make_draft_transformer: make the transformers of the target and of the draft model. The
            target's transformer runs only in the prefill and when the target verifies drafts.
        draft: the model that drafts.

    The report adds up the passes and the head calls of both models; ``draft_passes`` and ``draft_head_calls`` are the
    draft model's part. In mode ``lossless``, the report counts the diffusion steps that the draft model drafts, but not
    the diffusion steps that the target drafts for itself.

    Raises:
        UserError: an error of :func:`samplers.mar.mar.mar`; ``speculation`` above 1 in a mode other than *lossless*;
            models on different devices; or a draft model that :func:`check_pair` rejects.
    """
    _expect_use_of_speculation(settings)
    check_pair(model, draft)
    _expect_one_device(model, draft)
    canvas = mar_canvas("cspd", model, condition, settings, noise, edit)
    canvas.report.model = f"{model.name}{DRAFTED_BY}{draft.name}"
    canvas.report.remark(remark_start(draft, canvas))

    mode_class = MODES[settings.mode]
    drafter = MARDrafter(canvas, draft, condition, make_draft_transformer, mode_class.adds_last_noise)
    transformer = make_transformer(canvas)
    prefill_diffusion = make_prefill_diffusion(canvas, transformer)
    mode = mode_class(canvas, transformer, drafter, prefill_diffusion.noise)

    result = yield from speculate(prefill_diffusion, mode)
    remark_draft(result.report, draft)
    return result


def remark_start(draft: MARModel, canvas: MARCanvas) -> str:
    """A remark if the draft model must start its diffusion at the target's timestep although the draft model's file
    names a lower timestep; else "".
    """
    draft_timestep = draft.first_timestep(canvas.settings.diffusion_steps)
    if canvas.settings.t_max is not None or draft_timestep >= canvas.timesteps.first:
        return ""
    return (
        f"t_max: the draft model starts at timestep {canvas.timesteps.first}, as the target does, but the draft "
        f"model's file says {draft_timestep}; if you set t_max to {draft_timestep}, the target may accept more drafts"
    )


def make_prefill_diffusion(canvas: MARCanvas, transformer: Transformer) -> Diffusion:
    """The diffusion with which the target samples the tokens of the prefill. The report does not count the diffusion
    steps that the target drafts for itself here, which happens only in mode *lossless*.
    """
    table = canvas.step_table(canvas.settings.diffusion_steps)
    return Diffusion(canvas, transformer.heads, [table] * canvas.order.steps, counted=False)


def speculate(prefill_diffusion: Diffusion, mode: Mode) -> Sampler:
    """Run the prefill, and then segment after segment.

    The mode decides the tokens of a segment. In the modes *paper* and *lossless*, a rejection ends the segment early,
    because the later drafts depend on the rejected draft. The next segment then starts after the rejected AR step.
    """
    canvas = mode.canvas
    order = canvas.order

    # 1. The prefill.
    step = canvas.settings.prefill(order.steps)
    plan = {k: order.positions_from(k) for k in range(step)}
    yield from run_passes(canvas, plan, mode.transformer, prefill_diffusion)

    # 2. The segments. A preview also shows drafts.
    while step < order.steps:
        for next_step in mode.segment(step):
            yield from canvas.yield_step(next_step, partial(canvas.view, mode.drafter.drafted))
        step = next_step

    return canvas.finish()
