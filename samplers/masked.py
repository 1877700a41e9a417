"""The one masked loop that every MAR sampler runs in.

The loop knows the order, the mask schedule and the guidance scale. *How the networks are run* is one plug
(:class:`FullTransformer`, LazyMAR's), *how a token is made from z* the other (plain MAR's, FastHybrid's). CSpD, which has
two models and decides when either is asked, puts its own use of them into the same loop.
Source: Li et al. 2024 (arXiv 2406.11838), algorithm in section 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from ..reports.record import GIVEN, PLAIN, Clock, Report
from .conditioning import Condition
from .diffusion import Tables, guide, tables
from .editing import Edit
from .noise import Noise
from .settings import MARSettings


@dataclass(frozen=True, eq=False)
class Step:
    """What a sampler yields after every AR step.

    Attributes:
        done, total: AR steps.
        latents: decoder latents so far [B, C, H, W] fp32; zero where undecided.
        decided: bool [B, h, w] token grid; drafts that await their verification count too.
        report: the running report (its counts so far).
    """

    done: int
    total: int
    latents: Tensor
    decided: Tensor
    report: Report


class Sampled(NamedTuple):
    """A sampler's result: decoder latents [B, C, H, W] fp32 and the report."""

    latents: Tensor
    report: Report


# A driver may send the seconds it spent since the last step (drawing a preview, say); they are not the sampler's.
Sampler = Generator[Step, "float | None", Sampled]


def finish(sampler: Sampler) -> Sampled:
    """Run a sampler to its end, ignoring the steps."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


# ------------------------------------------------------------------------------------------------ what is decided when


def masked_after(tokens: int, steps: int) -> list[int]:
    """Masked tokens left after each AR step: floor(L cos(pi/2 (s+1)/S)), at least one fewer each step, 0 at the end.

    As upstream up to the last entry, which is 1 there although the last step decides everything.

    Raises:
        UserError: more steps than tokens, or none.
    """
    if not 1 <= steps <= tokens:
        raise UserError(f"ar_steps: {steps} is outside 1 to {tokens}, the tokens of the picture.")
    left, out = tokens, []
    for s in range(steps - 1):
        ratio = np.cos(math.pi / 2 * (s + 1) / steps)
        # fp32 as upstream: the product is rounded before the floor.
        left = max(1, min(left - 1, int(np.floor(np.float32(tokens * ratio)))))
        out.append(left)
    return [*out, 0]


class Plan:
    """Which positions each AR step decides, and its guidance scale.

    Attributes:
        steps: AR steps.
        cfg: guidance scale of each step.
        sizes: tokens an image decides at each step; the same for the whole batch.
        reveal: int64 [B, L], positions in the order they are decided; given ones stand in front.

    Args:
        orders: int64 [B, L], a permutation an image.
        settings: how many steps, which guidance.
        drawn: bool [B, L], which positions are to be decided, as many in every image; None for all.

    Raises:
        UserError: more steps than the picture has tokens. An edit that draws fewer than that decides one at a step.
    """

    def __init__(self, orders: Tensor, settings: MARSettings, drawn: Tensor | None = None):
        tokens = orders.shape[1]
        given = 0 if drawn is None else tokens - int(drawn[0].sum())
        left = masked_after(tokens, settings.ar_steps)
        if given:
            left = masked_after(tokens - given, min(settings.ar_steps, tokens - given))
        self.steps, self.tokens = len(left), tokens
        self.ends = [tokens - m for m in left]
        self.starts = [given, *self.ends[:-1]]
        self.sizes = [b - a for a, b in zip(self.starts, self.ends, strict=True)]
        # Upstream's last mask length is 1, so that its linear guidance ends just short of cfg.
        grown = [1 + (settings.cfg - 1) * (tokens - max(1, m)) / tokens for m in left]
        self.cfg = grown if settings.cfg_schedule == "linear" else [settings.cfg] * self.steps
        self.reveal = orders.flip(1)  # upstream masks the front of an order and reveals from its end
        if drawn is not None:
            first = drawn.gather(1, self.reveal).to(torch.uint8).argsort(dim=1, stable=True)
            self.reveal = self.reveal.gather(1, first)

    def ahead(self, step: int, reach: int = 1) -> Tensor:
        """int64 [B, M]: positions of steps ``step .. step + reach - 1``, in steps' order."""
        return self.reveal[:, self.starts[step] : self.ends[min(step + reach, self.steps) - 1]]

    def known(self, step: int) -> Tensor:
        """int64 [B, K]: positions decided before ``step``, ascending."""
        return self.reveal[:, : self.starts[step]].sort(dim=1).values


