"""One engine for every family: an image is a grid of cells, and every pass decides some of them.

A sampler is three functions of a pass k:

- plan: ``plan[k]`` are the cells that the pass decides;
- look: ``look(k, cells)`` runs the transformer, given what is decided so far, and returns its output z for ``cells``:
  conditions of a diffusion head, or hidden rows from which logits are computed;
- draw: ``draw(k, cells, z)`` samples the values of the cells from z.

:func:`decode` is the loop of all methods whose plan is known before the first pass: MAR, GtR, LazyMAR, NextStep and the
token samplers. Such a method changes the plan (PAR and ZipAR, with the tokens that a pass feeds), the look (LazyMAR),
the draw (DiSA, speculation), or two of them (GtR the plan and the draw).

Methods that verify drafts (FastHybrid, CSpD, MuLo-SD, Jacobi decoding) have loops of their own, because the cells that
a pass decides depend on which drafts are accepted. BitDance has its own loop because it shows progress within a pass.
All these loops decide cells with :meth:`Canvas.decide` and yield steps with :meth:`Canvas.show`.

Shapes: B images of L = h w cells; a cell's value is a token, or a vector of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, not_finite
from ..networks import ops
from ..networks.torch_state import own_state
from ..reports.record import GIVEN, PAUSE, PLAIN, Clock, Report, dtype_of


@dataclass(eq=False)
class Step:
    """The partial result that a sampler yields after every pass.

    The latents are computed when they are first read, so a preview costs nothing where nobody looks. Read the
    latents before the sampler continues; after that, they cannot be computed any more.
    """

    # AR steps or passes done; in FastHybrid the mean over the images. BitDance counts evaluations of the diffusion head
    # instead, jacobi.py counts the cells whose values are certain, and MuLo-SD counts each cell twice, see its Block.
    done: int
    total: int
    report: Report  # the running report with the counts so far
    view: View | None  # computes the latents and the decided tokens; None once the sampler has continued

    @property
    def latents(self) -> Tensor:
        """The result so far, shaped as in :class:`Sampled`; zero where undecided."""
        return self._viewed[0]

    @property
    def decided(self) -> Tensor:
        """Which tokens are decided, bool [B, h, w]; drafts of CSpD and MuLo-SD that are not verified yet count too."""
        return self._viewed[1]

    @cached_property
    def _viewed(self) -> tuple[Tensor, Tensor]:
        if self.view is None:
            raise RuntimeError(
                "the sampler has continued, so the latents of this step are gone; read them before you ask for the "
                "next step"
            )
        with own_state():
            return self.view()


class Sampled(NamedTuple):
    """A sampler's result: latents for the decoder, fp32 [B, C, H, W], or codes of a token model, int64 [B, h, w]; and
    the report.
    """

    latents: Tensor
    report: Report


class Verdict(NamedTuple):
    """What a pass decides: the arguments of :meth:`Canvas.decide`."""

    cells: Tensor | tuple[Tensor, Tensor]
    values: Tensor
    when: int | Tensor
    outcome: Tensor | None


R = TypeVar("R")
Sampler: TypeAlias = Generator[Step, None, Sampled]
Look: TypeAlias = Callable[[int, Tensor], Tensor]
Draw: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]
# Latents or codes as in Sampled, and bool [B, h, w] of the decided tokens.
View: TypeAlias = Callable[[], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Canvas:
    """The images that a run generates: the values decided so far, and the report.

    The clock runs from the start of the sampler to :meth:`finish`. The sampler makes the clock, because it may read the
    condition before it makes the canvas.
    """

    model: Any  # the model that generates them
    settings: Any
    noise: Any  # random numbers of B images: PairedNoise, or TokenNoise for tokens
    grid: tuple[int, int]  # h, w
    # [B, L, ...]. A token model's values have one more cell at the end: if a pass decides fewer cells of one image than
    # of another, the padding goes there.
    values: Tensor
    report: Report
    total: int = 0  # what Step.total is; set by the sampler before its first pass
    again: Tensor | None = None  # bool [B, L], the cells that an edit regenerates; None without an edit
    phases: tuple[str, str] = ("transformer", "head")  # names of the time spent in looks and in draws
    clock: Clock = field(kw_only=True)

    # Two maps with the first two dimensions of ``values``:
    fixed_at: Tensor = field(init=False)  # int32, the pass that decided a cell; -1 before
    outcome: Tensor = field(init=False)  # uint8, what became of a cell's draft, see reports/record.py
    # Norms of intermediate values, fp32 [] each; a norm is not finite if one of its values is not.
    norms: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        shape = self.values.shape[:2]
        self.fixed_at = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.outcome = torch.full(shape, PLAIN, dtype=torch.uint8, device=self.device)
        self.model.net.begin_run()

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
        """The cells that have a value, bool [B, L]: sampled, or fixed by an edit."""
        decided = self.fixed_at[:, : self.cells] >= 0
        if self.again is not None:
            decided |= ~self.again
        return decided

    def decide(
        self,
        cells: Tensor | tuple[Tensor, Tensor],
        values: Tensor,
        when: int | Tensor,
        outcome: Tensor | None = None,
    ) -> None:
        """Decide cells.

        Args:
            cells: int64 [B, n], or [n] if they are the same in every image. If the images have different numbers of
                cells: a tuple of image and cell, int64 [N] each. In the other arguments, [N] then replaces [B, n].
            values: [B, n, ...].
            when: the pass that decides the cells; int32 [B, n] if the cells have different passes.
            outcome: uint8 [B, n], what became of the cells' drafts, see ``reports/record.py``; None leaves it as it is.
        """
        at: Any
        if isinstance(cells, tuple):
            at = cells
        elif cells.ndim == 1:
            at = slice(None), cells
        else:
            at = torch.arange(len(cells), device=cells.device)[:, None], cells

        self.values[at] = values
        self.fixed_at[at] = when
        if outcome is not None:
            self.outcome[at] = outcome

    def shown(self, decided: Tensor) -> Tensor:
        """The images' latents or codes, shaped as in :class:`Sampled`. They are zero where ``decided``, bool [B, L], is
        False.
        """
        values = self.values[:, : self.cells]
        decided = decided.view(*decided.shape, *(1,) * (values.ndim - 2))
        return self.to_latents(values * decided)

    def to_latents(self, values: Tensor) -> Tensor:
        """Latents or codes from values [B, L, ...]: here codes [B, h, w], in most derived classes latents."""
        return values.view(-1, *self.grid)

    # What leaves a sampler is a normal tensor, which a caller may change.
    @torch.inference_mode(False)
    @torch.no_grad()
    def view(self) -> tuple[Tensor, Tensor]:
        """Latents or codes so far, and the decided tokens, as :class:`Step` has them."""
        decided = self.decided
        return self.shown(decided), decided.view(-1, *self.grid)

    def show(self, done: int, view: View | None = None) -> Iterator[Step]:
        """Yield the partial result. The time that the caller spends on it does not count as time of the run.

        ``view``: what the step shows; None for :meth:`view`.
        """
        step = Step(done, self.total, self.report, view or self.view)
        with self.clock.phase(PAUSE):
            yield step
        step.view = None

    def watch(self, *norms: Tensor) -> None:
        """Remember norms, fp32 [] each. :meth:`finish` checks them for NaN and infinity, so no step waits for them."""
        self.norms.extend(norms)

    @torch.inference_mode(False)
    def finish(self) -> Sampled:
        """Stop the clock; returns the result.

        Raises:
            UserError: values, or intermediate values that :meth:`watch` has seen, are NaN or infinite.
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
        """Check all norms so far. The host waits for the device here.

        ``field``: the input at which an error names the model.
        """
        if self.norms and not np.isfinite(torch.stack(self.norms).cpu().numpy()).all():
            what = "latents" if self.values.is_floating_point() else "logits"
            raise not_finite(field, self.model.name, what)


