"""CSpD's draft model, and the diffusion paths with which the draft model and the target sample tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.mar import BUDGET, MARModel
from ....reports.record import Report
from ...chain import DiffusionBatch, HeadFactory, run_chain
from ...conditioning import ClassOrPrompt
from ...coupling import Gaussian
from ...diffusion_steps import StepTable, step_table
from ...noise import StreamNoise
from ...speculation import DraftedSteps
from ..canvas import MARCanvas, TokenIndex
from ..prepare import read_condition
from ..transformer import Transformer
from .densities import LastStep


class Paths(NamedTuple):
    """The diffusion paths of N tokens, with S diffusion steps each.

    For each step, the head predicts a mean and a std s. The next state is a sample of the Gaussian with this mean and
    with the std T s; T is the temperature. The last step is an exception in all modes except ``paper``: it adds no
    noise, as in MAR, so the token is the mean. But the rule of the modes ``paper`` and ``published`` compares the last
    steps of two paths, so it needs the last step's std too. These are the stds in the results of the methods::

                               last step                      each other step
        field ``predicted``    s                              s
        drafted_steps          T s, the std of the noise      T s, the std of the noise
                               0 if no noise was added
        last_step              T s, with or without noise     s, because T cancels

    """

    states: Tensor  # fp32 [N, S + 1, channels]; the first state is noise, the last state is the token
    predicted: Gaussian  # what the head predicts for each step, fp32 [N, S, channels], without the temperature
    temperature: float
    adds_last_noise: bool  # whether the last step added noise; if not, the token is the last mean

    @property
    def tokens(self) -> Tensor:
        """The tokens at which the paths end, fp32 [N, channels]."""
        return self.states[:, -1]

    def last_step(self) -> LastStep:
        """What the ratio r needs from the paths, see ``densities.py``. The density of the last step has the predicted
        std times the temperature, even if the last step added no noise.
        """
        mean, log_std = self.predicted
        # At temperature 0, the published code divides 0 by 0. Here the stds become tiny instead, so the target rejects
        # every draft that differs from the target's mean, and the mean becomes the token.
        log_temperature = math.log(max(self.temperature, 1e-6))
        # The other stds occur only in Sigma, a product of ratios of two stds. The temperature T cancels in each ratio.
        return LastStep(mean[:, -1], log_std[:, -1] + log_temperature, log_std[:, :-1].sum(1))

    def drafted_steps(self) -> DraftedSteps:
        """All diffusion steps, as drafts that ``speculation.py`` verifies. Their stds are those of the noise that was
        added, so the last std is 0 if the last step added no noise.
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
    """The diffusion steps for :func:`sample_paths`. Here the last step has a std too, unlike in
    :meth:`.MARCanvas.step_table`; :class:`Paths` says why.
    """
    respaced = canvas.respaced_diffusion(canvas.settings.diffusion_steps)
    return step_table(respaced.steps, canvas.time_embeddings(respaced))


def sample_paths(heads: HeadFactory, batch: DiffusionBatch, adds_last_noise: bool) -> Paths:
    """Sample the tokens of a batch, with a call of the full diffusion head at every step, and return their paths.

    Args:
        heads: compute the head in full at every step.
        batch: a batch whose table comes from :func:`table_with_last_std`.
        adds_last_noise: whether the last step adds noise, as all other steps do. If not, the tokens are its means.
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


class MARDrafter:
    """Drafts tokens of the images that the target generates. The draft model reads the target's decided tokens, and
    uses the target's noise and diffusion steps.
    """

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
        """Draft the tokens of an AR step, given the tokens and drafts of all earlier AR steps. Write the drafts to the
        canvas of the target, because later AR steps read them there. Returns the paths of the drafts.
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
