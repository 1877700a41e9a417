"""CSpD: a small MAR drafts tokens, a large one (the target) verifies them.

Source: Wang et al. 2024, "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv 2411.11925), and
its published code. Three modes, a file each:

- ``published`` (``cspd_published.py``): the rule of the published code; approximate.
- ``paper`` (``cspd_paper.py``): the paper's algorithm 1.
- ``lossless`` (``cspd_lossless.py``): ours; exactly the target's distribution, whatever the draft.

``drafting.py`` has the draft model's AR steps, which all share, and ``rejection.py`` the judgement of the first two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ...model_loaders.networks.torch_state import in_own_state
from ...reports.record import DRAFTED_BY
from ..conditioning import MaskedCondition
from ..editing import Edit
from ..engine import Sampler, remark_draft
from ..noise import PairedNoise
from .canvas import MARCanvas, mar_canvas
from .cspd_lossless import lossless_steps
from .cspd_paper import paper_steps
from .cspd_published import published_steps
from .drafting import Drafter
from .settings import CSpDSettings
from .transformer import FullTransformer, Transformer


def check_pair(draft: MARModel, target: MARModel) -> None:
    """Check that two models draw the same tokens of the same conditions.

    Raises:
        UserError: they differ in tokens, grid, condition, classes or diffusion.
    """
    ours = target.net.config
    theirs = draft.net.config
    pairs = {
        "channels per token": (theirs.channels, ours.channels),
        "latent scale": (draft.latent_scale, target.latent_scale),
        "patch": (draft.patch, target.patch),
        "tokens": (theirs.tokens, ours.tokens),
        "the kind of condition": (draft.condition, target.condition),
        "classes": (theirs.classes, ours.classes),
        "the largest beta of their diffusion": (draft.max_beta, target.max_beta),
        # A model without a label set is taken at its word.
        "label set": (draft.label_set or target.label_set, target.label_set or draft.label_set),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise UserError(
                f"draft: {draft.name} and the target {target.name} differ in {what}, {found} and {expected}; "
                "use a draft model that was trained on the target's tokens and classes."
            )


def _expect_one_device(draft: MARModel, target: MARModel) -> None:
    """Raise a UserError if the models are on two devices."""
    device = next(target.net.parameters()).device
    draft_device = next(draft.net.parameters()).device
    if draft_device != device:
        raise UserError(
            f"draft: {draft.name} is on {draft_device} and the target {target.name} on {device}; "
            "load both on one device."
        )


@in_own_state
def cspd(
    model: MARModel,
    condition: MaskedCondition,
    settings: CSpDSettings,
    noise: PairedNoise,
    make_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
    edit: Edit | None = None,
    *,
    draft: MARModel,
    make_draft_transformer: Callable[[MARCanvas], Transformer] = FullTransformer,
) -> Sampler:
    """CSpD with ``model`` as target; arguments as :func:`samplers.mar.mar.mar`, and:

    Args:
        make_transformer, make_draft_transformer: how the two models' transformers are evaluated. The target's runs at
            verifications and in the prefill only.
        draft: the model that drafts.

    Passes and head calls in the report are both models' together; ``draft_passes`` and ``draft_head_calls`` say how
    many were the draft's.

    Raises:
        UserError: as :func:`samplers.mar.mar.mar`; a draft of other tokens, grid, classes or on another device.
    """

    check_pair(draft, model)
    _expect_one_device(draft, model)
    canvas = mar_canvas("cspd", model, condition, settings, noise, edit)
    canvas.report.model = f"{model.name}{DRAFTED_BY}{draft.name}"

    draft.net.begin_run()
    with torch.no_grad():
        transformer = make_transformer(canvas)
        last_noise = settings.mode == "paper"
        drafter = Drafter(canvas, draft, condition, make_draft_transformer, last_noise)

    modes = {"published": published_steps, "paper": paper_steps, "lossless": lossless_steps}
    result = yield from modes[settings.mode](canvas, transformer, drafter, settings)
    remark_draft(result.report, draft)
    return result
