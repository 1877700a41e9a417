"""The canvas of MAR-like models: the state of the images while a sampler generates them.

An AR step is one of the steps in which the sampler decides the tokens of the images. :class:`Order` says which tokens
each AR step decides. :func:`mar_canvas` checks the inputs of a sampler and makes the canvas.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. Shapes: B images, L tokens of c channels, S diffusion steps, and
P branches of guidance (2 with guidance, 1 without). A position is the index of a token in its image, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.mar import Conditioning, MARModel
from ...networks.torch_state import to_device
from ...reports.record import Clock, Report
from .. import chain
from ..conditioning import ClassOrPrompt, expect_kind
from ..editing import LARGEST_LATENT, Edit, edit_digests
from ..engine import Canvas, Sampled, start_report
from ..noise import PairedNoise
from .settings import SAFE_FIRST_TIMESTEP, MARBase
from .tables import Respacing, respacing


class Order:
    """Which positions each AR step decides, and with which guidance scale.

    The order is known before the first AR step. A new method may choose the positions of an AR step itself: it reads
    the candidates with :meth:`next_positions` and writes its choice with :meth:`choose`. No sampler of FastAR does
    this; CONTRIBUTING.md has an example.

    Args:
        reversed_orders: int64 [B, L], a permutation of the positions per image; the last position is decided first.
        settings: the settings that give the number of AR steps and the guidance.
        regenerated: bool [B, L], the positions to decide, the same number in every image; None to decide all positions.
    """

    steps: int  # AR steps
    # One entry for each AR step, the same for all images:
    count_before: list[int]  # number of positions decided before the AR step
    count_after: list[int]  # number of positions decided once the AR step is done
    sizes: list[int]  # number of positions that the AR step decides
    cfg: list[float]  # guidance scale
    decision_order: Tensor  # int64 [B, L], the positions in the order of their decision; fixed ones first
    scale: Tensor  # fp32 [B, L], the guidance scale of every position

    def __init__(self, reversed_orders: Tensor, settings: MARBase, regenerated: Tensor | None = None):
        tokens = reversed_orders.shape[1]
        fixed_count = 0 if regenerated is None else tokens - int(regenerated[0].sum())
        masked_counts = settings.masked_after_steps(tokens, regenerated if fixed_count else None)
        self.steps = len(masked_counts)
        self.count_after = [tokens - masked for masked in masked_counts]
        self.count_before = [fixed_count, *self.count_after[:-1]]
        self.sizes = [end - start for start, end in zip(self.count_before, self.count_after, strict=True)]

        self.cfg = [settings.cfg] * self.steps
        if settings.cfg_schedule == "linear":
            # The published code's last mask length is 1, so its linear guidance ends just short of cfg.
            self.cfg = [1 + (settings.cfg - 1) * (tokens - max(1, masked)) / tokens for masked in masked_counts]

        # The published code decides an order from its end, so the order is reversed here. In an edit, the positions
        # with fixed tokens come first.
        self.decision_order = reversed_orders.flip(1)
        if regenerated is not None:
            self.decision_order = moved_to_front(self.decision_order, ~regenerated)

        in_order = torch.tensor([1.0, *self.cfg]).repeat_interleave(torch.tensor([fixed_count, *self.sizes]))
        self._scale_in_order = to_device(in_order, reversed_orders.device).expand_as(reversed_orders)
        self.scale = self._scale_of_positions()

    def _scale_of_positions(self) -> Tensor:
        """The guidance scale of every position, fp32 [B, L]: the scale of the AR step that decides the position."""
        return torch.empty_like(self._scale_in_order).scatter(1, self.decision_order, self._scale_in_order)

    @property
    def plan(self) -> dict[int, Tensor]:
        """The positions that each AR step decides, int64 [B, n], by the number of the AR step."""
        return {step: self.positions_from(step) for step in range(self.steps)}

    def positions_from(self, step: int, steps: int = 1) -> Tensor:
        """The positions that ``steps`` AR steps from ``step`` on decide, int64 [B, M], in the order of these AR steps.
        Near the end there may be fewer AR steps.
        """
        return self.decision_order[:, self.count_before[step] : self.count_after[min(step + steps, self.steps) - 1]]

    def between(self, first: int, stop: int) -> Tensor:
        """The positions that the AR steps ``first`` to ``stop - 1`` decide, int64 [B, M]."""
        return self.decision_order[:, self.count_before[first] : self.count_before[stop]]

    def next_positions(self, step: int, count: int) -> Tensor:
        """The next ``count`` positions to decide at AR step ``step``, int64 [B, M]; fewer if fewer are left."""
        start = self.count_before[step]
        return self.decision_order[:, start : start + count]

    def choose(self, step: int, positions: Tensor) -> None:
        """Let AR step ``step`` decide ``positions``, int64 [B, n], which must be undecided; n is the size of the AR
        step. All other undecided positions keep their order.
        """
        start = self.count_before[step]
        undecided = self.decision_order[:, start:]
        chosen = torch.zeros_like(self.decision_order, dtype=torch.bool).scatter(1, positions, True)
        others = moved_to_front(undecided, ~chosen)[:, : undecided.shape[1] - self.sizes[step]]

        self.decision_order = torch.cat([self.decision_order[:, :start], positions, others], 1)
        self.scale = self._scale_of_positions()

    def decided_before(self, step: int) -> Tensor:
        """The positions decided before AR step ``step``, int64 [B, K], ascending."""
        return self.decision_order[:, : self.count_before[step]].sort(dim=1).values

    def decided_before_each(self, images: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """:meth:`decided_before` for R rows, each of which is an image at its own AR step.

        Args:
            images: int64 [R], the image of each row.
            steps: the AR step of each row.

        Returns:
            The positions of each row, int64 [R, K], ascending, with padding after them; and a mask, bool [R, K], which
            is False on padding. The mask is None if there is no padding.
        """
        counts = [self.count_before[step] for step in steps]
        most = max(counts)
        decided = self.decision_order[images, :most]
        if min(counts) == most:
            return decided.sort(dim=1).values, None

        # For the sort, the padding gets a number above every position, so it comes last.
        last = self.decision_order.shape[1] - 1
        mask = torch.arange(most, device=decided.device) < to_device(torch.tensor(counts), decided.device)[:, None]
        padded_last = torch.where(mask, decided, last + 1).sort(dim=1).values
        return padded_last.clamp(max=last), mask


def moved_to_front(order: Tensor, mask: Tensor) -> Tensor:
    """Move the positions where ``mask``, bool [B, L], is True to the front of ``order``, int64 [B, n]. The moved
    positions keep their order, and so do all other positions.
    """
    is_later = (~mask).gather(1, order).to(torch.uint8)
    return order.gather(1, is_later.argsort(dim=1, stable=True))


@dataclass(frozen=True, eq=False)
class Tokens:
    """N tokens of a batch of images; the images may have different numbers of tokens. In this example, a mask chooses
    three tokens from the positions of two images. Each row of ``positions`` and of ``mask`` is an image::

        positions    5 2 7        mask    0 1 0        image       0 1 1
                     4 0 1                1 0 1        position    2 4 1
                                                       column      1 0 2
    """

    # Image and position of each token, int64 [N] each. For values [B, L, ...] of all tokens, ``values[tokens.index]``
    # are the values of these tokens.
    index: tuple[Tensor, Tensor]
    # int64 [N], the index of each token among the positions of its image from which it was chosen. None if all of these
    # positions were chosen, one image after another.
    column: Tensor | None = None

    @staticmethod
    def all(positions: Tensor) -> Tokens:
        """All tokens at ``positions``, int64 [B, n], one image after another."""
        image = torch.arange(len(positions), device=positions.device).repeat_interleave(positions.shape[1])
        return Tokens((image, positions.flatten()))

    @staticmethod
    def in_columns(columns: Tensor, positions: Tensor) -> Tokens:
        """The tokens in these ``columns``, int64 [B, m], of ``positions``, int64 [B, n], one image after another."""
        image = torch.arange(len(columns), device=columns.device).repeat_interleave(columns.shape[1])
        column = columns.flatten()
        return Tokens((image, positions[image, column]), column)

    @staticmethod
    def step_by_step(positions: Sequence[Tensor]) -> Tokens:
        """All tokens of several AR steps, one AR step after another, and in each AR step one image after another.

        ``positions``: int64 [B, n] for each AR step. The columns of the result are indices into the positions of all
        these AR steps side by side.
        """
        side_by_side = torch.cat([*positions], 1)
        columns = torch.arange(side_by_side.shape[1], device=side_by_side.device).expand_as(side_by_side)
        columns_of_steps = columns.split([step_positions.shape[1] for step_positions in positions], 1)

        image = torch.cat([Tokens.all(step_positions).index[0] for step_positions in positions])
        column = torch.cat([part.flatten() for part in columns_of_steps])
        return Tokens((image, side_by_side[image, column]), column)

    def __len__(self) -> int:
        return len(self.index[0])


class StreamNoise(NamedTuple):
    """The noise of one stream for every token, fp32. A stream is a sequence of random numbers with a name; for example,
    the stream "full" is for the diffusion of plain MAR.
    """

    start: Tensor  # the state before the first diffusion step, [B, L, c]
    steps: Tensor  # the noise of each diffusion step, [S, B, L, c]


@dataclass(eq=False)
class MARCanvas(Canvas):
    """The canvas of a MAR model. ``values`` are the tokens, fp32 [B, L, c]. In an edit, the resulting latents outside
    the mask are bit-identical to the latents that the edit starts from.
    """

    model: MARModel
    settings: Any  # the settings of the sampler, a MARBase
    noise: PairedNoise
    order: Order = field(kw_only=True)
    conditioning: Conditioning = field(kw_only=True)  # the condition as the network reads it
    # The latents that an edit starts from, fp32 [1 or B, C, H, W]; None without an edit.
    edit_latents: Tensor | None = field(default=None, kw_only=True)
    # int32 [B, L], how often each token's decoder rows came from LazyMAR's cache; None without this cache.
    cached: Tensor | None = field(default=None, kw_only=True)

    guided: bool = field(init=False)  # whether guidance is on, so there is a branch without the condition
    # bool [B, L], the positions at which CSpD has written drafts since it last discarded drafts. A position stays True
    # after its draft has been verified.
    drafted: Tensor = field(init=False)
    # The diffusion timestep from which every token is denoised. A draft model starts from the same timestep, and so do
    # the shorter diffusions of DiSA and FastHybrid.
    first_timestep: int = field(init=False)
    # The timestep from which plain MAR denoises every token; :attr:`first_timestep` is lower if the settings clip it.
    # The noise has an entry for every step of a diffusion from this timestep, so it is identical to plain MAR's noise.
    noise_timestep: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.settings
        self.total = self.order.steps
        self.guided = settings.uses_guidance
        self.drafted = torch.zeros_like(self.outcome, dtype=torch.bool)

        self.noise_timestep = settings.t_max or self.model.first_timestep(settings.diffusion_steps)
        self.first_timestep = self.noise_timestep
        if settings.t_max is None and settings.limits_first_timestep:
            self.first_timestep = min(self.first_timestep, SAFE_FIRST_TIMESTEP)

    def with_model(self, model: MARModel, condition: ClassOrPrompt, report: Report) -> MARCanvas:
        """A canvas of the same images for another model, with another report that counts the model's work.

        Both canvases share everything else, such as the tokens, the drafts, the measured seconds, and the timestep at
        which the diffusion starts.
        """
        model.net.begin_run()
        other = copy(self)
        other.model = model
        other.conditioning = condition.conditioning(model, self.guided)
        other.report = report
        return other

    @property
    def decided(self) -> Tensor:
        """The positions that have a value, bool [B, L]: sampled, fixed by an edit, or drafted."""
        return super().decided | self.drafted

    def draft(self, positions: Tensor, values: Tensor) -> None:
        """Write the drafts ``values``, fp32 [B, n, c], at ``positions``, int64 [B, n], which are not decided yet."""
        self.drafted.scatter_(1, positions, True)
        self.values.scatter_(1, positions[..., None].expand_as(values), values)

    def discard_drafts(self) -> None:
        """Mark no position as drafted any more. The values of the drafts stay until other values replace them."""
        self.drafted.fill_(False)

    def to_latents(self, values: Tensor) -> Tensor:
        latents = self.model.to_latents(values)
        if self.edit_latents is None or self.regenerated is None:
            return latents
        patch = self.model.patch
        sampled = self.regenerated.unflatten(1, self.grid)[:, None]  # bool [B, 1, h, w]
        sampled = sampled.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        return torch.where(sampled, latents, self.edit_latents)

    @torch.inference_mode(False)
    def finish(self) -> Sampled:
        if self.cached is not None:
            cached = self.cached.unflatten(1, self.grid).cpu().numpy()
            self.report.maps["cached"] = cached
            self.report.add(cached_tokens=int(cached.sum()))
        return super().finish()

    # --- the diffusion of a token

    def respacing(self, count: int) -> Respacing:
        """The numbers of a diffusion in at most ``count`` steps; see :func:`.tables.respacing`."""
        return respacing(count, self.first_timestep, self.model.max_beta)

    def step_table(self, count: int) -> chain.StepTable:
        """The steps of :meth:`respacing`, on the device. As usual in MAR, the last step adds no noise."""
        respaced = self.respacing(count)
        return chain.step_table(respaced.without_last_noise, self.time_embeddings(respaced))

    @torch.no_grad()
    def time_embeddings(self, respaced: Respacing) -> Tensor:
        """The diffusion head's embeddings of the timesteps, [S, w], highest timestep first; w is the head's width."""
        return self.model.net.head.time_embed(to_device(respaced.timestep_map.flip(0), self.device))

    def noise_of(self, stream: str) -> StreamNoise:
        """The noise of a stream for every token, on the device.

        Raises:
            LookupError: the settings do not declare how many diffusion steps the stream has.
        """
        streams = self.settings.streams()
        if stream not in streams:
            raise LookupError(
                f"{type(self.settings).__name__}.streams() lacks {stream!r}; declare its diffusion steps."
            )

        c = self.model.net.config
        count = len(respacing(streams[stream], self.noise_timestep, self.model.max_beta))
        start = self.noise.start_noise(stream, c.tokens, c.channels)
        steps = self.noise.step_noise(stream, count, c.tokens, c.channels)
        return StreamNoise(to_device(start, self.device), to_device(steps, self.device).transpose(0, 1))

    def batch(
        self, table: chain.StepTable, tokens: Tokens, z: Tensor, noise: StreamNoise, step: int | None = None
    ) -> chain.DiffusionBatch:
        """The batch of tokens, in their states before the first diffusion step of ``table``.

        Args:
            table: the diffusion steps to take.
            tokens: the N tokens.
            z: the transformer's output for the positions from which the tokens were chosen, [P, B, n, C], where C is
                the transformer's width.
            noise: noise of all tokens of the images; it may have more diffusion steps than ``table``.
            step: the AR step whose guidance scale all tokens get. None: each token gets the guidance scale of the AR
                step that decides it.
        """
        image, position = tokens.index
        of_tokens = z.flatten(1, 2) if tokens.column is None else z[:, image, tokens.column]  # [P, N, C]
        cfg = self.order.scale[tokens.index][:, None]
        return chain.DiffusionBatch(
            z=of_tokens,
            cfg=cfg if step is None else torch.full_like(cfg, self.order.cfg[step]),
            x=noise.start[tokens.index],
            noise=chain.noise_for_steps(noise.steps[:, image, position], len(table.times)),
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
    """Check the inputs of a sampler and return the canvas. The canvas's clock includes the time to read the condition.

    Raises:
        UserError: the inputs do not fit the model, or do not fit each other.
    """
    c = model.net.config
    expect_kind(condition, model.condition, model.name)
    report = start_report(name, model, condition, settings, noise)

    clock = Clock(model.device)
    conditioning = condition.conditioning(model, settings.uses_guidance)

    tokens = torch.zeros(len(condition), c.tokens, c.channels, device=model.device)
    regenerated = edit_latents = None
    if edit is not None:
        edit_latents, regenerated = latents_and_mask(model, edit, len(condition), model.device)
        tokens = model.to_tokens(edit_latents.expand(len(condition), -1, -1, -1))
        report.edits = edit_digests(tokens, regenerated)

    reversed_orders = settings.orders(noise.orders(c.tokens)).to(model.device)
    order = Order(reversed_orders, settings, regenerated)
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
        clock=clock,
    )


def latents_and_mask(model: MARModel, edit: Edit, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The latents that an edit starts from, fp32 [1 or B, C, H, W], and which tokens to sample, bool [B, L].

    Raises:
        UserError: see :meth:`Edit.token_mask`; also latents whose shape does not fit the model, latents far outside the
            range of a decoder, or masks that cover different numbers of tokens in one batch.
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
            "use one mask for the batch, or run the images separately."
        )
    return edit.start.to(device, torch.float32), mask
