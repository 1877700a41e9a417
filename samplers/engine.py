"""One engine for all samplers: an image is a grid of cells, and every pass decides some of the cells.

A sampler has three parts, and every pass k uses all three:

- plan: ``plan[k]`` is the tensor of the cells that the pass decides;
- look: ``look(k, cells)`` runs the transformer on the cells that are decided so far. It returns the output z for
  ``cells``: conditions for a diffusion head, or hidden vectors from which the draw computes logits;
- draw: ``draw(k, cells, z)`` samples the values of ``cells`` from z.

:func:`run_passes` is the loop of all methods whose plan is known before the first pass: MAR, GtR, LazyMAR, NextStep and
the token samplers (``docs/papers.md`` lists the methods). PAR and ZipAR change the plan, and the tokens that a pass
feeds to the transformer. LazyMAR changes the look and the draw. DiSA and speculation change the draw. GtR changes the
plan and the draw.

Four methods verify drafts of tokens: FastHybrid, CSpD, MuLo-SD and Jacobi decoding. Each has its own loop, because the
cells that a pass decides depend on which drafts are accepted. BitDance has its own loop, because it shows progress
within a pass. All these loops decide cells with :meth:`Canvas.decide` and yield steps with :meth:`Canvas.yield_step`.

Shapes: B images, each with L = h w cells in h grid rows and w columns. The value of a cell is a token id or a vector of
channels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError, not_finite
from ..networks import ops
from ..networks.speed import Recordable
from ..networks.torch_state import own_state
from ..reports.record import GIVEN, PAUSE, PLAIN, Clock, Report, dtype_of
from .conditioning import AnyCondition


class Model(Protocol):
    """What the engine reads from a model, of any family."""

    @property
    def name(self) -> str:
        """The name in messages and reports."""

    @property
    def net(self) -> Recordable:
        """The network."""

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All weights, in modules with names."""

    @property
    def note(self) -> str:
        """A remark for the report, or ""."""

    @property
    def device(self) -> torch.device:
        """The device on which the network runs."""


class Noise(Protocol):
    """What the engine reads from the random numbers for B images. They are a :class:`.PairedNoise`, or in a token model
    a :class:`.TokenNoise`.
    """

    seed: int | None  # None if the numbers do not come from a seed

    def __len__(self) -> int:
        """Number of images, B."""


@dataclass(eq=False)
class Step:
    """The partial result that a sampler yields, usually after every pass.

    A step computes its latents only when they are first read, so a preview that nobody looks at costs nothing. Read
    the latents before the sampler continues; afterwards, the step can no longer compute its latents.
    """

    # Progress: ``done`` of ``total``. Most samplers count passes, called AR steps in MAR. In FastHybrid, the images may
    # be at different AR steps, so ``done`` is the mean over the images, rounded down. BitDance counts steps of its
    # diffusions. tokens/jacobi.py counts the cells whose values are final, in the image with the fewest such cells.
    # MuLo-SD counts each cell twice, see progress_of_draft in tokens/mulosd/drafting.py.
    done: int
    total: int
    report: Report  # the report of the run, with the counts so far
    view: View | None  # computes the latents and the decided tokens; None once the sampler has continued

    @property
    def latents(self) -> Tensor:
        """The result so far, in the shape that :class:`Sampled` states; zero at undecided cells."""
        return self._viewed[0]

    @property
    def decided(self) -> Tensor:
        """Which tokens are decided, bool [B, h, w]. In CSpD and MuLo-SD, unverified drafts count, too."""
        return self._viewed[1]

    @cached_property
    def _viewed(self) -> tuple[Tensor, Tensor]:
        if self.view is None:
            raise RuntimeError(
                "the sampler has continued, so the latents of this step are gone; read them before you ask for the "
                "next step"
            )
        with own_state():  # the sampler runs in this state too, but here the caller's code runs
            return self.view()


class Sampled(NamedTuple):
    """The result of a sampler."""

    latents: Tensor  # latents for the decoder, fp32 [B, C, H, W], or codes of a token model, int64 [B, h, w]
    report: Report


class Verdict(NamedTuple):
    """The cells that a pass decides, and their values. The fields are the arguments of :meth:`Canvas.decide`."""

    cells: Tensor | tuple[Tensor, Tensor]
    values: Tensor
    when: int | Tensor
    outcome: Tensor | None


