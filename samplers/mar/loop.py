"""What all masked samplers share: a generation's state, the plan of its AR steps, and the transformer computed in full.

Source: Li et al. 2024 (arXiv 2406.11838), section 3. Shapes: B images, L tokens, C transformer width, and P branches
of guidance: 2, the condition's and the null one, or 1 without guidance.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UserError, not_finite
from ...model_loaders.networks import ops
from ...model_loaders.networks.mar import Conditioning, MARModel
from ...reports.record import GIVEN, PLAIN, Clock, Report, dtype_of
from ..conditioning import MaskedCondition, expect_kind
from ..driver import to_device
from ..editing import LARGEST_LATENT, Edit, edit_digests
from ..noise import PairedNoise
from .diffusion import denoise
from .memory import estimate
from .schedule import ORDERS, masked_after
from .settings import MARBase
from .tables import STEPS, Tables, tables


@dataclass(frozen=True, eq=False)
class Step:
    """The partial result that a sampler yields after every AR step."""

    done: int  # AR steps
    total: int
    latents: Tensor  # decoder latents so far [B, C, H, W] fp32; zero where undecided
    decided: Tensor  # bool [B, h, w] token grid; CSpD's drafts that are not verified yet count too
    report: Report  # the running report (its counts so far)


class Sampled(NamedTuple):
    """A sampler's result: decoder latents [B, C, H, W] fp32 and the report."""

    latents: Tensor
    report: Report


Sampler = Generator[Step, None, Sampled]


class Plan:
    """Which positions each AR step decides, and its guidance scale.

    Args:
        orders: int64 [B, L], a permutation per image; positions are revealed from its end.
        settings: AR steps and guidance. An edit of fewer tokens than AR steps decides one per step.
        edit_mask: bool [B, L], positions to decide, equally many in every image; None for all.

    Raises:
        UserError: more AR steps than tokens.
    """

    steps: int  # AR steps
    tokens: int  # of an image
    # Of each AR step: positions decided before and after it, and in it (the same for all images), and guidance scale.
    starts: list[int]
    ends: list[int]
    sizes: list[int]
    cfg: list[float]
    reveal: Tensor  # int64 [B, L], positions in the order in which they are decided; given ones first
    scale: Tensor  # guidance scale fp32 [B, L] of every position

    def __init__(self, orders: Tensor, settings: MARBase, edit_mask: Tensor | None = None):
        tokens = orders.shape[1]
        given = 0 if edit_mask is None else tokens - int(edit_mask[0].sum())
        steps = min(settings.steps, tokens - given) if given else settings.steps
        left = masked_after(tokens - given, steps)
        self.steps = len(left)
        self.tokens = tokens
        self.ends = [tokens - masked for masked in left]
        self.starts = [given, *self.ends[:-1]]
        self.sizes = [end - start for start, end in zip(self.starts, self.ends, strict=True)]

        self.cfg = [settings.cfg] * self.steps
        if settings.cfg_schedule == "linear":
            # The published code's last mask length is 1, so that its linear guidance ends just short of cfg.
            self.cfg = [1 + (settings.cfg - 1) * (tokens - max(1, masked)) / tokens for masked in left]

        # The published code masks the front of an order and reveals from its end. Given positions come first.
        self.reveal = orders.flip(1)
        if edit_mask is not None:
            given_first = edit_mask.gather(1, self.reveal).to(torch.uint8).argsort(dim=1, stable=True)
            self.reveal = self.reveal.gather(1, given_first)

        in_order = torch.tensor([1.0, *self.cfg]).repeat_interleave(torch.tensor([given, *self.sizes]))
        scale = to_device(in_order, orders.device).expand_as(orders)
        self.scale = torch.empty_like(scale).scatter(1, self.reveal, scale)

    def ahead(self, step: int, reach: int = 1) -> Tensor:
        """int64 [B, M]: positions of steps ``step .. step + reach - 1``, in order of the steps."""
        return self.reveal[:, self.starts[step] : self.ends[min(step + reach, self.steps) - 1]]

    def known(self, step: int) -> Tensor:
        """int64 [B, K]: positions decided before ``step``, ascending."""
        return self.reveal[:, : self.starts[step]].sort(dim=1).values


