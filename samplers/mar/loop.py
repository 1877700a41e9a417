"""The masked loop that all MAR samplers run in, and the protocols of its two plugs.

The loop holds the order, the mask schedule and the guidance scale. One plug evaluates the transformer
(:class:`Transformer`: in full, or with LazyMAR's caches); the other makes tokens from its output z (:class:`Head`: plain
diffusion, speculation, FastHybrid). CSpD, which has two models, replaces both by a :class:`Decide` of its own.
Source: Li et al. 2024 (arXiv 2406.11838), algorithm in section 3.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError
from ...model_loaders.networks import ops
from ...model_loaders.networks.mar import MARModel
from ...model_loaders.networks.rows import Rows
from ...reports.record import GIVEN, PLAIN, Clock, Report
from ..conditioning import MaskedCondition, expect_kind
from ..driver import start_clock, timed
from ..noise import Noise
from .diffusion import Ancestral, Tables, tables
from .editing import Edit
from .memory import estimate
from .schedule import ORDERS, Plan
from .settings import MARBase


@dataclass(frozen=True, eq=False)
class Step:
    """The partial result that a sampler yields after every AR step.

    Attributes:
        done, total: AR steps.
        latents: decoder latents so far [B, C, H, W] fp32; zero where undecided.
        decided: bool [B, h, w] token grid; drafts that are not verified yet count too.
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


# The caller may send the seconds it spent since the last step, for example on a preview; they are not sampling time.
Sampler = Generator[Step, "float | None", Sampled]


# ------------------------------------------------------------------------------------------------ plugs


class Conditions(NamedTuple):
    """Transformer outputs z, [B, M, C] or rows [N, C]; ``null`` belongs to the null class, None without guidance."""

    cond: Tensor
    null: Tensor | None

    @staticmethod
    def of(z: Tensor, guided: bool) -> Conditions:
        """From z [B, ...], or with guidance [2 B, ...] whose second half is the null class."""
        return Conditions(*z.chunk(2)) if guided else Conditions(z, None)

    @staticmethod
    def join(parts: Sequence[Conditions]) -> Conditions:
        """Concatenation along the first axis."""
        nulls = [part.null for part in parts if part.null is not None]
        return Conditions(torch.cat([part.cond for part in parts]), torch.cat(nulls) if nulls else None)

    @property
    def guided(self) -> bool:
        """Whether there is a null branch."""
        return self.null is not None

    def both(self) -> Tensor:
        """Both branches along the first axis, the null class last."""
        return self.cond if self.null is None else torch.cat([self.cond, self.null])

    def flat(self) -> Conditions:
        """Rows [B M, C] of [B, M, C], image by image."""
        return Conditions(self.cond.flatten(0, 1), None if self.null is None else self.null.flatten(0, 1))

    def at(self, *index: Tensor) -> Conditions:
        """Rows at an index: (image, column) of [B, M, C], or row numbers of [N, C]."""
        return Conditions(self.cond[index], None if self.null is None else self.null[index])

    def columns(self, count: int) -> Conditions:
        """The first ``count`` columns of [B, M, C]."""
        return Conditions(self.cond[:, :count], None if self.null is None else self.null[:, :count])

    def split(self, size: int) -> list[Conditions]:
        """Pieces of ``size`` along the first axis."""
        conds = self.cond.split(size)
        nulls = [None] * len(conds) if self.null is None else self.null.split(size)
        return [Conditions(cond, null) for cond, null in zip(conds, nulls, strict=True)]


class HeadRows(NamedTuple):
    """N head rows: arguments of :meth:`Denoise.__call__`."""

    z: Conditions
    scale: Tensor
    first: Tensor
    noise: Tensor
    rule: Ancestral | None = None


class Denoise(Protocol):
    """Denoising of head rows with one diffusion table; see :class:`samplers.mar.denoiser.Denoiser`."""

    table: Tables
    rule: Ancestral
    exact: bool
    """Whether every diffusion step is evaluated; False where results are reused between steps."""

    def __call__(
        self, z: Conditions, scale: Tensor, first: Tensor, noise: Tensor, rule: Ancestral | None = None
    ) -> Tensor:
        """Tokens fp32 [N, channels] of N rows; ``rule`` replaces :attr:`rule`."""
        ...

    def together(self, mine: HeadRows, other: Denoise, others: HeadRows) -> tuple[Tensor, Tensor]:
        """Tokens of rows of this denoiser and of another one, in as few sequential head calls as possible."""
        ...


class Transformer(Protocol):
    """How the transformer is evaluated. Holds the state of one generation; make a new one for the next."""

    def __call__(self, run: Run, step: int, wanted: Tensor) -> Conditions:
        """z at positions ``wanted`` [B, M], given the tokens decided before ``step``."""
        ...

    def verify(self, run: Run, step: int, count: int) -> Iterator[list[Conditions]]:
        """z of ``count`` AR steps from ``step`` on, each given the tokens of all steps before it, drafts included.

        Yields groups of consecutive AR steps, each group from one pass. A plug that caches features may see final tokens
        only; it yields step by step, and the caller closes the iterator at the first rejected draft.
        """
        ...

    def denoiser(self, run: Run, table: Tables) -> Denoise:
        """Denoiser of head rows with these diffusion tables."""
        ...

    def forget(self) -> None:
        """Discard features of tokens that were decided again since."""
        ...


