"""Plain MAR, and the one masked loop that every MAR sampler runs in.

The loop knows the order, the mask schedule and the guidance scale. *How the transformer is run* is one plug
(:class:`FullTransformer`, later LazyMAR's), *how a token is made from z* the other (:class:`PlainHead`, FastHybrid's,
later CSpD's). Source: Li et al. 2024 (arXiv 2406.11838), algorithm in section 3.
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
from ..reports.record import PLAIN, Clock, Report
from .conditioning import Condition
from .diffusion import Tables, guide, tables
from .noise import Noise
from .settings import MARSettings


@dataclass(frozen=True, eq=False)
class Step:
    """What a sampler yields after every AR step.

    Attributes:
        done, total: AR steps.
        latents: decoder latents so far [B, C, H, W] fp32; zero where undecided.
        decided: bool [B, h, w] token grid.
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
        reveal: int64 [B, L], positions in the order they are decided.
    """

    def __init__(self, orders: Tensor, settings: MARSettings):
        tokens = orders.shape[1]
        left = masked_after(tokens, settings.ar_steps)
        self.steps, self.tokens = settings.ar_steps, tokens
        self.ends = [tokens - m for m in left]
        self.starts = [0, *self.ends[:-1]]
        self.sizes = [b - a for a, b in zip(self.starts, self.ends, strict=True)]
        # Upstream's last mask length is 1, so that its linear guidance ends just short of cfg.
        grown = [1 + (settings.cfg - 1) * (tokens - max(1, m)) / tokens for m in left]
        self.cfg = grown if settings.cfg_schedule == "linear" else [settings.cfg] * self.steps
        self.reveal = orders.flip(1)  # upstream masks the front of an order and reveals from its end

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
    """How the transformer is run."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        """z at positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        ...


class Head(Protocol):
    """How tokens are made from z."""

    reach: int
    """AR steps, the current one included, whose z it wants to see."""

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        """Tokens [B, n, channels] fp32 of this step's positions, from z of ``plan.ahead(step, reach)``."""
        ...


