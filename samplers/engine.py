"""One engine for every family: an image is a grid of cells, and every pass decides some of them.

A sampler is three functions of a pass k:

- plan: ``plan[k]`` are the cells that the pass decides;
- look: ``look(k, cells)`` evaluates the transformer, given what is decided, and returns what it says of these cells:
  conditions of a diffusion head, or rows that logits are made of;
- draw: ``draw(k, cells, z)`` makes the values of the cells from that.

:func:`decode` is the loop, and every plain sampler is a call of it. A method changes one of the three: PAR and ZipAR
the plan, LazyMAR the look, DiSA and speculation the draw. Methods that verify drafts (FastHybrid, CSpD, parallel
decoding, MuLo-SD) have loops of their own over the same :class:`Canvas`.

Shapes: B images of L = h w cells; a cell's value is a token, or a vector of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, not_finite
from ..model_loaders.networks import ops
from ..reports.record import GIVEN, PLAIN, Clock, Report, dtype_of


@dataclass(frozen=True, eq=False)
class Step:
    """The partial result that a sampler yields, after every pass at least."""

    # AR steps, passes, cells (jacobi.py, twice in mulosd.py), or for blocks evaluations of the diffusion head
    done: int
    total: int
    latents: Tensor  # as of Sampled, so far; zero where undecided
    decided: Tensor  # bool [B, h, w]; CSpD's drafts that are not verified yet count too
    report: Report  # the running report (its counts so far)


class Sampled(NamedTuple):
    """A sampler's result: decoder latents fp32 [B, C, H, W], or codes int64 [B, h, w] of a token model; the report."""

    latents: Tensor
    report: Report


R = TypeVar("R")
Sampler: TypeAlias = Generator[Step, None, Sampled]
Look: TypeAlias = Callable[[int, Tensor], Tensor]
# Yields how much of the pass is done, in units of Canvas.total, and values; only the last ones are used.
Draw: TypeAlias = Callable[[int, Tensor, Tensor], Iterator[tuple[int, Tensor]]]


