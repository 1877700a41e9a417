"""The canvas of MAR-like models: the state of the images while a sampler generates them.

In each AR step, a sampler decides some tokens of every image; ``order.py`` says which tokens. :func:`mar_canvas` checks
the inputs of a sampler and makes the canvas. :meth:`MARCanvas.batch` makes the batches for the diffusion of tokens.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. Shapes: B images, L tokens of c channels, S diffusion steps, and
P branches. P is 2 with guidance: the branch with the condition, and the null branch without it. P is 1 without
guidance. A position is the index of a token in its image, counted row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.mar import Conditioning, MARModel
from ...networks.torch_state import to_device
from ...reports.record import Clock, Report
from ..chain import DiffusionBatch
from ..conditioning import ClassOrPrompt, expect_kind
from ..diffusion_steps import StepTable, noise_for_steps, step_table
from ..editing import LARGEST_LATENT, Edit, edit_digests
from ..engine import Canvas, Sampled, start_report
from ..noise import PairedNoise, StreamNoise, stream_noise
from .conditions import read_condition
from .order import Order, make_order
from .settings import SAFE_FIRST_TIMESTEP, MARBase
from .tables import Respacing, respacing
from .tokens import TokenIndex


class StartTimesteps(NamedTuple):
    """Two timesteps. They differ only if the settings limit the first timestep; see :func:`start_timesteps`."""

    # Where the diffusion of every token starts, also in a draft model, and also in the shorter diffusions of DiSA and
    # FastHybrid.
    first: int
    # Where the diffusion of unaccelerated MAR starts. The noise of the run has an entry for every step of this
    # diffusion, so this noise is identical to the noise of unaccelerated MAR.
    of_noise: int


@dataclass(eq=False)
class MARCanvas(Canvas):
    """The canvas of a MAR model. ``values`` are the tokens, fp32 [B, L, c]."""

    model: MARModel
    settings: Any  # the settings of the sampler, a MARBase
    noise: PairedNoise
    order: Order = field(kw_only=True)
    conditioning: Conditioning = field(kw_only=True)  # the condition as the network reads it
    # The latents of the image to edit, fp32 [1 or B, C, H, W]; None without an edit.
    edit_latents: Tensor | None = field(default=None, kw_only=True)
    timesteps: StartTimesteps = field(kw_only=True)  # where the diffusions start

    guided: bool = field(init=False)  # whether guidance is on, so there is a null branch

    # State of LazyMAR, int32 [B, L]: for each token, how many passes took the token's row in the decoder from the token
    # cache. None without this cache.
    cached: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total = self.order.steps
        self.guided = self.settings.uses_guidance

    def with_model(self, model: MARModel, condition: ClassOrPrompt, report: Report) -> MARCanvas:
        """A new canvas for a second model, which reads the tokens of the same images. Only the first canvas (``self``)
        decides tokens.

        ``condition``: the condition as the second model reads it. ``report`` counts the second model's work. The two
        canvases share everything else that a sampler reads: the tensor of the tokens, the order, the noise, the clock,
        and the timestep at which the diffusion starts.
        """
        return MARCanvas(
            model,
            self.settings,
            self.noise,
            self.grid,
            self.values,
            report,
            regenerated=self.regenerated,
            order=self.order,
            conditioning=read_condition(model, condition, self.guided),
            edit_latents=self.edit_latents,
            timesteps=self.timesteps,
            clock=self.clock,
        )

    def to_latents(self, values: Tensor) -> Tensor:
        """Turn tokens, fp32 [B, L, c], into latents, fp32 [B, C, H, W]. In an edit, the latents outside the mask
        come from :attr:`edit_latents`.
        """
        latents = self.model.to_latents(values)
        if self.edit_latents is None or self.regenerated is None:
            return latents
        patch = self.model.patch
        sampled = self.regenerated.unflatten(1, self.grid)[:, None]  # bool [B, 1, h, w]
        sampled = sampled.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        return torch.where(sampled, latents, self.edit_latents)

    @torch.inference_mode(False)
    def finish(self) -> Sampled:
        """See :meth:`.Canvas.finish`. With LazyMAR's token cache, the report also gets the map :attr:`cached`."""
        if self.cached is not None:
            cached = self.cached.unflatten(1, self.grid).cpu().numpy()
            self.report.maps["cached"] = cached
            self.report.add(cached_tokens=int(cached.sum()))
        return super().finish()

    # --- the diffusion of a token

    def respaced_diffusion(self, count: int) -> Respacing:
        """The coefficients of a diffusion in at most ``count`` steps; see :func:`.tables.respacing`."""
        return respacing(count, self.timesteps.first, self.model.max_beta)

    def step_table(self, count: int) -> StepTable:
        """The steps of :meth:`respaced_diffusion`, on the device. As in the published code, the last step adds no
        noise.
        """
        respaced = self.respaced_diffusion(count)
        return step_table(respaced.without_last_noise, self.time_embeddings(respaced))

    @torch.no_grad()
    def time_embeddings(self, respaced: Respacing) -> Tensor:
        """The diffusion head's embeddings of the timesteps, [S, w], highest timestep first; w is the head's width."""
        return self.model.net.head.time_embed(to_device(respaced.timestep_map.flip(0), self.device))

    def noise_of(self, stream: str) -> StreamNoise:
        """The noise of a stream (see :class:`.StreamNoise`) for every token, on the device.

        Raises:
            LookupError: ``settings.streams()`` lacks the stream.
        """
        streams = self.settings.streams()
        if stream not in streams:
            raise LookupError(
                f"{type(self.settings).__name__}.streams() lacks {stream!r}; declare its diffusion steps."
            )

        c = self.model.net.config
        count = len(respacing(streams[stream], self.timesteps.of_noise, self.model.max_beta))
        return stream_noise(self.noise, stream, count, c.tokens, c.channels, self.device)

    def batch(self, table: StepTable, tokens: TokenIndex, z: Tensor, noise: StreamNoise) -> DiffusionBatch:
        """A batch for the diffusion of N tokens, in their states before the first diffusion step of ``table``. Each
        token gets the guidance scale of the AR step that decides it.

        Args:
            table: the diffusion steps to take.
            tokens: the N tokens.
            z: the conditions z of n positions in each image, [P, B, n, C]; the N tokens are at some or all of these
                positions. C is the transformer's width.
            noise: noise of all tokens of the images; it may have more diffusion steps than ``table``.
        """
        image, position = tokens.index
        of_tokens = z.flatten(1, 2) if tokens.column is None else z[:, image, tokens.column]  # [P, N, C]
        return DiffusionBatch(
            z=of_tokens,
            cfg=self.order.scale[tokens.index][:, None],
            x=noise.start[tokens.index],
            noise=noise_for_steps(noise.steps[:, image, position], len(table.times)),
            table=table,
            temperature=self.settings.temperature,
        )


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
    c = model.net.config
    expect_kind(condition, model.condition, model.name)
    report = start_report(name, model, condition, settings, noise)

    clock = Clock(model.device)
    conditioning = read_condition(model, condition, settings.uses_guidance)

    tokens = torch.zeros(len(condition), c.tokens, c.channels, device=model.device)
    regenerated = edit_latents = None
    if edit is not None:
        edit_latents, regenerated = latents_and_mask(model, edit, len(condition), model.device)
        tokens = model.to_tokens(edit_latents.expand(len(condition), -1, -1, -1))
        report.edits = edit_digests(tokens, regenerated)

    # In the published code, and in ``noise.orders``, the last entry of a random order is decided first. Reverse the
    # orders here, so that the first entry is decided first everywhere else.
    random_orders = noise.orders(c.tokens).flip(1)
    order = make_order(settings.orders(random_orders).to(model.device), settings, regenerated)
    return MARCanvas(
        model,
        settings,
        noise,
        (c.grid, c.grid),
        tokens,
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
    c = model.net.config
    want = (c.channels // model.patch**2, c.grid * model.patch, c.grid * model.patch)
    if edit.start.ndim != 4 or tuple(edit.start.shape[1:]) != want:
        raise UserError(
            f"latent_image: its shape is {list(edit.start.shape)}, but {model.name} has latents of the shape [batch, "
            f"{', '.join(map(str, want))}]; encode an image of the model's own size with VAE Encode and the vae of the "
            "same loader."
        )
    mask = edit.token_mask(c.grid, images, device)
    largest = float(edit.start.float().abs().max())
    if largest > LARGEST_LATENT:
        raise UserError(
            f"latent_image: it holds numbers up to {largest:.3g}, but a decoder's latents stay below "
            f"{LARGEST_LATENT}; encode an image with VAE Encode and the vae of the same loader."
        )
    counts = mask.sum(1).tolist()
    if min(counts) != max(counts):
        raise UserError(
            f"mask: the masks of the batch cover different numbers of tokens ({min(counts)} to {max(counts)}); "
            "use one mask for all images of the batch, or run the images separately."
        )
    return edit.start.to(device, torch.float32), mask