AnyStep = TypeVar("AnyStep")
Result = TypeVar("Result")
Sampler: TypeAlias = Generator[Step, None, Sampled]
Look: TypeAlias = Callable[[int, Tensor], Tensor]
Draw: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]
# A View returns latents or codes as in Sampled, and which tokens are decided, bool [B, h, w].
View: TypeAlias = Callable[[], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Canvas:
    """The images that a run generates: the values decided so far, and the report.

    The clock runs from the start of the sampler to :meth:`finish`. The sampler creates the clock, because the sampler
    may read the condition before it creates the canvas.
    """

    model: Model  # the model that generates the images
    settings: Any  # the settings of the sampler; each sampler has a settings class, see settings.py
    noise: Noise
    grid: tuple[int, int]  # h, w
    # The values of the cells, [B, L, ...]. A token model has one more cell at the end, which no image shows. If a pass
    # decides fewer cells in one image than in another, this cell pads the shorter list of cells.
    values: Tensor
    report: Report
    total: int = 0  # for Step.total; the sampler sets it before the first pass
    regenerated: Tensor | None = None  # bool [B, L], the cells that an edit regenerates; None without an edit
    phases: tuple[str, str] = ("transformer", "head")  # names in the report for the time of the looks and of the draws
    clock: Clock = field(kw_only=True)

    images: int = field(init=False)  # number of images, B

    # Two maps of the cells, [B, L]; in a token model, [B, L + 1] like ``values``:
    decided_in_pass: Tensor = field(init=False)  # int32, the pass that decided a cell; -1 if no pass has decided it
    outcome: Tensor = field(init=False)  # uint8, what became of a cell's draft, see reports/record.py
    # Norms of intermediate tensors, fp32 [] each. A norm is not finite if a value of its tensor is not finite.
    norms: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.images = len(self.values)
        shape = self.values.shape[:2]
        self.decided_in_pass = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.outcome = torch.full(shape, PLAIN, dtype=torch.uint8, device=self.device)
        self.model.net.begin_run()

    @property
    def cells(self) -> int:
        """Number of cells in an image, L."""
        return self.grid[0] * self.grid[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def decided(self) -> Tensor:
        """The cells that have a value, bool [B, L]: sampled, or fixed by an edit."""
        decided = self.decided_in_pass[:, : self.cells] >= 0
        if self.regenerated is not None:
            decided |= ~self.regenerated
        return decided

    def decide(
        self,
        cells: Tensor | tuple[Tensor, Tensor],
        values: Tensor,
        when: int | Tensor,
        outcome: Tensor | None = None,
    ) -> None:
        """Decide cells: store their values, the pass that decides them and the outcome of their drafts.

        Args:
            cells: int64 [B, n], or [n] if all images have the same cells. If the images have different numbers of
                cells, a tuple (image, cell), int64 [N] each; then [N] replaces [B, n] in the other arguments.
            values: the values of the cells, [B, n, ...].
            when: the pass that decides the cells; int32 [B, n] if different passes decide them.
            outcome: uint8 [B, n], what became of the cells' drafts, see ``reports/record.py``; None changes no outcome.
        """
        at: tuple[Tensor | slice, Tensor]
        if isinstance(cells, tuple):
            at = cells
        elif cells.ndim == 1:
            at = slice(None), cells  # launches fewer operations than an index of the images
        else:
            at = torch.arange(self.images, device=cells.device)[:, None], cells

        self.values[at] = values
        self.decided_in_pass[at] = when
        if outcome is not None:
            self.outcome[at] = outcome

    def partial_latents(self, decided: Tensor) -> Tensor:
        """The images' latents or codes, in the shape that :class:`Sampled` states: zero at the cells where ``decided``,
        bool [B, L], is False.
        """
        values = self.values[:, : self.cells]
        ones = (1,) * (values.ndim - 2)
        return self.to_latents(values * decided.view(*decided.shape, *ones))

    def to_latents(self, values: Tensor) -> Tensor:
        """Turn values [B, L, ...] into latents or codes. This class returns codes [B, h, w]; most subclasses return
        latents.
        """
        return values.view(-1, *self.grid)

    # The caller may change the returned tensors, so they must not be inference tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def view(self, drafted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The latents or codes so far, and which tokens are decided; see :data:`View`.

        ``drafted``: bool [B, L], the cells whose values are drafts; these cells count as decided. None: no drafts.
        """
        decided = self.decided if drafted is None else self.decided | drafted
        return self.partial_latents(decided), decided.view(-1, *self.grid)

    def yield_step(self, done: int, view: View | None = None) -> Iterator[Step]:
        """Yield the partial result. The run's time does not include the time until the caller continues.

        ``view``: computes what :meth:`view` computes, for this step; None for :meth:`view` itself.
        """
        step = Step(done, self.total, self.report, view or self.view)
        with self.clock.phase(PAUSE):
            yield step
        step.view = None

    def watch(self, *norms: Tensor) -> None:
        """Store norms, fp32 [] each. :meth:`expect_finite` checks all stored norms at once after the last pass, so no
        pass waits for the device.
        """
        self.norms.extend(norms)

    @torch.inference_mode(False)  # for the latents in the result, as in view
    def finish(self) -> Sampled:
        """Stop the clock, complete the report, and return the result.

        Raises:
            UserError: the latents, or norms that :meth:`watch` stored, are NaN or infinite.
        """
        # 1. The maps of the report. The cells that an edit fixed count as given, whatever the sampler stored there.
        decided_in_pass = self.decided_in_pass[:, : self.cells]
        outcome = self.outcome[:, : self.cells]
        if self.regenerated is not None:
            decided_in_pass = torch.where(self.regenerated, decided_in_pass, -1)
            outcome = torch.where(self.regenerated, outcome, GIVEN)
        self.report.maps["step"] = decided_in_pass.unflatten(1, self.grid).cpu().numpy()
        self.report.maps["outcome"] = outcome.unflatten(1, self.grid).cpu().numpy()

        # 2. The result.
        latents = self.partial_latents(self.decided)
        if latents.is_floating_point():
            self.watch(torch.linalg.vector_norm(latents, torch.inf))  # the largest absolute value
        self.clock.stop(self.report)
        self.report.remark(self.model.net.remark)
        self.expect_finite("model")
        return Sampled(latents, self.report)

    def expect_finite(self, input_name: str) -> None:
        """Check all stored norms. For this check, the host waits for the device.

        ``input_name``: the input that holds the model, for the error message.

        Raises:
            UserError: a norm is NaN or infinite.
        """
        if self.norms and not np.isfinite(torch.stack(self.norms).cpu().numpy()).all():
            what = "latents" if self.values.is_floating_point() else "logits"
            raise not_finite(input_name, self.model.name, what)


def run_passes(
    canvas: Canvas,
    plan: Mapping[int, Tensor],
    look: Look,
    draw: Draw,
    yield_step: Callable[[int], Iterator[Step]] | None = None,
    passes_before: int = 0,
) -> Iterator[Step]:
    """Run the passes of a plan one after another, and yield a step after each pass. The caller must disable gradients.

    Args:
        canvas: the images to generate.
        plan: the cells of each pass, by the index of the pass: int64 [B, n], or [n] if all images have the same cells.
        look, draw: see the top of this file.
        yield_step: takes the number of passes so far, and returns the steps to yield; None for
            :meth:`Canvas.yield_step`.
        passes_before: number of passes that have run before the plan's passes.
    """
    yield_step = yield_step or canvas.yield_step
    looking, drawing = canvas.phases
    for done, (k, cells) in enumerate(plan.items(), passes_before + 1):
        with canvas.clock.phase(looking):
            z = look(k, cells)
        with canvas.clock.phase(drawing):
            values = draw(k, cells, z)
        canvas.decide(cells, values, k)
        yield from yield_step(done)


def finish(sampler: Generator[AnyStep, None, Result], callback: Callable[[AnyStep], object] | None = None) -> Result:
    """Run a sampler to its end, call ``callback`` with every step, and return the sampler's result."""
    with closing(sampler):
        while True:
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value

            if callback is not None:
                callback(step)


def start_report(name: str, model: Model, condition: AnyCondition, settings: Any, noise: Noise) -> Report:
    """Start the report of a run.

    ``name``: the sampler's name. The other arguments are the sampler's arguments of the same names.

    Raises:
        UserError: the condition and the noise are for different numbers of images.
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


def new_report(name: str, model: Model, settings: Any, noise: Noise) -> Report:
    """Start the report of a run without a condition; otherwise the same as :func:`start_report`."""
    report = Report(name, model.name, asdict(settings), noise.seed, len(noise), model.device.type)
    report.remark(model.note, ops.remark(*model.parts.values(), operations=model.net.operations))
    report.dtype = dtype_of(model.net)
    return report


def remark_draft(report: Report, draft: Model) -> None:
    """At the end of a run, add the remarks about a draft model that the report does not have yet."""
    report.remark(*(f"draft: {text}" for text in (draft.note, draft.net.remark) if text and text not in report.note))