@dataclass(eq=False)
class Canvas:
    """The images of a generation: what is decided of them, and their report.

    Its clock stops in :meth:`finish`. A sampler that reads its condition before it makes the canvas starts the clock
    first; otherwise it runs from the moment at which the canvas is made.
    """

    model: Any  # the model that draws them
    settings: Any
    noise: Any  # random numbers of B images: PairedNoise, or PairedDraws for tokens
    grid: tuple[int, int]  # h, w
    # [B, L, ...]. Those of token models have one more cell, for the padding of passes in which images differ.
    values: Tensor
    report: Report
    total: int = 0  # what Step.total is; set by the sampler before its first pass
    again: Tensor | None = None  # bool [B, L], the cells that an edit draws again; None without an edit
    drafted: Tensor | None = None  # bool [B, L], cells of later passes that hold drafts; None for none
    phases: tuple[str, str] = ("transformer", "head")  # names of the time spent in looks and in draws
    clock: Clock = field(default=None, kw_only=True)  # type: ignore[assignment]  # None: a new one

    fixed_at: Tensor = field(init=False)  # int32 like values [:2], the pass that decided a cell; -1 before
    outcome: Tensor = field(init=False)  # uint8 like values [:2], see reports/record.py
    # fp32 [] each, of numbers that were computed on the way: one that is NaN or infinite makes its norm so.
    norms: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        shape = self.values.shape[:2]
        self.fixed_at = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.outcome = torch.full(shape, PLAIN, dtype=torch.uint8, device=self.device)
        self.model.net.begin_run()
        if self.clock is None:
            self.clock = Clock(self.device)

    @property
    def images(self) -> int:
        """B."""
        return len(self.values)

    @property
    def cells(self) -> int:
        """L."""
        return self.grid[0] * self.grid[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def decided(self) -> Tensor:
        """The cells that are decided, bool [B, L]: drawn, given by an edit, or drafted."""
        decided = self.fixed_at[:, : self.cells] >= 0
        if self.again is not None:
            decided |= ~self.again
        if self.drafted is not None:
            decided |= self.drafted
        return decided

    def write(self, cells: Tensor, values: Tensor, when: int) -> None:
        """Decide the values [B, n, ...] of cells int64 [B, n], or [n] if they are the same in every image, in pass
        ``when``.
        """
        if cells.ndim == 1:
            self.values.index_copy_(1, cells, values)
            self.fixed_at.index_fill_(1, cells, when)
            return

        index = cells.view(*cells.shape, *(1,) * (values.ndim - 2)).expand_as(values)
        self.values.scatter_(1, index, values)
        self.fixed_at.scatter_(1, cells, when)

    def shown(self, decided: Tensor) -> Tensor:
        """The images as :class:`Sampled` has them, with zeros where a cell is not ``decided``, bool [B, L]."""
        values = self.values[:, : self.cells]
        decided = decided.view(*decided.shape, *(1,) * (values.ndim - 2))
        return self.to_latents(values * decided)

    def to_latents(self, values: Tensor) -> Tensor:
        """Values [B, L, ...] as latents or codes; here codes [B, h, w]."""
        return values.view(-1, *self.grid)

    # What leaves a sampler is a normal tensor, which a caller may change.
    @torch.inference_mode(False)
    def step(self, done: int) -> Step:
        """The partial result."""
        decided = self.decided
        return Step(done, self.total, self.shown(decided), decided.view(-1, *self.grid), self.report)

    def watch(self, *norms: Tensor) -> None:
        """Have :meth:`finish` check numbers by their norms, fp32 [] each: no step waits for the device."""
        self.norms.extend(norms)

    @torch.inference_mode(False)
    def finish(self) -> Sampled:
        """Stop the clock; returns the result.

        Raises:
            UserError: values, or numbers that they were made of, are NaN or infinite.
        """
        # 1. The maps of the report.
        step = self.fixed_at[:, : self.cells]
        outcome = self.outcome[:, : self.cells]
        if self.again is not None:
            step = torch.where(self.again, step, -1)
            outcome = torch.where(self.again, outcome, GIVEN)
        for name, values in (("step", step), ("outcome", outcome)):
            self.report.maps[name] = values.unflatten(1, self.grid).cpu().numpy()

        # 2. The result.
        latents = self.shown(self.decided)
        if latents.is_floating_point():
            self.watch(torch.linalg.vector_norm(latents, torch.inf))
        self.clock.stop(self.report)
        self.report.remark(self.model.net.remark)
        self.expect_finite("model")
        return Sampled(latents, self.report)

    def expect_finite(self, field: str) -> None:
        """Check all norms so far, of the model at the input ``field``: the host waits for the device here."""
        if self.norms and not np.isfinite(torch.stack(self.norms).cpu().numpy()).all():
            what = "latents" if self.values.is_floating_point() else "logits"
            raise not_finite(field, self.model.name, what)


def passes(
    canvas: Canvas, plan: Mapping[int, Tensor], look: Look, draw: Draw, work: Mapping[int, int] | None = None
) -> Iterator[Step]:
    """The passes of a plan one after another; for samplers that compute without gradients themselves.

    Args:
        plan: the cells of every pass by its number, int64 [B, n], or [n] if they are the same in every image.
        work: how much of ``canvas.total`` every pass is; None for 1 each.
    """
    done = 0
    for k, cells in plan.items():
        whole = 1 if work is None else work[k]

        # 1. What the transformer says of the cells, given what is decided.
        with canvas.clock.phase(canvas.phases[0]):
            z = look(k, cells)

        # 2. Their values.
        so_far: Step | None = None  # until the pass ends, nothing else is decided
        for part, drawn in canvas.clock.timed(canvas.phases[1], draw(k, cells, z)):
            values = drawn
            if part < whole:
                with canvas.clock.paused():
                    so_far = canvas.step(done + part) if so_far is None else replace(so_far, done=done + part)
                    yield so_far

        # 3. They are decided.
        canvas.write(cells, values, k)
        done += whole
        with canvas.clock.paused():
            yield canvas.step(done)


@torch.no_grad()
def decode(
    canvas: Canvas, plan: Mapping[int, Tensor], look: Look, draw: Draw, work: Mapping[int, int] | None = None
) -> Sampler:
    """A plain sampler: all passes of a plan; arguments as of :func:`passes`.

    Yields :class:`Step` after every pass, and while a draw is under way if it is several units of work; returns
    :class:`Sampled`.
    """
    yield from passes(canvas, plan, look, draw, work)
    return canvas.finish()


def finish(sampler: Generator[Any, None, R]) -> R:
    """Run a sampler to its end, ignoring the steps; returns its result."""
    while True:
        try:
            next(sampler)
        except StopIteration as end:
            return end.value


def new_report(name: str, model: Any, settings: Any, noise: Any) -> Report:
    """The report of a run, before its first pass.

    ``name`` is the sampler's; model, settings and noise are its arguments.
    """
    report = Report(name, model.name, asdict(settings), noise.seed, len(noise), model.device.type)
    report.remark(model.note, ops.remark(*model.parts.values(), operations=model.net.operations))
    report.dtype = dtype_of(model.net)
    return report


def remark_draft(report: Report, draft: Any) -> None:
    """Add what the report of a run of the draft model alone would say of it, at the end of a run, if that is not said
    of the target already.
    """
    report.remark(*(f"draft: {text}" for text in (draft.note, draft.net.remark) if text and text not in report.note))


def expect_images(condition: Any, noise: Any) -> None:
    """Check that a condition and the noise are of equally many images."""
    if len(condition) != len(noise):
        raise UserError(f"condition: it asks for {len(condition)} images, the noise was drawn for {len(noise)}.")
