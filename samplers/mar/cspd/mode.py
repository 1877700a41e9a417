"""What the three modes of CSpD share: diffusion paths, the draft model, and the base class of the modes.

Both models sample a token on a diffusion *path*: the states from noise to the token (:class:`Paths`). The draft model
reads the target's tokens, and samples with the target's noise and diffusion steps (:class:`MARDrafter`). A
:class:`Mode` says how the target verifies the drafts.

Shapes: B images of L tokens; n tokens of an image in an AR step; N tokens in a batch of the diffusion head; S diffusion
steps of a token; C, the width of the transformer; P branches of guidance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ....networks.mar import BUDGET, MARModel
from ....networks.torch_state import to_device
from ....reports.record import ACCEPTED, PLAIN, REJECTED, Report
from ...chain import DiffusionBatch, HeadFactory, run_chain
from ...conditioning import ClassOrPrompt
from ...coupling import Gaussian
from ...diffusion_steps import StepTable, step_table
from ...noise import StreamNoise, row_keys
from ...speculation import DraftedSteps
from ..canvas import MARCanvas, TokenIndex
from ..prepare import read_condition
from ..transformer import Transformer

# ------------------------------------------------------------------------------------------------ paths


class LastStep(NamedTuple):
    """What the rule in ``rejection.py`` needs from the diffusion paths of one model, fp32 [..., channels] each."""

    mean: Tensor  # mean of the last diffusion step
    log_std: Tensor  # log std of the last diffusion step
    other_log_stds: Tensor  # sum of the log stds of all other diffusion steps

    def at(self, index: Tensor) -> LastStep:
        """The tokens at ``index``, int64 [N]."""
        return LastStep(*(field[index] for field in self))

    def for_proposals(self) -> LastStep:
        """The same N tokens, with an additional axis for the proposals of each token: fp32 [N, 1, channels]."""
        return LastStep(*(field[:, None] for field in self))

    @staticmethod
    def joined_by_image(parts: Sequence[LastStep], images: int) -> LastStep:
        """Join the tokens of several AR steps, one part for each AR step. The result has one image after another, each
        with its tokens of all these AR steps. ``images``: B.
        """
        joined = []
        for field_of_parts in zip(*parts, strict=True):  # for each field of LastStep, the tensors of all AR steps
            by_image = [x.unflatten(0, (images, -1)) for x in field_of_parts]
            joined.append(torch.cat(by_image, 1).flatten(0, 1))
        return LastStep(*joined)


class Paths(NamedTuple):
    """The diffusion paths of N tokens.

    For each diffusion step, the head predicts a mean and a std s. The next state is a sample of the Gaussian with this
    mean and with the std T s; T is the temperature. The last diffusion step is an exception in all modes except
    ``paper``: it adds no noise, as in MAR, so the token is the mean. But the rule in ``rejection.py`` compares the last
    diffusion steps of two paths, so it needs their stds too. These are the stds in the results of the methods::

                               last diffusion step            each other diffusion step
        field ``predicted``    s                              s
        drafted_steps          T s, the std of the noise      T s, the std of the noise
                               0 if no noise was added
        last_step              T s, with or without noise     s, because T cancels

    """

    states: Tensor  # fp32 [N, S + 1, channels]; the first state is noise, the last state is the token
    predicted: Gaussian  # what the head predicts for each diffusion step, fp32 [N, S, channels], without T
    temperature: float  # T
    adds_last_noise: bool  # whether the last diffusion step added noise; if not, the token is its mean

    @property
    def tokens(self) -> Tensor:
        """The tokens at which the paths end, fp32 [N, channels]."""
        return self.states[:, -1]

    def last_step(self) -> LastStep:
        """What the rule in ``rejection.py`` needs. The std of the last diffusion step is T s, even if this step added
        no noise.
        """
        mean, log_std = self.predicted
        # At temperature 0, the published code divides 0 by 0. Here the stds become tiny instead, so the target rejects
        # every draft that differs from the target's mean, and the mean becomes the token.
        log_temperature = math.log(max(self.temperature, 1e-6))
        # The rule uses the other stds only in ratios of the draft model's std and the target's. There T cancels.
        return LastStep(mean[:, -1], log_std[:, -1] + log_temperature, log_std[:, :-1].sum(1))

    def drafted_steps(self) -> DraftedSteps:
        """All diffusion steps, as drafts that ``speculation.py`` verifies. Their stds are those of the noise that was
        added, so the last std is 0 if the last diffusion step added no noise.
        """
        mean, log_std = self.predicted
        log_std = log_std + (math.log(self.temperature) if self.temperature else -math.inf)
        if not self.adds_last_noise:
            log_std[:, -1] = -math.inf
        return DraftedSteps(self.states[:, :-1], self.states[:, 1:], Gaussian(mean, log_std))

    def split(self, sizes: Sequence[int]) -> list[Paths]:
        """Split the paths into consecutive parts, whose numbers of tokens are ``sizes``."""
        parts = zip(*(x.split(sizes) for x in (self.states, *self.predicted)), strict=True)
        return [self._replace(states=states, predicted=Gaussian(mean, log_std)) for states, mean, log_std in parts]

    @staticmethod
    def concatenated(parts: Sequence[Paths]) -> Paths:
        """Join several parts, one part after another. All parts were sampled in the same way."""
        states = torch.cat([part.states for part in parts])
        mean = torch.cat([part.predicted.mean for part in parts])
        log_std = torch.cat([part.predicted.log_std for part in parts])
        return parts[0]._replace(states=states, predicted=Gaussian(mean, log_std))


def table_with_last_std(canvas: MARCanvas) -> StepTable:
    """The diffusion steps for :func:`sample_paths`. Here the last one has a std too, unlike in
    :meth:`.MARCanvas.step_table`; :class:`Paths` says why.
    """
    respaced = canvas.respaced_diffusion(canvas.settings.diffusion_steps)
    return step_table(respaced.steps, canvas.time_embeddings(respaced))


def sample_paths(heads: HeadFactory, batch: DiffusionBatch, adds_last_noise: bool) -> Paths:
    """Sample the tokens of a batch, with a call of the full diffusion head at every diffusion step, and return their
    paths.

    Args:
        heads: compute the head in full at every diffusion step.
        batch: a batch whose table comes from :func:`table_with_last_std`.
        adds_last_noise: whether the last diffusion step adds noise, as all others do. If not, the tokens are its means.
    """
    states = [batch.x]
    means = []
    log_stds = []
    for result in run_chain(batch, heads.for_chain(batch)):
        states.append(result.x)
        means.append(result.mean)
        log_stds.append(result.log_std)

    if not adds_last_noise:
        states[-1] = means[-1]

    predicted = Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1))
    return Paths(torch.stack(states, 1), predicted, batch.temperature, adds_last_noise)


# ------------------------------------------------------------------------------------------------ the draft model


class MARDrafter:
    """Drafts tokens of the images that the target generates, and writes the drafts to the target's canvas."""

    # The positions that have received drafts since the last call of :meth:`discard_drafts`, bool [B, L]. A position
    # stays True after its draft has been verified.
    drafted: Tensor

    def __init__(
        self,
        canvas: MARCanvas,
        model: MARModel,
        condition: ClassOrPrompt,
        make_transformer: Callable[[MARCanvas], Transformer],
        adds_last_noise: bool,
    ):
        """``canvas`` is the target's, ``model`` the draft model; for ``adds_last_noise`` see :func:`sample_paths`."""
        report = Report("draft", model.name, {}, None, canvas.images, canvas.report.device)

        self.target = canvas
        self.drafted = torch.zeros_like(canvas.outcome, dtype=torch.bool)
        self.canvas = canvas.with_model(model, read_condition(model, condition, canvas.guided), report)
        self.table = table_with_last_std(self.canvas)
        self.transformer = make_transformer(self.canvas)
        self.heads = HeadFactory(model.net, model.net.head, report, BUDGET)  # without caches
        self.adds_last_noise = adds_last_noise

    def draft_step(self, step: int, noise: StreamNoise) -> Paths:
        """Draft the tokens of AR step ``step``, given the tokens and drafts of all earlier AR steps. Returns the paths
        of the drafts. Later AR steps read the drafts from the target's canvas.
        """
        canvas = self.canvas
        positions = canvas.order.positions_from(step)
        tokens = TokenIndex.all(positions)

        with canvas.clock.phase("draft"):
            z = self.transformer(step, positions)
            paths = sample_paths(self.heads, canvas.batch(self.table, tokens, z, noise), self.adds_last_noise)
            drafts = paths.tokens.view(*positions.shape, -1)
            self.target.values.scatter_(1, positions[..., None].expand_as(drafts), drafts)
            self.drafted.scatter_(1, positions, True)

        self._move_counts()
        return paths

    def discard_drafts(self) -> None:
        """Discard all drafts, because the target has rejected one of them. Their values stay on the canvas until other
        values replace them. Features that the transformer has cached are discarded too, because it computed them from
        drafts.
        """
        self.drafted.fill_(False)
        self.transformer.discard_features()

    def _move_counts(self) -> None:
        """Move all counts from the draft model's report to the target's report."""
        counts = self.canvas.report.counts
        self.target.report.add(**counts)
        self.target.report.add(draft_passes=counts["transformer_passes"], draft_head_calls=counts["head_calls"])
        counts.clear()