@dataclass(eq=False)
class Run:
    """State of one generation: made by :func:`generate`, handed to the plugs, gone afterwards."""

    model: MARModel
    labels: Tensor
    settings: MARSettings
    noise: Noise
    plan: Plan
    tokens: Tensor
    report: Report
    clock: Clock

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
        head, table, n = self.head, self.table, len(first)
        steps, channels = len(table), first.shape[1]
        temperature = self.run.settings.temperature
        both = z.cond if z.null is None else torch.cat([z.cond, z.null])
        condition = head.cond_embed(both)
        width = condition.shape[1] * (3 * len(head.res_blocks) + 2)
        chunk = max(1, self.budget // max(1, len(both) * width))
        x = first
        modulations: list[Tensor] = []
        for k in range(steps):
            if k % chunk == 0:
                modulations = head.modulations(self.times[k : k + chunk, None] + condition)
            out = head.denoise(x if z.null is None else torch.cat([x, x]), [m[k % chunk] for m in modulations])
            eps, logits = guide(out[:n], out[n:] if z.null is not None else None, scale, channels)
            i = steps - 1 - k
            x0 = table.predict_x0(i, x, eps)
            if draft is not None and space == "x0":
                x0 = x0 + pull[k] * (draft - x0)
            mean = table.posterior_mean(i, x, x0)
            if draft is not None and space == "mean":
                mean = mean + pull[k] * (draft - mean)
            x = mean if i == 0 else mean + (0.5 * table.log_variance(i, logits)).exp() * noise[k] * temperature
        self.run.report.add(head_calls=steps, head_rows=steps * len(both))
        return x


class RowNoise:
    """Noise of a stream, on the device, handed out by (image, position) rows."""

    def __init__(self, run: Run, stream: str, table: Tables):
        c, device = run.model.net.config, run.tokens.device
        self.first = run.noise.first(stream, c.tokens, c.channels).to(device)
        self.steps = run.noise.steps(stream, len(table), c.tokens, c.channels).to(device)

    def __call__(self, image: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Start noise [N, channels] and step noise [S, N, channels] of N rows (int64 [N] each)."""
        return self.first[image, position], self.steps[image, :, position].transpose(0, 1)


class PlainHead:
    """Every token by a full diffusion pass of its own step: MAR as published."""

    reach = 1

    def __init__(self, run: Run):
        self.denoise, self.noise = Denoiser(run, run.tables), RowNoise(run, "full", run.tables)

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        batch, n = z.cond.shape[:2]
        where = run.plan.ahead(step)
        image = torch.arange(batch, device=where.device)[:, None].expand(-1, n).flatten()
        scale = torch.full((batch * n, 1), run.plan.cfg[step], device=where.device)
        rows = Conditions(z.cond.flatten(0, 1), None if z.null is None else z.null.flatten(0, 1))
        return self.denoise(rows, scale, *self.noise(image, where.flatten())).view(batch, n, -1)


# ------------------------------------------------------------------------------------------------ the loop


def begin(name: str, model: MARModel, condition: Condition, settings: MARSettings, noise: Noise, seed: int | None) -> Run:
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
    tokens = torch.zeros(batch, c.tokens, c.channels, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return Run(model, labels, settings, noise, Plan(orders.to(device), settings), tokens, report, Clock(device))


@torch.no_grad()
def generate(run: Run, transformer: Transformer, head: Head) -> Sampler:
    """The masked loop: at every AR step z from the transformer plug, tokens from the head plug."""
    batch, length = run.tokens.shape[:2]
    grid = run.model.net.config.grid
    fixed_at = torch.full((batch, length), -1, dtype=torch.int32, device=run.tokens.device)
    paused = 0.0
    for step in range(run.plan.steps):
        with run.clock.phase("transformer"):
            z = transformer(run, step, run.plan.ahead(step, head.reach))
        with run.clock.phase("head"):
            new = head(run, step, z)
        where = run.plan.ahead(step)
        run.tokens = run.tokens.scatter(1, where[..., None].expand(-1, -1, new.shape[2]), new)
        fixed_at.scatter_(1, where, step)
        asked = time.perf_counter()
        spent = yield Step(
            step + 1, run.plan.steps, run.model.to_latents(run.tokens), (fixed_at >= 0).view(batch, grid, grid), run.report
        )
        # Without a word from the driver: all the time until it asked again.
        paused += time.perf_counter() - asked if spent is None else spent
    run.clock.stop(run.report, paused)
    if run.tokens.device.type == "cuda":
        run.report.peak_memory_bytes = torch.cuda.max_memory_allocated(run.tokens.device)
    run.report.maps["step"] = fixed_at.view(batch, grid, grid).cpu().numpy()
    run.report.maps.setdefault("outcome", np.full((batch, grid, grid), PLAIN, np.uint8))
    return Sampled(run.model.to_latents(run.tokens), run.report)


def mar(model: MARModel, condition: Condition, settings: MARSettings, noise: Noise, seed: int | None = None) -> Sampler:
    """Plain MAR.

    Args:
        model: network and what its file says.
        condition: B class labels.
        settings: see :class:`MARSettings`.
        noise: noise of B images.
        seed: only recorded in the report.

    Yields:
        :class:`Step` after every AR step; returns :class:`Sampled`.

    Raises:
        UserError: labels outside the model's, more AR steps than tokens.
    """
    run = begin("mar", model, condition, settings, noise, seed)
    with torch.no_grad():
        head = PlainHead(run)
    return (yield from generate(run, FullTransformer(), head))


def rows_of(z: Conditions, image: Tensor, column: Tensor) -> Conditions:
    """Rows (image, column) of conditions [B, M, C] as [N, C]."""
    return Conditions(z.cond[image, column], None if z.null is None else z.null[image, column])

