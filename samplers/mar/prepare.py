"""What a MAR sampler does before its first AR step: it checks the inputs, reads the condition, makes the order of the
tokens, and makes the canvas.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. Shapes: B images of L tokens. A position is the index of a token
in its image, counted row by row.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.hybrid import HybridModel
from ...networks.mar import ClassConditioning, Conditioning, MARModel
from ...networks.torch_state import to_device
from ...reports.record import Clock
from ..conditioning import ClassCondition, ClassOrPrompt, PromptCondition, expect_kind
from ..editing import LARGEST_LATENT, Edit, edit_digests
from ..engine import start_report
from ..noise import PairedNoise
from .canvas import MARCanvas, Order, StartTimesteps
from .settings import SAFE_FIRST_TIMESTEP, MARBase


@torch.no_grad()
def mar_canvas(
    name: str,
    model: MARModel,
    condition: ClassOrPrompt,
    settings: MARBase,
    noise: PairedNoise,
    edit: Edit | None,
) -> MARCanvas:
    """Check the inputs of the sampler ``name`` and return the canvas. :func:`samplers.mar.mar.mar` explains the other
    arguments. The canvas's clock starts before the network reads the condition.

    Raises:
        UserError: the inputs do not fit the model, or do not fit each other.
    """
    config = model.net.config
    expect_kind(condition, model.condition, model.name)
    report = start_report(name, model, condition, settings, noise)

    clock = Clock(model.device)
    conditioning = read_condition(model, condition, settings.uses_guidance)

    # The tokens, fp32 [B, L, c]. In an edit, the tokens to regenerate also start with their values in the edited image.
    # No pass reads these values: the transformer reads only decided tokens.
    values = torch.zeros(len(condition), config.tokens, config.channels, device=model.device)
    regenerated = edit_latents = None
    if edit is not None:
        edit_latents, regenerated = latents_and_mask(model, edit, len(condition), model.device)
        values = model.to_tokens(edit_latents.expand(len(condition), -1, -1, -1))
        report.edits = edit_digests(values, regenerated)

    # In the published code, and in ``noise.orders``, the last entry of a random order is decided first. Reverse the
    # orders here, so that the first entry is decided first everywhere else.
    random_orders = noise.orders(config.tokens).flip(1)
    order = make_order(settings.orders(random_orders).to(model.device), settings, regenerated)
    return MARCanvas(
        model,
        settings,
        noise,
        (config.grid, config.grid),
        values,
        report,
        regenerated=regenerated,
        order=order,
        conditioning=conditioning,
        edit_latents=edit_latents,
        timesteps=start_timesteps(model, settings),
        clock=clock,
    )


def start_timesteps(model: MARModel, settings: MARBase) -> StartTimesteps:
    """The timesteps at which the diffusions of a run start. ``first`` is lower than ``of_noise`` only with DiSA, and
    only if the user has not set ``t_max``.
    """
    unaccelerated = settings.t_max or model.first_timestep(settings.diffusion_steps)
    if settings.t_max is None and settings.limits_first_timestep:
        return StartTimesteps(min(unaccelerated, SAFE_FIRST_TIMESTEP), of_noise=unaccelerated)
    return StartTimesteps(unaccelerated, of_noise=unaccelerated)


def latents_and_mask(model: MARModel, edit: Edit, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The latents of the image to edit, fp32 [1 or B, C, H, W], and which tokens to sample, bool [B, L].

    Raises:
        UserError: the shape of the latents does not fit the model, the latents are far outside the range of a decoder,
            or the masks of the batch cover different numbers of tokens. See also :meth:`Edit.token_mask`.
    """
    config = model.net.config
    side = config.grid * model.patch
    expected = (config.channels // model.patch**2, side, side)  # C, H, W
    if edit.start.ndim != 4 or tuple(edit.start.shape[1:]) != expected:
        raise UserError(
            f"latent_image: its shape is {list(edit.start.shape)}, but {model.name} has latents of the shape [batch, "
            f"{', '.join(map(str, expected))}]; encode an image of the model's own size with VAE Encode and the vae of "
            "the same loader."
        )
    regenerated = edit.token_mask(config.grid, images, device)
    largest = float(edit.start.float().abs().max())
    if largest > LARGEST_LATENT:
        raise UserError(
            f"latent_image: it holds numbers up to {largest:.3g}, but a decoder's latents stay below "
            f"{LARGEST_LATENT}; encode an image with VAE Encode and the vae of the same loader."
        )
    counts = regenerated.sum(1).tolist()
    if min(counts) != max(counts):
        raise UserError(
            f"mask: the masks of the batch cover different numbers of tokens ({min(counts)} to {max(counts)}); "
            "use one mask for all images of the batch, or run the images separately."
        )
    return edit.start.to(device, torch.float32), regenerated


def make_order(orders: Tensor, settings: MARBase, regenerated: Tensor | None = None) -> Order:
    """Divide the positions of the images among the AR steps.

    Args:
        orders: int64 [B, L], the positions of each image in the order in which they are to be decided.
        settings: the settings that determine the number of AR steps and the guidance scales.
        regenerated: bool [B, L], in an edit, the positions to decide; their number is the same in every image. The
            other positions are fixed. None to decide all positions.
    """
    token_count = orders.shape[1]
    fixed_count = 0 if regenerated is None else token_count - int(regenerated[0].sum())

    # 1. How many positions each AR step decides. A mask over the whole image fixes nothing, so it does not count as an
    #    edit here: as in a run without an edit, more AR steps than tokens are an error.
    masked_counts = settings.masked_after_steps(token_count, regenerated if fixed_count else None)
    count_after = [token_count - masked for masked in masked_counts]
    count_before = [fixed_count, *count_after[:-1]]
    sizes = [after - before for before, after in zip(count_before, count_after, strict=True)]

    # 2. The guidance scale of each AR step.
    cfg = [settings.cfg] * len(sizes)
    if settings.cfg_schedule == "linear":
        # As in the published code, 1 token still counts as masked after the last AR step. So linear guidance ends
        # slightly below cfg.
        cfg = [1 + (settings.cfg - 1) * (token_count - max(1, masked)) / token_count for masked in masked_counts]

    # 3. The guidance scale of each position: first listed in the order of decision, then rearranged so that entry i
    #    belongs to position i.
    decision_order = orders if regenerated is None else moved_to_front(orders, ~regenerated)
    scale_of_steps = torch.tensor([1.0, *cfg]).repeat_interleave(torch.tensor([fixed_count, *sizes]))
    scale_in_order = to_device(scale_of_steps, orders.device).expand_as(orders)
    scale = torch.empty_like(scale_in_order).scatter(1, decision_order, scale_in_order)

    return Order(tuple(count_before), tuple(sizes), tuple(cfg), decision_order, scale)


def moved_to_front(orders: Tensor, mask: Tensor) -> Tensor:
    """Move some positions to the front of ``orders``, int64 [B, L]: the positions at which ``mask``, bool [B, L], is
    True. The moved positions keep their order, and so do all other positions.
    """
    is_later = (~mask).gather(1, orders).to(torch.uint8)  # 0 at the positions to move, so the sort puts these first
    return orders.gather(1, is_later.argsort(dim=1, stable=True))


def read_condition(model: MARModel, condition: ClassOrPrompt, guided: bool) -> Conditioning:
    """Turn a condition into the form that the network reads. The condition must be of the kind that the model reads.

    ``guided``: whether a language model also reads the instruction of the null branch. A model of class labels reads no
    instruction, because the null class is a part of its network.

    Raises:
        UserError: the condition has no label or prompt, or has a label or prompt that the model cannot read.
    """
    if isinstance(condition, ClassCondition):
        ids = condition.class_ids(model.net.config.classes, model.label_set, model.device)
        return ClassConditioning(model.net, ids)

    condition.expect_prompt()
    return cast(HybridModel, model).conditioning(condition.texts, condition.unconditional, guided)


def prompt_tokens(model: HybridModel, condition: PromptCondition, guided: bool) -> int:
    """Number of prompt tokens in the KV cache of the model's language model. If ``guided`` is true, the number includes
    the tokens of the null branch's instruction. A prompt that several images share counts once.
    """
    null_tokens = len(model.instruction(condition.unconditional)) if guided else 0
    texts = dict.fromkeys(condition.texts)
    return null_tokens + sum(len(model.prompt(text)) for text in texts)