class Transformer:
    """How the transformer and the diffusion head are evaluated. Holds the state of one generation; make a new one for
    the next.
    """

    # denoise(run, batch): tokens fp32 [N, channels] of a HeadBatch, with the head as it is evaluated here.
    denoise = staticmethod(denoise)

    def begin(self, run: Run) -> None:
        """Called once, before the first AR step."""

    def caches_head(self, diffusion_steps: int) -> bool:
        """Whether the head is evaluated in part at some of so many diffusion steps."""
        return False

    def forget(self) -> None:
        """Discard features of tokens that were decided again since."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        """Conditions z [P, B, M, C] of positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        raise NotImplementedError

    def verify(self, run: Run, step: int, count: int) -> Iterator[list[Tensor]]:
        """z of ``count`` AR steps from ``step`` on, each given the tokens of all steps before it, drafts included, in
        groups of one pass.

        Here step by step, as features of final tokens only may be cached; the caller stops at the first rejected draft.
        """
        for s in range(step, step + count):
            yield [self(run, s, run.plan.ahead(s))]


@dataclass(eq=False)
class Run:
    """State of one generation, made by :func:`begin`.

    A sampler of either family is one generator. It calls ``begin``, which starts the clock, yields ``run.step(...)``
    after every step, in ``with run.clock.paused():``, and returns ``run.finish(...)``, which stops the clock.
    """

    model: MARModel
    rows: Conditioning  # the condition as the network reads it
    settings: MARBase
    noise: PairedNoise
    plan: Plan
    tokens: Tensor  # fp32 [B, L, channels]; zero where undecided
    report: Report
    clock: Clock
    edit_mask: Tensor | None = None  # bool [B, L], the positions to decide; None for all of them
    start: Tensor | None = None  # decoder latents [1 or B, C, H, W] that an edit starts from
    drafted: Tensor | None = None  # bool [B, L], positions of later AR steps whose tokens are drafts; None for none

    def __post_init__(self) -> None:
        side = self.model.net.config.grid
        self.grid = (side, side)  # h, w of the token grid
        self.guided = self.settings.cfg != 1.0  # whether the null branch is evaluated
        # int32 [B, L]: the AR step at which a token was decided, -1 before.
        self.fixed_at = torch.full(self.tokens.shape[:2], -1, dtype=torch.int32, device=self.tokens.device)

    def table(self, count: int, highest: int = STEPS - 1) -> Tables:
        """Diffusion tables of a ``count``-step pass from the setting t_max or the checkpoint's own, ``highest`` at
        most; the timesteps are on the device."""
        t_max = self.settings.t_max
        if t_max is None:
            t_max = self.model.first_timestep(self.settings.diffusion_steps)
        made = tables(count, min(t_max, highest), self.model.max_beta)
        return replace(made, timestep_map=to_device(made.timestep_map, self.tokens.device))

    @property
    def tables(self) -> Tables:
        """Diffusion tables of a full pass."""
        return self.table(self.settings.diffusion_steps)

    def draws(self, stream: str, count: int) -> tuple[Tensor, Tensor]:
        """Noise of every token on the device: start [B, L, channels] and ``count`` steps [S, B, L, channels]."""
        c = self.model.net.config
        device = self.tokens.device
        start = self.noise.first(stream, c.tokens, c.channels)
        steps = self.noise.steps(stream, count, c.tokens, c.channels)
        return to_device(start, device), to_device(steps, device).transpose(0, 1)

    def latents(self) -> Tensor:
        """Decoder latents of the tokens so far; given ones equal those of the start, bit for bit."""
        made = self.model.to_latents(self.tokens)
        if self.start is None or self.edit_mask is None:
            return made
        patch = self.model.patch
        cells = self.edit_mask.unflatten(1, self.grid)[:, None].repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        return torch.where(cells, made, self.start)

    def step(self, step: int) -> Step:
        """The partial result after an AR step, whose tokens are decided now."""
        self.fixed_at.scatter_(1, self.plan.ahead(step), step)
        decided = self.fixed_at >= 0
        if self.edit_mask is not None:
            decided |= ~self.edit_mask
        if self.drafted is not None:
            decided |= self.drafted
        return Step(step + 1, self.plan.steps, self.latents(), decided.unflatten(1, self.grid), self.report)

    def finish(self, outcome: Tensor | None = None) -> Sampled:
        """Stop the clock; returns the result. ``outcome`` uint8 [B, L] of the tokens, None for plain.

        Raises:
            UserError: the latents are not finite.
        """
        made = torch.full_like(self.fixed_at, PLAIN, dtype=torch.uint8) if outcome is None else outcome
        if self.edit_mask is not None:
            made[~self.edit_mask] = GIVEN
        for name, values in (("step", self.fixed_at), ("outcome", made)):
            self.report.maps[name] = values.unflatten(1, self.grid).cpu().numpy()
        latents = self.latents()
        if not bool(latents.isfinite().all()):
            raise not_finite("model", self.model.name, "latents")
        self.clock.stop(self.report)
        self.report.remark(self.model.net.remark)
        return Sampled(latents, self.report)


