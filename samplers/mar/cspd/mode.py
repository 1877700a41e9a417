"""What the three modes of CSpD share: diffusion paths, the draft model, and the base class of the modes.

Both models sample a token on a diffusion *path*: the states from noise to the token (:class:`Paths`). The draft model
reads the target's tokens, and samples with the target's noise and diffusion steps (:class:`MARDrafter`). A
:class:`Mode` says how the target verifies the drafts.

Shapes: B images of L tokens; n tokens of an image in an AR step; N tokens in a batch of the diffusion head; S diffusion
steps of a token; D, the width of the transformer; P branches of guidance.
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
from ...chain import DiffusionBatch, HeadSampler, run_chain
from ...conditioning import ClassOrPrompt
from ...coupling import Gaussian
from ...diffusion_steps import StepTable, step_table
from ...noise import StreamNoise, row_keys
from ...speculation import DraftedSteps
from ..canvas import MARCanvas, TokenIndex
from ..prepare import read_condition
from ..transformer import Transformer

# ------------------------------------------------------------------------------------------------ paths


class PathDensity(NamedTuple):
    """What the rule in ``rejection.py`` needs from the diffusion paths of one model, fp32 [..., channels] each: the
    Gaussian of the last diffusion step, and the stds of all other diffusion steps.
    """

    mean: Tensor  # mean of the last diffusion step
    log_std: Tensor  # log std of the last diffusion step
    sum_of_other_log_stds: Tensor  # sum of the log stds of all other diffusion steps

    def at(self, index: Tensor) -> PathDensity:
        """The tokens at ``index``, int64 [N]."""
        return PathDensity(*(field[index] for field in self))

    def for_proposals(self) -> PathDensity:
        """The same N tokens, with an additional axis for the proposals of each token: fp32 [N, 1, channels]."""
        return PathDensity(*(field[:, None] for field in self))

    @staticmethod
    def joined_by_image(parts: Sequence[PathDensity], images: int) -> PathDensity:
        """Join the tokens of several AR steps, one part for each AR step. The result has one image after another, each
        with its tokens of all these AR steps. ``images``: B.
        """
        joined = []
        for field_of_parts in zip(*parts, strict=True):  # for each field of PathDensity, the tensors of all AR steps
            by_image = [x.unflatten(0, (images, -1)) for x in field_of_parts]  # [B, n, channels] each
            joined.append(torch.cat(by_image, 1).flatten(0, 1))
        return PathDensity(*joined)


class Paths(NamedTuple):
    """The diffusion paths of N tokens.

    For each diffusion step, the head predicts a mean and a std s. The next state is a sample of the Gaussian with this
    mean and with the std T s; T is the temperature. The last diffusion step is an exception in all modes except
    ``paper``: it adds no noise, as in MAR, so the token is the mean.

    The modes need the stds for two purposes. :meth:`drafted_steps` describes the noise that was really added.
    :meth:`density` describes the density of the rule, which needs a std even where no noise was added. The methods give
    these stds:

    ======================  ============================  ==============================
    method                  diffusion steps 0 to S - 2    last diffusion step
    ======================  ============================  ==============================
    :meth:`drafted_steps`   T s                           T s, or 0 if it added no noise
    :meth:`density`         s                             T s
    ======================  ============================  ==============================
    """

    states: Tensor  # fp32 [N, S + 1, channels]; the first state is noise, the last state is the token
    predicted: Gaussian  # the mean and log s of each diffusion step, fp32 [N, S, channels]; s is without T
    temperature: float  # T
    adds_last_noise: bool  # whether the last diffusion step added noise; if not, the token is its mean

    @property
    def tokens(self) -> Tensor:
        """The tokens at which the paths end, fp32 [N, channels]."""
        return self.states[:, -1]

    def density(self) -> PathDensity:
        """The density of the tokens for the rule in ``rejection.py``. The std of the last diffusion step is T s, even
        if this step added no noise.
        """
        mean, log_std = self.predicted
        # At temperature 0, the published code divides 0 by 0. Here the stds become tiny instead, so the target rejects
        # every draft that differs from the target's mean, and the mean becomes the token.
        log_temperature = math.log(max(self.temperature, 1e-6))
        # The other stds stay without T. The rule uses them only in ratios of one model's std and the other's, and there
        # T cancels.
        return PathDensity(mean[:, -1], log_std[:, -1] + log_temperature, log_std[:, :-1].sum(1))

    def drafted_steps(self) -> DraftedSteps:
        """All diffusion steps, as drafts that ``speculation.py`` verifies. Their stds describe the noise that was
        added: T s, or 0 in a last diffusion step without noise.
        """
        mean, log_std = self.predicted
        # The sum is a new tensor, so the assignment below leaves ``predicted`` as it is.
        log_std_of_noise = log_std + (math.log(self.temperature) if self.temperature else -math.inf)
        if not self.adds_last_noise:
            log_std_of_noise[:, -1] = -math.inf
        return DraftedSteps(self.states[:, :-1], self.states[:, 1:], Gaussian(mean, log_std_of_noise))

    def split(self, sizes: Sequence[int]) -> list[Paths]:
        """Split the paths into consecutive parts, whose numbers of tokens are ``sizes``."""
        mean_parts = self.predicted.mean.split(sizes)
        log_std_parts = self.predicted.log_std.split(sizes)
        parts = zip(self.states.split(sizes), mean_parts, log_std_parts, strict=True)
        return [self._replace(states=states, predicted=Gaussian(mean, log_std)) for states, mean, log_std in parts]

    @staticmethod
    def concatenated(parts: Sequence[Paths]) -> Paths:
        """Join several parts, one part after another. All parts have the same temperature and ``adds_last_noise``."""
        assert len({(part.temperature, part.adds_last_noise) for part in parts}) == 1
        states = torch.cat([part.states for part in parts])
        mean = torch.cat([part.predicted.mean for part in parts])
        log_std = torch.cat([part.predicted.log_std for part in parts])
        return parts[0]._replace(states=states, predicted=Gaussian(mean, log_std))


def table_with_last_std(canvas: MARCanvas) -> StepTable:
    """The diffusion steps for :func:`sample_paths`. Here the last one has a std too, because :meth:`Paths.density`
    needs it. In :meth:`.MARCanvas.step_table`, the last one has none.
    """
    respaced = canvas.respaced_diffusion(canvas.settings.diffusion_steps)
    return step_table(respaced.steps, canvas.time_embeddings(respaced))


def sample_paths(heads: HeadSampler, batch: DiffusionBatch, adds_last_noise: bool) -> Paths:
    """Sample the tokens of a batch, with a call of the full diffusion head at every diffusion step, and return their
    paths.

    Args:
        heads: compute the head in full at every diffusion step.
        batch: a batch whose table comes from :func:`table_with_last_std`.
        adds_last_noise: whether the last diffusion step adds noise, as all others do. If not, the tokens are its means.
    """
    assert batch.table.ends_with_noise, "this table has no std for the last diffusion step"
    states = [batch.x]
    means = []
    log_stds = []
    for result in run_chain(batch, heads.for_chain(batch)):
        states.append(result.x)
        means.append(result.mean)
        log_stds.append(result.log_std)

    if not adds_last_noise:
        states[-1] = means[-1]  # run_chain added noise, because the table has a std for the last diffusion step

    predicted = Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1))
    return Paths(torch.stack(states, 1), predicted, batch.temperature, adds_last_noise)


# ------------------------------------------------------------------------------------------------ the draft model


class MARDrafter:
    """Drafts tokens of the images that the target generates, and writes the drafts to the target's canvas.

    There are two canvases for the same images, see :meth:`.MARCanvas.with_model`. ``target_canvas`` decides the tokens.
    ``draft_canvas`` belongs to the draft model, and has its condition and its report. Both share one tensor of tokens,
    so each model reads what is written to the target's canvas.
    """

    # The positions that have received drafts since the last call of :meth:`discard_drafts`, bool [B, L]. A position
    # stays True after its draft has been verified.
    drafted: Tensor

    def __init__(
        self,
        target_canvas: MARCanvas,
        model: MARModel,
        condition: ClassOrPrompt,
        make_transformer: Callable[[MARCanvas], Transformer],
        adds_last_noise: bool,
    ):
        """``model`` is the draft model; for ``adds_last_noise`` see :func:`sample_paths`."""
        # This report only collects counts, and _move_counts moves them to the target's report.
        report = Report("draft", model.name, {}, None, target_canvas.images, target_canvas.report.device)
        conditioning = read_condition(model, condition, target_canvas.guided)

        self.target_canvas = target_canvas
        self.draft_canvas = target_canvas.with_model(model, conditioning, report)
        self.drafted = torch.zeros_like(target_canvas.outcome, dtype=torch.bool)
        self.table = table_with_last_std(self.draft_canvas)
        self.transformer = make_transformer(self.draft_canvas)
        self.heads = HeadSampler(model.net, model.net.head, report, BUDGET)  # without caches
        self.adds_last_noise = adds_last_noise

    def draft_step(self, step: int, noise: StreamNoise) -> Paths:
        """Draft the tokens of AR step ``step``, given the tokens and drafts of all earlier AR steps. Returns the paths
        of the drafts. Later AR steps read the drafts from the target's canvas.
        """
        positions = self.draft_canvas.order.positions_from(step)
        tokens = TokenIndex.all(positions)

        with self.target_canvas.clock.phase("draft"):
            z = self.transformer(step, positions)
            batch = self.draft_canvas.batch(self.table, tokens, z, noise)
            paths = sample_paths(self.heads, batch, self.adds_last_noise)
            # Write the drafts to the tensor of tokens that both canvases share. This decides no token: the target
            # does that later, with MARCanvas.decide.
            drafts = paths.tokens.view(*positions.shape, -1)
            self.target_canvas.values.scatter_(1, positions[..., None].expand_as(drafts), drafts)
            self.drafted.scatter_(1, positions, True)

        self._move_counts()
        return paths

    def discard_drafts(self) -> None:
        """Discard all drafts, because the target has rejected one of them. Their values stay on the canvas until other
        values replace them. Features that the draft model's transformer has cached are discarded too, because it
        computed them from drafts.
        """
        self.drafted.fill_(False)
        self.transformer.discard_features()

    def _move_counts(self) -> None:
        """Move all counts from the draft model's report to the target's report."""
        counts = self.draft_canvas.report.counts
        target_report = self.target_canvas.report
        target_report.add(**counts)
        target_report.add(draft_passes=counts["transformer_passes"], draft_head_calls=counts["head_calls"])
        counts.clear()


# ------------------------------------------------------------------------------------------------ the modes


class TargetBatch(NamedTuple):
    """A batch for the target's head: the tokens of the AR steps of a pass, one AR step after another. An AR step has
    one image after another.
    """

    batch: DiffusionBatch
    tokens: TokenIndex
    sizes: list[int]  # number of tokens in each AR step, for all images together: B n


class Mode(ABC):
    """How the target verifies drafts.

    All images of a batch are always at the same AR step. In the modes *paper* and *lossless*, a rejection in one image
    therefore discards the later drafts of all images. For the images without a rejection, the draft model makes the
    same drafts again, from the same noise. The target then verifies them with the same random numbers. So the tokens of
    an image do not depend on its batch.
    """

    adds_last_noise: ClassVar[bool] = False  # whether the last diffusion step of a path adds noise, see Paths

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        """``canvas`` and ``transformer`` are the target's. ``noise``: the noise of the target's diffusion. The draft
        model samples with it too.
        """
        self.canvas = canvas
        self.transformer = transformer
        self.drafter = drafter
        self.noise = noise
        # The target's head is computed in full, even if the transformer has caches.
        net = canvas.model.net
        self.heads = HeadSampler(net, net.head, canvas.report, BUDGET)
        # Keys of the random numbers with which drafts are verified, int64 [B, L].
        self.keys = to_device(row_keys(canvas.noise, "verify", canvas.cells), canvas.device)
        self.table = self.make_table(canvas)

    @staticmethod
    @abstractmethod
    def make_table(canvas: MARCanvas) -> StepTable:
        """The diffusion steps of the target, for the batches in which it verifies drafts."""

    @abstractmethod
    def segment(self, first: int) -> Iterator[int]:
        """Draft and verify a segment that starts at AR step ``first``, and decide its tokens.

        After each AR step, yields the index of the next AR step, so that the caller can show a partial result. The next
        segment starts at the last of these indices. For example, a segment that decides the AR steps 4 and 5 yields 5
        and 6. In mode *published*, the yield after an AR step comes when this AR step is drafted. Only the last yield
        of the segment comes after the tokens are decided.
        """

    # The modes paper and lossless use the next two methods. In mode published, a pass does not read the drafts.

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
        order = canvas.order
        with canvas.clock.phase("transformer"):
            z_of_steps = self.transformer.for_ar_steps(ar_steps)  # for each AR step, z [P, B, n, D]

        with canvas.clock.phase("head"):
            tokens = TokenIndex.step_by_step([order.positions_from(step) for step in ar_steps])
            batch = canvas.batch(self.table, tokens, torch.cat(z_of_steps, 2), self.noise)
        return TargetBatch(batch, tokens, [canvas.images * order.sizes[step] for step in ar_steps])

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