def decode(
    canvas: Canvas,
    plan: Mapping[int, Tensor],
    look: Look,
    draw: Draw,
    show: Callable[[int], Iterator[Step]] | None = None,
) -> Iterator[Step]:
    """Run the passes of a plan one after another, and yield a step after each. The caller disables gradients.

    Args:
        plan: the cells of every pass by its number, int64 [B, n], or [n] if they are the same in every image.
        look, draw: see the top of this file.
        show: yields the partial result, given the number of passes so far; None for :meth:`Canvas.show`.
    """
    show = show or canvas.show
    looking, drawing = canvas.phases
    for done, (k, cells) in enumerate(plan.items(), 1):
        with canvas.clock.phase(looking):
            z = look(k, cells)
        with canvas.clock.phase(drawing):
            values = draw(k, cells, z)
        canvas.decide(cells, values, k)
        yield from show(done)


def finish(sampler: Generator[Any, None, R], callback: Callable[[Any], object] | None = None) -> R:
    """Run a sampler to its end and return its result. ``callback`` is called with every step."""
    with closing(sampler):
        while True:
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value

            if callback is not None:
                callback(step)


def start_report(name: str, model: Any, condition: Any, settings: Any, noise: Any) -> Report:
    """The report of a generation of images, before its first pass.

    ``name`` is the sampler's; the other arguments are the sampler's.

    Raises:
        UserError: condition and noise are of different numbers of images.
    """
    if len(condition) != len(noise):
        raise UserError(
            f"condition: it asks for {len(condition)} images, but the noise is for {len(noise)}; make "
            "both numbers equal."
        )

    report = new_report(name, model, settings, noise)
    report.conditions = condition.digests()
    report.subject = condition.subject
    return report


def new_report(name: str, model: Any, settings: Any, noise: Any) -> Report:
    """:func:`start_report` without a condition."""
    report = Report(name, model.name, asdict(settings), noise.seed, len(noise), model.device.type)
    report.remark(model.note, ops.remark(*model.parts.values(), operations=model.net.operations))
    report.dtype = dtype_of(model.net)
    return report


def remark_draft(report: Report, draft: Any) -> None:
    """Add the remarks about a draft model to the report of a run at its end, unless the report already has them."""
    report.remark(*(f"draft: {text}" for text in (draft.note, draft.net.remark) if text and text not in report.note))
