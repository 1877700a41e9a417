"""The canvas of MAR-like models: which tokens each AR step decides, and the checks before a generation.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. Shapes: B images, L tokens of c channels.
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
from .settings import CLIPPED, MARBase
from .tables import Respacing, respacing


class Order:
    """Which positions each AR step decides, and its guidance scale.

    The order is known before the first AR step. A new method that chooses the positions of an AR step by itself reads
    the candidates with :meth:`next` and writes its choice with :meth:`choose`. The samplers of FastAR choose none;
    CONTRIBUTING.md has an example.

    Args:
        reversed_orders: int64 [B, L], a permutation per image; the last position is decided first.
        settings: the settings with the numbers of AR steps and the guidance.
        again: bool [B, L], positions to decide, the same number in every image; None for all.
    """

    steps: int  # AR steps
    # One entry for each AR step, the same for all images:
    starts: list[int]  # how many positions are decided before it
    ends: list[int]  # how many positions are decided after it
    sizes: list[int]  # how many positions it decides
    cfg: list[float]  # guidance scale
    decision_order: Tensor  # int64 [B, L], positions in the order in which they are decided; fixed ones first
    scale: Tensor  # guidance scale fp32 [B, L] of every position

    def __init__(self, reversed_orders: Tensor, settings: MARBase, again: Tensor | None = None):
        tokens = reversed_orders.shape[1]
        given = 0 if again is None else tokens - int(again[0].sum())
        left = settings.left(tokens, again if given else None)
        self.steps = len(left)
        self.ends = [tokens - masked for masked in left]
        self.starts = [given, *self.ends[:-1]]
        self.sizes = [end - start for start, end in zip(self.starts, self.ends, strict=True)]

        self.cfg = [settings.cfg] * self.steps
        if settings.cfg_schedule == "linear":
            # The published code's last mask length is 1, so its linear guidance ends just short of cfg.
            self.cfg = [1 + (settings.cfg - 1) * (tokens - max(1, masked)) / tokens for masked in left]

        # The published code masks the front of an order, and decides from its end. Fixed positions come first.
        self.decision_order = reversed_orders.flip(1)
        if again is not None:
            self.decision_order = with_first(self.decision_order, ~again)

        in_order = torch.tensor([1.0, *self.cfg]).repeat_interleave(torch.tensor([given, *self.sizes]))
        self._scale_in_order = to_device(in_order, reversed_orders.device).expand_as(reversed_orders)
        self.scale = self._scale_of_positions()

    def _scale_of_positions(self) -> Tensor:
        """The guidance scale of every position: the scale of the AR step that decides it."""
        return torch.empty_like(self._scale_in_order).scatter(1, self.decision_order, self._scale_in_order)

    @property
    def plan(self) -> dict[int, Tensor]:
        """The positions of every AR step, int64 [B, n] each."""
        return {step: self.ahead(step) for step in range(self.steps)}

    def ahead(self, step: int, reach: int = 1) -> Tensor:
        """int64 [B, M]: positions that steps ``step .. step + reach - 1`` decide, in the order of the steps."""
        return self.decision_order[:, self.starts[step] : self.ends[min(step + reach, self.steps) - 1]]

    def between(self, first: int, stop: int) -> Tensor:
        """int64 [B, M]: positions decided before AR step ``stop``, but not before ``first``."""
        return self.decision_order[:, self.starts[first] : self.starts[stop]]

    def next(self, step: int, count: int) -> Tensor:
        """int64 [B, M]: the ``count`` positions that come next at ``step``, or all that are left if these are fewer."""
        start = self.starts[step]
        return self.decision_order[:, start : start + count]

    def choose(self, step: int, positions: Tensor) -> None:
        """Let ``step`` decide these undecided positions, int64 [B, n], where n is the size of the step. All other
        undecided positions keep their order.
        """
        start = self.starts[step]
        left = self.decision_order[:, start:]
        chosen = torch.zeros_like(self.decision_order, dtype=torch.bool).scatter(1, positions, True)
        others = with_first(left, ~chosen)[:, : left.shape[1] - self.sizes[step]]

        self.decision_order = torch.cat([self.decision_order[:, :start], positions, others], 1)
        self.scale = self._scale_of_positions()

    def decided_before(self, step: int) -> Tensor:
        """int64 [B, K]: positions decided before ``step``, ascending."""
        return self.decision_order[:, : self.starts[step]].sort(dim=1).values

    def decided_before_each(self, images: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The positions decided before an AR step, for R rows, each of which is an image at its own AR step.

        Args:
            images: int64 [R], the image of each row.
            steps: the AR step of each row.

        Returns:
            int64 [R, K], the positions of each row, ascending and then padded; and a mask, bool [R, K], which is False
            on padding. The mask is None if there is no padding.
        """
        counts = [self.starts[step] for step in steps]
        most = max(counts)
        known = self.decision_order[images, :most]
        if min(counts) == most:
            return known.sort(dim=1).values, None

        # While they are sorted, padded entries have a number above every position, so they come last.
        last = self.decision_order.shape[1] - 1
        mask = torch.arange(most, device=known.device) < to_device(torch.tensor(counts), known.device)[:, None]
        padded_last = torch.where(mask, known, last + 1).sort(dim=1).values
        return padded_last.clamp(max=last), mask