def check(model: MARModel, settings: MARBase) -> None:
    """Check settings against a model, before anything is loaded or computed.

    Raises:
        UserError: more AR steps than tokens.
    """
    masked_after(model.net.config.tokens, settings.steps)


@torch.no_grad()
def begin(
    name: str,
    model: MARModel,
    condition: MaskedCondition,
    settings: MARBase,
    noise: PairedNoise,
    edit: Edit | None,
    transformer: Transformer,
) -> Run:
    """Check the inputs and set up a generation.

    Raises:
        UserError: a condition of another kind or that the model cannot read, noise for another number of images, more
            AR steps than tokens, an edit that does not fit (:func:`edited`), settings of the transformer that do not
            fit.
    """
    c = model.net.config
    device = next(model.net.parameters()).device
    expect_kind(condition, model.condition, model.name)
    memory = estimate(model, condition, settings)
    rows = condition.rows(model, settings.cfg != 1.0)
    batch = len(rows)
    orders = noise.orders(c.tokens)
    if len(orders) != batch:
        raise UserError(f"condition: it asks for {batch} images, the noise was drawn for {len(orders)}.")

    report = Report(name, model.name, asdict(settings), noise.seed, batch, device.type, memory=memory)
    report.remark(model.note, ops.remark(*model.parts.values(), operations=model.net.operations))
    report.dtype = dtype_of(model.net)
    report.conditions = condition.digests()

    tokens = torch.zeros(batch, c.tokens, c.channels, device=device)
    edit_mask = start = None
    if edit is not None:
        start, edit_mask = edited(model, edit, batch, device)
        tokens = model.to_tokens(start.expand(batch, -1, -1, -1))
        report.edits = edit_digests(tokens, edit_mask)

    model.net.begin_run()
    clock = Clock(device)
    plan = Plan(ORDERS[settings.order](orders).to(device), settings, edit_mask)
    run = Run(model, rows, settings, noise, plan, tokens, report, clock, edit_mask, start)
    transformer.begin(run)
    return run