# ------------------------------------------------------------------------------------------------ the modes


class TargetBatch(NamedTuple):
    """A batch for the target's head: the tokens of the AR steps of a pass, one AR step after another."""

    batch: DiffusionBatch
    tokens: TokenIndex
    sizes: list[int]  # number of tokens in each AR step, for all images together


class Mode(ABC):
    """How the target verifies drafts.

    All images of a batch are always at the same AR step. In the modes *paper* and *lossless*, a rejection in one image
    therefore discards the later drafts of all images. For the images without a rejection, the draft model makes the
    same drafts again, from the same noise. The target then verifies them with the same random numbers. So the tokens of
    an image do not depend on its batch.
    """

    adds_last_noise: ClassVar[bool] = False  # whether the last diffusion step of a path adds noise, see Paths
    table: StepTable  # the diffusion steps of the target; each subclass sets them

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        """``canvas`` and ``transformer`` are the target's. ``noise``: the noise of the target's full diffusion. The
        draft model samples with it too.
        """
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        # The target's head is computed in full, even if the transformer has caches.
        net = canvas.model.net
        self.heads = HeadFactory(net, net.head, canvas.report, BUDGET)
        # Keys of the random numbers with which drafts are verified, int64 [B, L].
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)

    @abstractmethod
    def segment(self, first: int) -> Iterator[int]:
        """Draft and verify a segment that starts at AR step ``first``, and decide its tokens.

        After each AR step, yields the index of the next AR step, so that the caller can show a partial result. The next
        segment starts at the last of these indices. For example, a segment that decides the AR steps 4 and 5 yields 5
        and 6. In mode *published*, an AR step counts as soon as it is drafted.
        """

    def passes(self, ar_steps: range) -> list[range]:
        """The AR steps that each pass of the target's transformer evaluates: all ``ar_steps`` in one pass or, if the
        transformer has caches, one AR step in each pass. A transformer with caches may read only final tokens, so the
        caller must decide the AR steps of a pass before it runs the next pass.
        """
        if self.transformer.allows_different_steps:
            return [ar_steps]
        return [range(step, step + 1) for step in ar_steps]

    def run_target(self, ar_steps: range) -> TargetBatch:
        """Run a pass of the target's transformer over ``ar_steps``, which :meth:`passes` chose. Each AR step reads the
        tokens and drafts of all earlier AR steps. Returns the batch for the target's head.
        """
        canvas = self.canvas
        with canvas.clock.phase("transformer"):
            zs = self.transformer.for_ar_steps(ar_steps)  # for each AR step, z [P, B, n, C]

        with canvas.clock.phase("head"):
            tokens = TokenIndex.step_by_step([canvas.order.positions_from(step) for step in ar_steps])
            batch = canvas.batch(self.table, tokens, torch.cat(zs, 2), self.noise)
        return TargetBatch(batch, tokens, [z.shape[1] * z.shape[2] for z in zs])

    def count_outcomes(self, accepted: Tensor, rejected: Tensor) -> Tensor:
        """Count the drafts of an AR step, or of a whole segment, in the report. Each image with a rejected draft counts
        as a restart.

        Args:
            accepted, rejected: bool [B, n] on the host, the tokens whose drafts are accepted or rejected. All other
                tokens are the target's own, without a draft.

        Returns:
            The outcome of each token, ACCEPTED, REJECTED or PLAIN, uint8 [B, n] on the device.
        """
        self.canvas.report.add(
            accepted=int(accepted.sum()), rejected=int(rejected.sum()), restarts=int(rejected.any(1).sum())
        )
        outcome = torch.full(accepted.shape, PLAIN, dtype=torch.uint8)
        outcome = outcome.masked_fill(accepted, ACCEPTED).masked_fill(rejected, REJECTED)
        return to_device(outcome, self.canvas.device)