def raster_orders(images: int, tokens: int) -> Tensor:
    """Orders that reveal row by row, int64 [images, tokens]."""
    return torch.arange(tokens - 1, -1, -1).expand(images, -1)


# ------------------------------------------------------------------------------------------------ plugs


class Conditions(NamedTuple):
    """z of the wanted positions, [B, M, C]; ``null`` is the null class's, or None without guidance."""

    cond: Tensor
    null: Tensor | None


class Transformer(Protocol):
    """How the networks are run. Holds the state of one generation; make a new one for the next."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        """z at positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        ...

    def denoiser(self, run: Run, table: Tables) -> Denoiser:
        """How head rows are denoised with these diffusion tables."""
        ...

    def forget(self) -> None:
        """Tokens it has seen were decided anew; drop what was computed from them."""
        ...


class Head(Protocol):
    """How tokens are made from z."""

    reach: int
    """AR steps, the current one included, whose z it wants to see."""

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        """Tokens [B, n, channels] fp32 of this step's positions, from z of ``plan.ahead(step, reach)``."""
        ...


class Decide(Protocol):
    """What the loop asks at every AR step. Usually :func:`generate`'s two plugs one after the other."""

    def __call__(self, run: Run, step: int) -> Tensor:
        """Tokens [B, n, channels] fp32 of this step's positions. May rewrite those of other steps in ``run.tokens``."""
        ...


@dataclass(eq=False)
class Run:
    """State of one generation: made by :func:`begin`, handed to the plugs, gone afterwards."""

    model: MARModel
    labels: Tensor
    settings: MARSettings
    noise: Noise
    plan: Plan
    tokens: Tensor
    report: Report
    clock: Clock
    drawn: Tensor | None = None
    """bool [B, L], the positions to be decided; None for all of them."""
    start: Tensor | None = None
    """Decoder latents [1 or B, C, H, W] an edit began with."""
    drafted: Tensor | None = None
    """bool [B, L], positions of later AR steps whose tokens are drafts; None for none."""

    def latents(self) -> Tensor:
        """Decoder latents of the tokens so far; given ones are those of the start, bit for bit."""
        made = self.model.to_latents(self.tokens)
        if self.start is None or self.drawn is None:
            return made
        grid = self.model.net.config.grid
        cells = self.drawn.view(-1, 1, grid, grid)
        return torch.where(cells.repeat_interleave(self.model.patch, 2).repeat_interleave(self.model.patch, 3), made, self.start)

    @property
    def guided(self) -> bool:
        """Whether the null branch runs at all."""
        return self.settings.cfg != 1.0

    @property
    def tables(self) -> Tables:
        """Diffusion tables of a full pass."""
        return tables(self.settings.diffusion_steps, self.t_max)

    @property
    def t_max(self) -> int:
        """Highest timestep: the setting, or the checkpoint's own."""
        return self.settings.t_max or self.model.t_max