def edited(model: MARModel, edit: Edit, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An edit's latents fp32 [1 or B, C, H, W], and the tokens to sample, bool [B, L].

    Raises:
        UserError: see :meth:`Edit.token_mask`; latents of another shape or far outside a decoder's, or masks that cover
            different numbers of tokens in one batch.
    """
    c = model.net.config
    want = (c.channels // model.patch**2, c.grid * model.patch, c.grid * model.patch)
    if edit.start.ndim != 4 or tuple(edit.start.shape[1:]) != want:
        raise UserError(
            f"latent_image: it has the shape {list(edit.start.shape)}, {model.name} makes [batch, {want[0]}, "
            f"{want[1]}, {want[2]}]; encode an image of the model's own size with VAE Encode and the vae of the "
            "same loader."
        )
    mask = edit.token_mask(c.grid, images, device)
    largest = float(edit.start.float().abs().max())
    if largest > LARGEST_LATENT:
        raise UserError(
            f"latent_image: it holds numbers up to {largest:.3g}, a decoder's latents are below {LARGEST_LATENT}; "
            "encode an image with VAE Encode and the vae of the same loader."
        )
    counts = mask.sum(1).tolist()
    if min(counts) != max(counts):
        raise UserError(
            f"mask: the images' masks cover different numbers of tokens ({min(counts)} to {max(counts)}); "
            "use one mask for the batch, or run the images separately."
        )
    return edit.start.to(device, torch.float32), mask


class FullTransformer(Transformer):
    """Encoder and decoder from scratch at every AR step, both branches of guidance in one batch."""

    def begin(self, run: Run) -> None:
        self.vectors = run.rows.vectors(run.guided)  # of the encoder's buffer rows, [E, C]

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Tensor:
        net = run.model.net
        rows = run.rows
        branches = 1 + run.guided
        known = run.plan.known(step)

        # 1. The encoder, of both branches where they differ in it.
        times = len(self.vectors) // len(known)
        encoder_known = known.repeat(times, 1)
        encoded = net.encode(run.tokens.repeat(times, 1, 1), encoder_known, self.vectors)

        # 2. The decoder, of both branches.
        fused = rows.fuse(encoded, encoder_known, run.guided)
        z = net.decode(fused, known.repeat(branches, 1), wanted.repeat(branches, 1))

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        run.report.add(**rows.counts(encoder_rows, decoder_rows))
        return z.unflatten(0, (branches, -1))

    def verify(self, run: Run, step: int, count: int) -> Iterator[list[Tensor]]:
        """All ``count`` AR steps in one pass; equal to :meth:`__call__` step by step, up to the rounding of padded
        attention.
        """
        plan = run.plan
        net = run.model.net
        rows = run.rows
        branches = 1 + run.guided
        if count == 1:
            yield [self(run, step, plan.ahead(step))]
            return

        # 1. The batch holds every AR step with all images. Steps know different numbers of tokens: the shorter rows are
        # padded.
        batch = len(run.tokens)
        starts = plan.starts[step : step + count]
        longest = starts[-1]
        known = plan.reveal[:, :longest].repeat(count, 1)
        lengths = to_device(torch.tensor(starts), known.device).repeat_interleave(batch)
        mask = torch.arange(longest, device=known.device) < lengths[:, None]  # False for padding

        # 2. The positions that each step decides, padded with the first of them.
        sizes = plan.sizes[step : step + count]
        wanted = []
        for s in range(step, step + count):
            here = plan.ahead(s)
            padding = here[:, :1].expand(-1, max(sizes) - here.shape[1])
            wanted.append(torch.cat([here, padding], 1))

        # 3. One pass.
        vectors = rows.vectors(run.guided, count)
        times = len(vectors) // len(known)
        encoder_known = known.repeat(times, 1)
        encoder_mask = mask.repeat(times, 1)
        encoded = net.encode(run.tokens.repeat(count * times, 1, 1), encoder_known, vectors, encoder_mask)
        fused = rows.fuse(encoded, encoder_known, run.guided, encoder_mask)
        asked = torch.cat(wanted).repeat(branches, 1)
        z = net.decode(fused, known.repeat(branches, 1), asked, mask.repeat(branches, 1))

        encoder_rows = encoded.shape[0] * encoded.shape[1]
        decoder_rows = len(z) * (net.config.buffer + net.config.tokens)
        run.report.add(**rows.counts(encoder_rows, decoder_rows))

        # 4. The conditions of each step, without the padding.
        of_steps = z.unflatten(0, (branches, -1)).split(batch, 1)
        yield [part[:, :, :n] for part, n in zip(of_steps, sizes, strict=True)]