def with_first(order: Tensor, first: Tensor) -> Tensor:
    """Move the positions that are ``first``, bool [B, L], to the front of ``order``, int64 [B, n]. Within the moved
    positions, and within the others, the order stays the same.
    """
    is_later = (~first).gather(1, order).to(torch.uint8)
    return order.gather(1, is_later.argsort(dim=1, stable=True))


@dataclass(frozen=True, eq=False)
class Tokens:
    """N tokens of a batch of images; the images may have different numbers of tokens. For example, three tokens of two
    images, from the positions of both images and a mask that is True at three of these positions::

        positions    5 2 7        mask    0 1 0        image       0 1 1
                     4 0 1                1 0 1        position    2 4 1
                                                       column      1 0 2
    """

    # Image and position, int64 [N] each: ``values[tokens.index]`` are the tokens' entries of values [B, L, ...].
    index: tuple[Tensor, Tensor]
    # int64 [N], index of each token among the positions from which it was chosen; None if all of them were chosen, one
    # image after another.
    column: Tensor | None = None

    @staticmethod
    def all(positions: Tensor) -> Tokens:
        """All tokens at positions, int64 [B, n], one image after another."""
        image = torch.arange(len(positions), device=positions.device).repeat_interleave(positions.shape[1])
        return Tokens((image, positions.flatten()))

    @staticmethod
    def in_columns(columns: Tensor, positions: Tensor) -> Tokens:
        """The tokens in some columns, int64 [B, m], of positions, int64 [B, n], one image after another."""
        image = torch.arange(len(columns), device=columns.device).repeat_interleave(columns.shape[1])
        column = columns.flatten()
        return Tokens((image, positions[image, column]), column)

    @staticmethod
    def step_by_step(positions: Sequence[Tensor]) -> Tokens:
        """All tokens of several AR steps, one AR step after another, and in each step one image after another.

        ``positions``: int64 [B, n] of each AR step. The columns count the positions of all these steps side by side.
        """
        side_by_side = torch.cat([*positions], 1)
        columns = torch.arange(side_by_side.shape[1], device=side_by_side.device).expand_as(side_by_side)
        of_steps = columns.split([here.shape[1] for here in positions], 1)

        image = torch.cat([Tokens.all(here).index[0] for here in positions])
        column = torch.cat([part.flatten() for part in of_steps])
        return Tokens((image, side_by_side[image, column]), column)

    def __len__(self) -> int:
        return len(self.index[0])


class StreamNoise(NamedTuple):
    """Noise of every token, fp32."""

    start: Tensor  # state before the first diffusion step, [B, L, c]
    steps: Tensor  # noise of each step, [S, B, L, c]


