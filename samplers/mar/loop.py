"""The one masked loop that every MAR sampler runs in.

The loop knows the order, the mask schedule and the guidance scale. *How the networks are run* is one plug
(:class:`FullTransformer`, LazyMAR's), *how a token is made from z* the other (plain MAR's, FastHybrid's). CSpD, which has
two models and decides when either is asked, puts its own use of them into the same loop.
Source: Li et al. 2024 (arXiv 2406.11838), algorithm in section 3.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks.mar import MARModel
from ...reports.record import GIVEN, PLAIN, Clock, Report
from ..conditioning import Condition
from ..driver import PauseClock
from ..noise import Noise
from .diffusion import Tables, tables
from .editing import Edit
from .schedule import Plan, raster_orders
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


# ------------------------------------------------------------------------------------------------ plugs


class Conditions(NamedTuple):
    """z of the wanted positions, [B, M, C]; ``null`` is the null class's, or None without guidance."""

    cond: Tensor
    null: Tensor | None


class Denoise(Protocol):
    """How head rows are denoised; see :class:`samplers.mar.denoiser.Denoiser`."""

    table: Tables

    def __call__(self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor) -> Tensor:
        """Tokens fp32 [N, channels] of N rows."""
        ...


class Transformer(Protocol):
    """How the networks are run. Holds the state of one generation; make a new one for the next."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        """z at positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        ...

    def denoiser(self, run: Run, table: Tables) -> Denoise:
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
        return torch.where(
            cells.repeat_interleave(self.model.patch, 2).repeat_interleave(self.model.patch, 3), made, self.start
        )

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


# ------------------------------------------------------------------------------------------------ the loop


def begin(
    name: str,
    model: MARModel,
    condition: Condition,
    settings: MARSettings,
    noise: Noise,
    seed: int | None,
    edit: Edit | None = None,
) -> Run:
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
    decided = (
        torch.zeros(batch, length, dtype=torch.bool, device=run.tokens.device) if run.drawn is None else ~run.drawn
    )
    pause = PauseClock()
    for step in range(run.plan.steps):
        new = decide(run, step)
        where = run.plan.ahead(step)
        run.tokens = run.tokens.scatter(1, where[..., None].expand(-1, -1, new.shape[2]), new)
        fixed_at.scatter_(1, where, step)
        decided = decided.scatter(1, where, True)
        shown = decided if run.drafted is None else decided | run.drafted
        pause.start()
        pause.stop((yield Step(step + 1, run.plan.steps, run.latents(), shown.view(batch, grid, grid), run.report)))
    run.clock.stop(run.report, pause.seconds)
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