class FullTransformer:
    """Encoder and decoder from scratch at every step, both guidance branches in one batch."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        net, batch = run.model.net, len(run.tokens)
        known, tokens, rows = run.plan.known(step), run.tokens, net.class_rows(run.labels, batch)
        if run.guided:
            known, tokens, wanted = (torch.cat([x, x]) for x in (known, tokens, wanted))
            rows = torch.cat([rows, net.class_rows(None, batch)])
        z = net.decode(net.encode(tokens, known, rows), known, wanted)
        c = net.config
        run.report.add(transformer_passes=1, transformer_tokens=len(rows) * (2 * c.buffer + known.shape[1] + c.tokens))
        return Conditions(*z.chunk(2)) if run.guided else Conditions(z, None)

    def several(self, run: Run, step: int, count: int) -> list[Conditions]:
        """z of AR steps ``step .. step + count - 1``, each given the tokens of all steps before it, in one pass.

        The tokens of all but the last of them must be on the canvas already, as drafts. Step by step
        :meth:`__call__` gives the same.
        """
        net, plan, (batch, length) = run.model.net, run.plan, run.tokens.shape[:2]
        starts, sizes = plan.starts[step : step + count], plan.sizes[step : step + count]
        # Entries of the batch: the steps one after the other, images inside. Shorter prefixes are padded.
        known = torch.cat([plan.reveal[:, : starts[-1]]] * count)
        there = torch.arange(starts[-1], device=known.device) < torch.tensor(starts, device=known.device).repeat_interleave(batch)[:, None]
        asked = [plan.ahead(s) for s in range(step, step + count)]
        most = max(sizes)
        wanted = torch.cat([torch.cat([a, a[:, :1].expand(-1, most - a.shape[1])], 1) for a in asked])
        tokens, rows = torch.cat([run.tokens] * count), torch.cat([net.class_rows(run.labels, batch)] * count)
        if run.guided:
            known, there, wanted, tokens = (torch.cat([x, x]) for x in (known, there, wanted, tokens))
            rows = torch.cat([rows, net.class_rows(None, len(rows))])
        z = net.decode(net.encode(tokens, known, rows, there), known, wanted, there)
        run.report.add(transformer_passes=1, transformer_tokens=len(rows) * (2 * net.config.buffer + known.shape[1] + length))
        cond, null = z.chunk(2) if run.guided else (z, None)
        parts = zip(cond.split(batch), sizes, [None] * count if null is None else null.split(batch), strict=True)
        return [Conditions(c[:, :n], None if u is None else u[:, :n]) for c, n, u in parts]

    def denoiser(self, run: Run, table: Tables) -> Denoiser:
        return Denoiser(run, table)

    def forget(self) -> None:
        pass


class Denoiser:
    """Ancestral sampling of head rows, many rows at once.

    A row is one token: its condition z (and null z), guidance scale and noise. Modulations of many diffusion steps are
    computed in one product (see ``DiffusionHead.modulations``), bounded by ``budget`` numbers.
    """

    budget = 1 << 24

    def __init__(self, run: Run, table: Tables):
        self.run, self.head, self.table = run, run.model.net.head, table
        times = table.timestep_map.flip(0).to(run.tokens.device)
        self.times = self.head.time_embed(times)  # [S, w], highest timestep first
        # Deviation: exp(middle + slope * logits), halfway between the two bounds where the logits are 0.
        low, high = table.posterior_log_variance_clipped, table.betas.log()
        middle, slope = (low + high) / 4, (high - low) / 4
        columns = (
            table.sqrt_recip_alphas_cumprod, table.sqrt_recipm1_alphas_cumprod, table.posterior_mean_coef1,
            table.posterior_mean_coef2, slope,
        )  # fmt: skip
        self.scalars = list(zip(*(column.flip(0).tolist() for column in columns), strict=True))
        deviation = middle.exp().flip(0) * run.settings.temperature
        self.deviation = deviation.to(run.tokens.device, torch.float32)[:, None, None]

    def __call__(
        self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, draft: Tensor | None = None,
        pull: tuple[float, ...] = (), space: str = "mean",
    ) -> Tensor:  # fmt: skip
        """Denoise N rows.

        Args:
            z: conditions [N, C], null or None.
            scale: guidance scale [N, 1] fp32.
            first: fp32 [N, channels], what diffusion starts from.
            noise: fp32 [S, N, channels], highest timestep first; the last entry is not used.
            draft: fp32 [N, channels] to be pulled towards, or None.
            pull: gamma of every executed step (FastHybrid, eq. for mu'), highest timestep first.
            space: "mean" or "x0": what the draft is mixed into.

        Returns:
            fp32 [N, channels].
        """
        head, n = self.head, len(first)
        steps, channels = len(self.table), first.shape[1]
        both = z.cond if z.null is None else torch.cat([z.cond, z.null])
        condition = head.cond_embed(both)
        width = condition.shape[1] * (3 * len(head.res_blocks) + 2)
        chunk = max(1, self.budget // max(1, len(both) * width))
        x, noise = first, self.spread(noise)
        modulations: list[Tensor] = []
        for k in range(steps):
            if k % chunk == 0:
                modulations = head.modulations(self.times[k : k + chunk, None] + condition)
            out = head.denoise(x if z.null is None else torch.cat([x, x]), [m[k % chunk] for m in modulations])
            eps, logits = guide(out[:n], out[n:] if z.null is not None else None, scale, channels)
            x = self.advance(k, x, eps, logits, noise[k], draft, pull, space)
        self.run.report.add(head_calls=steps, head_rows=steps * len(both))
        return x

    def spread(self, noise: Tensor) -> Tensor:
        """Step noise [S, N, channels] times temperature and what the variance logits do not change of its deviation."""
        return noise * self.deviation

    def advance(
        self, k: int, x: Tensor, eps: Tensor, logits: Tensor, noise: Tensor, draft: Tensor | None, pull: tuple[float, ...],
        space: str,
    ) -> Tensor:  # fmt: skip
        """x [N, channels] after executed step ``k``.

        The posterior's mean is linear in x, eps and the draft, so it is summed at once and x0 never stands alone.

        Args:
            k: 0 for the highest timestep.
            x: fp32 [N, channels].
            eps, logits: the head's guided noise and variance logits at x, fp32 [N, channels].
            noise: the step's, from :meth:`spread`, [N, channels].
            draft, pull, space: as in a call.
        """
        recip, recipm1, coef1, coef2, slope = self.scalars[k]
        of_draft = 0.0
        if draft is not None and space == "x0":
            coef1, of_draft = coef1 * (1 - pull[k]), coef1 * pull[k]
        a, b = coef1 * recip + coef2, coef1 * recipm1
        if draft is not None and space == "mean":
            a, b, of_draft = a * (1 - pull[k]), b * (1 - pull[k]), pull[k]
        mean = (x * a).add_(eps, alpha=-b)
        if draft is not None:
            mean.add_(draft, alpha=of_draft)
        if k + 1 == len(self.scalars):
            return mean
        return mean.addcmul_((logits * slope).exp_(), noise)


class RowNoise:
    """Noise of a stream, on the device, handed out by (image, position) rows."""

    def __init__(self, run: Run, stream: str, table: Tables):
        c, device = run.model.net.config, run.tokens.device
        self.first = run.noise.first(stream, c.tokens, c.channels).to(device)
        self.steps = run.noise.steps(stream, len(table), c.tokens, c.channels).to(device)

    def __call__(self, image: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Start noise [N, channels] and step noise [S, N, channels] of N rows (int64 [N] each)."""
        return self.first[image, position], self.steps[image, :, position].transpose(0, 1)


# ------------------------------------------------------------------------------------------------ the loop


def begin(
    name: str, model: MARModel, condition: Condition, settings: MARSettings, noise: Noise, seed: int | None,
    edit: Edit | None = None,
) -> Run:  # fmt: skip
    """Check the inputs and set up a generation."""
    c, parameter = model.net.config, next(model.net.parameters())
    device = parameter.device
    labels = condition.class_ids(c.classes, model.label_set, device)
    batch = len(labels)
    orders = noise.orders(c.tokens)
    if len(orders) != batch:
        raise UserError(f"condition: it asks for {batch} images, the noise was drawn for {len(orders)}.")
    if settings.order == "raster":
        orders = raster_orders(batch, c.tokens)
    report = Report(name, model.name, asdict(settings), seed, batch, device.type)
    tokens, drawn, start = torch.zeros(batch, c.tokens, c.channels, device=device), None, None
    if edit is not None:
        tokens, drawn = edit.tokens(model, batch, device)
        start = edit.latents.to(device, torch.float32)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    plan = Plan(orders.to(device), settings, drawn)
    return Run(model, labels, settings, noise, plan, tokens, report, Clock(device), drawn, start)


def generate(run: Run, transformer: Transformer, head: Head) -> Sampler:
    """The masked loop with the two plugs: at every AR step z from the transformer, tokens from the head."""

    def decide(run: Run, step: int) -> Tensor:
        with run.clock.phase("transformer"):
            z = transformer(run, step, run.plan.ahead(step, head.reach))
        with run.clock.phase("head"):
            return head(run, step, z)

    return loop(run, decide)


@torch.no_grad()
def loop(run: Run, decide: Decide) -> Sampler:
    """The masked loop: every AR step's tokens in turn, a :class:`Step` after each."""
    batch, length = run.tokens.shape[:2]
    grid = run.model.net.config.grid
    fixed_at = torch.full((batch, length), -1, dtype=torch.int32, device=run.tokens.device)
    decided = torch.zeros(batch, length, dtype=torch.bool, device=run.tokens.device) if run.drawn is None else ~run.drawn
    paused = 0.0
    for step in range(run.plan.steps):
        new = decide(run, step)
        where = run.plan.ahead(step)
        run.tokens = run.tokens.scatter(1, where[..., None].expand(-1, -1, new.shape[2]), new)
        fixed_at.scatter_(1, where, step)
        decided = decided.scatter(1, where, True)
        shown = decided if run.drafted is None else decided | run.drafted
        asked = time.perf_counter()
        spent = yield Step(step + 1, run.plan.steps, run.latents(), shown.view(batch, grid, grid), run.report)
        # Without a word from the driver: all the time until it asked again.
        paused += time.perf_counter() - asked if spent is None else spent
    run.clock.stop(run.report, paused)
    if run.tokens.device.type == "cuda":
        run.report.peak_memory_bytes = torch.cuda.max_memory_allocated(run.tokens.device)
    run.report.maps["step"] = fixed_at.view(batch, grid, grid).cpu().numpy()
    outcome = run.report.maps.setdefault("outcome", np.full((batch, grid, grid), PLAIN, np.uint8))
    if run.drawn is not None:
        outcome[(~run.drawn).view(batch, grid, grid).cpu().numpy()] = GIVEN
    return Sampled(run.latents(), run.report)


def rows_of(z: Conditions, image: Tensor, column: Tensor) -> Conditions:
    """Rows (image, column) of conditions [B, M, C] as [N, C]."""
    return Conditions(z.cond[image, column], None if z.null is None else z.null[image, column])