class Head(Protocol):
    """How tokens are made from z."""

    def reach(self, step: int) -> int:
        """AR steps from ``step`` on whose z it needs, at least 1."""
        ...

    def __call__(self, run: Run, step: int, z: Conditions) -> Tensor:
        """Tokens [B, n, channels] fp32 of this step's positions, from z of ``plan.ahead(step, reach(step))``."""
        ...


class Decide(Protocol):
    """One AR step of the loop: usually :func:`generate`'s two plugs in turn."""

    def __call__(self, run: Run, step: int) -> Tensor:
        """Tokens [B, n, channels] fp32 of this step's positions. May rewrite those of other steps in ``run.tokens``."""
        ...


@dataclass(eq=False)
class Run:
    """State of one generation, made by :func:`begin` and passed to the plugs."""

    model: MARModel
    rows: Rows
    settings: MARBase
    noise: Noise
    plan: Plan
    tokens: Tensor
    report: Report
    clock: Clock
    drawn: Tensor | None = None
    """bool [B, L], the positions to decide; None for all of them."""
    start: Tensor | None = None
    """Decoder latents [1 or B, C, H, W] that an edit starts from."""
    drafted: Tensor | None = None
    """bool [B, L], positions of later AR steps whose tokens are drafts; None for none."""

    def latents(self) -> Tensor:
        """Decoder latents of the tokens so far; given ones equal those of the start, bit for bit."""
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
        """Whether the null branch is evaluated."""
        return self.settings.cfg != 1.0

    @property
    def tables(self) -> Tables:
        """Diffusion tables of a full pass."""
        return self.table(self.settings.diffusion_steps, self.t_max)

    @property
    def t_max(self) -> int:
        """Highest timestep: the setting, or the checkpoint's own."""
        return self.settings.t_max or self.model.first_timestep(self.settings.diffusion_steps)

    def table(self, count: int, t_max: int) -> Tables:
        """Diffusion tables of a ``count``-step pass from ``t_max``, of the model's diffusion."""
        return tables(count, t_max, self.model.max_beta)


# ------------------------------------------------------------------------------------------------ the loop


def begin(
    name: str,
    model: MARModel,
    condition: MaskedCondition,
    settings: MARBase,
    noise: Noise,
    seed: int | None,
    edit: Edit | None = None,
) -> Run:
    """Check the inputs and set up a generation."""
    c, parameter = model.net.config, next(model.net.parameters())
    device = parameter.device
    expect_kind(condition, model.condition, model.name)
    model.net.begin()
    memory = estimate(model, condition, settings)
    with torch.no_grad():
        rows = condition.rows(model, settings.cfg != 1.0)
    batch = len(rows)
    orders = noise.orders(c.tokens)
    if len(orders) != batch:
        raise UserError(f"condition: it asks for {batch} images, the noise was drawn for {len(orders)}.")
    orders = ORDERS[settings.order](orders)
    report = Report(name, model.name, asdict(settings), seed, batch, device.type)
    report.note = _remarks(model)
    report.memory = memory
    tokens, drawn, start = torch.zeros(batch, c.tokens, c.channels, device=device), None, None
    if edit is not None:
        tokens, drawn = edit.tokens(model, batch, device)
        start = edit.latents.to(device, torch.float32)
    clock = start_clock(device)
    plan = Plan(orders.to(device), settings, drawn)
    return Run(model, rows, settings, noise, plan, tokens, report, clock, drawn, start)


def _remarks(model: MARModel) -> str:
    notes = (model.note, ops.remark(*model.parts.values()), model.net.remark)
    return "; ".join(filter(None, notes))


def generate(run: Run, transformer: Transformer, head: Head) -> Sampler:
    """The masked loop with the two plugs: at every AR step z from the transformer, tokens from the head."""

    def decide(run: Run, step: int) -> Tensor:
        with run.clock.phase("transformer"):
            z = transformer(run, step, run.plan.ahead(step, head.reach(step)))
        with run.clock.phase("head"):
            return head(run, step, z)

    return loop(run, decide)


def loop(run: Run, decide: Decide) -> Sampler:
    """The masked loop: every AR step's tokens in turn, a :class:`Step` after each."""
    return timed(_steps(run, decide), run.clock, run.report, run.tokens.device)


@torch.no_grad()
def _steps(run: Run, decide: Decide) -> Generator[Step, None, Sampled]:
    batch, length = run.tokens.shape[:2]
    grid = run.model.net.config.grid
    fixed_at = torch.full((batch, length), -1, dtype=torch.int32, device=run.tokens.device)
    decided = (
        torch.zeros(batch, length, dtype=torch.bool, device=run.tokens.device) if run.drawn is None else ~run.drawn
    )
    for step in range(run.plan.steps):
        new = decide(run, step)
        where = run.plan.ahead(step)
        run.tokens = run.tokens.scatter(1, where[..., None].expand(-1, -1, new.shape[2]), new)
        fixed_at.scatter_(1, where, step)
        decided = decided.scatter(1, where, True)
        shown = decided if run.drafted is None else decided | run.drafted
        yield Step(step + 1, run.plan.steps, run.latents(), shown.view(batch, grid, grid), run.report)
    run.report.maps["step"] = fixed_at.view(batch, grid, grid).cpu().numpy()
    outcome = run.report.maps.setdefault("outcome", np.full((batch, grid, grid), PLAIN, np.uint8))
    if run.drawn is not None:
        outcome[(~run.drawn).view(batch, grid, grid).cpu().numpy()] = GIVEN
    if run.model.net.graphs is not None:  # only now it is known what was captured
        run.report.note = _remarks(run.model)
    return Sampled(run.latents(), run.report)