@dataclass(eq=False)
class MARCanvas(Canvas):
    """The canvas of a MAR. ``values`` are the tokens, fp32 [B, L, c]. Outside its mask, an edit returns the latents
    that it starts from, bit for bit.
    """

    model: MARModel
    settings: Any  # MARBase with the settings of the sampler
    noise: PairedNoise
    order: Order = field(kw_only=True)
    conditioning: Conditioning = field(kw_only=True)  # the condition as the network reads it
    start: Tensor | None = field(default=None, kw_only=True)  # decoder latents [1 or B, C, H, W] of an edit
    # int32 [B, L], how often a token's decoder rows came from LazyMAR's cache; None where they never do.
    cached: Tensor | None = field(default=None, kw_only=True)

    guided: bool = field(init=False)  # whether there is a null branch
    # bool [B, L], the positions at which CSpD has written drafts since drafts were last discarded. A position stays in
    # it after its draft has been verified.
    drafted: Tensor = field(init=False)
    # The timestep from which every token is denoised. A draft model and the shorter respacings of DiSA and FastHybrid
    # start from the same timestep.
    first_timestep: int = field(init=False)
    # The timestep from which plain MAR denoises every token; :attr:`first_timestep` is lower if the settings clip it.
    # The noise has an entry for every step of a respacing from this timestep, so it is the noise of plain MAR.
    noise_timestep: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.settings
        self.total = self.order.steps
        self.guided = settings.guides
        self.drafted = torch.zeros_like(self.outcome, dtype=torch.bool)

        self.noise_timestep = settings.t_max or self.model.first_timestep(settings.diffusion_steps)
        self.first_timestep = self.noise_timestep
        if settings.t_max is None and settings.clips:
            self.first_timestep = min(self.first_timestep, CLIPPED)

    def with_model(self, model: MARModel, condition: ClassOrPrompt, report: Report) -> MARCanvas:
        """A canvas on which another model works on the same images, and another report counts the work.

        Both canvases share everything else, such as tokens, drafts, measured seconds, and the timestep at which
        diffusion starts.
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
        """Write drafts at positions that are not decided yet, int64 [B, n]. ``values``: fp32 [B, n, c]."""
        self.drafted.scatter_(1, positions, True)
        self.values.scatter_(1, positions[..., None].expand_as(values), values)

    def discard_drafts(self) -> None:
        """Count no position as drafted any more. The drafts' values stay until other values are written over them."""
        self.drafted.fill_(False)

    def to_latents(self, values: Tensor) -> Tensor:
        latents = self.model.to_latents(values)
        if self.start is None or self.again is None:
            return latents
        patch = self.model.patch
        sampled = self.again.unflatten(1, self.grid)[:, None]  # bool [B, 1, h, w]
        sampled = sampled.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        return torch.where(sampled, latents, self.start)

    @torch.inference_mode(False)
    def finish(self) -> Sampled:
        if self.cached is not None:
            cached = self.cached.unflatten(1, self.grid).cpu().numpy()
            self.report.maps["cached"] = cached
            self.report.add(cached_tokens=int(cached.sum()))
        return super().finish()

    # --- the diffusion of a token

    def respacing(self, count: int) -> Respacing:
        """The diffusion in ``count`` steps, or fewer; see :func:`.tables.respacing`."""
        return respacing(count, self.first_timestep, self.model.max_beta)

    def step_table(self, count: int) -> chain.StepTable:
        """The steps of :meth:`respacing` on the device, with which tokens are sampled."""
        respaced = self.respacing(count)
        return chain.step_table(respaced.without_last_noise, self.time_embeddings(respaced))

    @torch.no_grad()
    def time_embeddings(self, respaced: Respacing) -> Tensor:
        """The head's embeddings of the timesteps, [S, w], highest timestep first."""
        return self.model.net.head.time_embed(to_device(respaced.timestep_map.flip(0), self.device))

    def noise_of(self, stream: str) -> StreamNoise:
        """The noise of a stream for every token, on the device. The settings declare the stream's diffusion steps."""
        streams = self.settings.streams()
        if stream not in streams:
            raise LookupError(
                f"{type(self.settings).__name__}.streams() lacks {stream!r}; declare its diffusion steps."
            )

        c = self.model.net.config
        count = len(respacing(streams[stream], self.noise_timestep, self.model.max_beta))
        start = self.noise.first(stream, c.tokens, c.channels)
        steps = self.noise.steps(stream, count, c.tokens, c.channels)
        return StreamNoise(to_device(start, self.device), to_device(steps, self.device).transpose(0, 1))

    def batch(
        self, table: chain.StepTable, tokens: Tokens, z: Tensor, noise: StreamNoise, step: int | None = None
    ) -> chain.DiffusionBatch:
        """The batch of tokens, in their states before the first diffusion step of ``table``.

        Args:
            table: the diffusion steps to take.
            tokens: the N tokens.
            z: conditions [P, B, n, C] of the positions from which the tokens were chosen.
            noise: noise of all tokens; ``table`` may have fewer steps than the noise.
            step: AR step whose guidance scale all tokens get; None: each token gets the guidance scale of the AR step
                that decides it.
        """
        image, position = tokens.index
        of_tokens = z.flatten(1, 2) if tokens.column is None else z[:, image, tokens.column]  # [P, N, C]
        cfg = self.order.scale[tokens.index][:, None]
        return chain.DiffusionBatch(
            z=of_tokens,
            cfg=cfg if step is None else torch.full_like(cfg, self.order.cfg[step]),
            x=noise.start[tokens.index],
            noise=chain.spread(noise.steps[:, image, position], len(table.times)),
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
    """Check the inputs and return the canvas of a generation. Its seconds include reading the condition."""
    c = model.net.config
    expect_kind(condition, model.condition, model.name)
    report = start_report(name, model, condition, settings, noise)

    clock = Clock(model.device)
    conditioning = condition.conditioning(model, settings.guides)

    tokens = torch.zeros(len(condition), c.tokens, c.channels, device=model.device)
    again = start = None
    if edit is not None:
        start, again = edited(model, edit, len(condition), model.device)
        tokens = model.to_tokens(start.expand(len(condition), -1, -1, -1))
        report.edits = edit_digests(tokens, again)

    reversed_orders = settings.orders(noise.orders(c.tokens)).to(model.device)
    order = Order(reversed_orders, settings, again)
    return MARCanvas(
        model,
        settings,
        noise,
        (c.grid, c.grid),
        tokens,
        report,
        again=again,
        order=order,
        conditioning=conditioning,
        start=start,
        clock=clock,
    )


def edited(model: MARModel, edit: Edit, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The latents of an edit, fp32 [1 or B, C, H, W], and which tokens to sample, bool [B, L].

    Raises:
        UserError: see :meth:`Edit.token_mask`; latents of another shape or far outside a decoder's, or masks that cover
            different numbers of tokens in one batch.
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
