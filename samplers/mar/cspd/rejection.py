"""CSpD, modes ``published`` and ``paper``: accept or reject whole drafts, and resample the rejected ones.

Source: Wang et al. 2024 (arXiv 2411.11925), sections 3.2 and 3.3, and the published code. p(x) is the density of a
token x under the target, and q(x) is its density under the draft model. Each model samples the token on its own *path*:
the states from noise to the token. The model's density is the Gaussian of its path's last diffusion step, with a mean
and a std for every channel. Sigma (equation 4) is a product of ratios sigma_q / sigma_p, in which sigma_q is the draft
model's std and sigma_p is the target's. Sigma has such a factor for each channel of each diffusion step except the
last. The *rule* of the paper has two parts:

1. A draft x is accepted with probability min(1, r(x)), where r(x) = Sigma p(x) / q(x) (equation 5).
2. A sample of max(0, Sigma p - q), normalised, replaces a rejected draft (equation 6). To get this sample, CSpD makes
   *proposals*, one after another. A proposal x is a sample of p, and it is accepted with probability
   max(0, 1 - 1 / r(x)). The first accepted proposal is the sample (equations 10 and 11). The report counts the
   proposals up to this one as ``redraws``.

Our copy of the paper lacks equations 5 and 11, so we derived them from the text around them. If Sigma is 1, as in
models that do not learn their variances, the result is a sample of p. With learned variances it is not: the rule treats
Sigma p as the target's density, but Sigma p does not integrate to 1.

The mode :class:`Published` follows the published code, and the mode :class:`Paper` the paper's algorithm 1. Each class
says where it differs from the rule above. For both modes, :class:`Rejection` verifies drafts.

Shapes: B images, n tokens of an image, N tokens in all. gamma is the setting ``draft_length``. Some functions have bool
or int tensors both on the host and on the device. There, the names of those on the device begin with d_.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...diffusion_steps import StepTable
from ...noise import CounterRNG, StreamNoise
from ..canvas import MARCanvas, TokenIndex
from ..transformer import Transformer
from .mode import MARDrafter, Mode, PathDensity, Paths, sample_paths, table_with_last_std

# Largest number of proposals for a rejected token, as in the published code.
MAX_PROPOSALS = 100
# A token's proposals are numbered from 0. All tokens get the first proposals, so the host need not wait to learn which
# drafts are rejected. Only the rejected tokens that still need a value get the later proposals.
_FIRST_PROPOSALS = range(10)
_LATER_PROPOSALS = range(10, MAX_PROPOSALS)
# Lanes of a token's random numbers: independent sequences, see noise.py. The lanes below 1 << 20 belong to the token's
# diffusion steps (speculation.py).
_ACCEPTANCE, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)

# ------------------------------------------------------------------------------------------------ the rule


class Rule(NamedTuple):
    """How a mode computes the ratio r."""

    sigma_power: int  # exponent of Sigma in every r
    draft_std_factor: float  # factor for the stds of p and q in the r of a draft; in the r of a proposal, it is 1


PAPER_RULE = Rule(sigma_power=1, draft_std_factor=1.0)
# The published code divides by Sigma. In the r of a draft, it also multiplies the stds of p and q by 42, the default of
# its option inner_temperature (see ``removed`` in settings.py). The std of the last diffusion step is so small that
# without the factor, hardly any draft is near enough to the target's mean. With the factor, the distance hardly
# matters: r depends mainly on the two models' stds. On the demo model, the target then accepts about a quarter of the
# drafts, and in mode paper none (docs/tables.md).
PUBLISHED_RULE = Rule(sigma_power=-1, draft_std_factor=42.0)


def log_ratio(token: Tensor, q: PathDensity, p: PathDensity, sigma_power: int, std_factor: float) -> Tensor:
    """log r of each draft or proposal, fp32 [...]. r is Sigma^sigma_power p / q.

    Args:
        token: fp32 [..., channels].
        sigma_power: exponent of Sigma in r.
        std_factor: factor for the stds of p and q, but not for those in Sigma.
    """

    def exponent(density: PathDensity) -> Tensor:
        """The exponent of the Gaussian at ``token``, fp32 [...]."""
        z = (token - density.mean) * torch.exp(-density.log_std) / std_factor
        return -0.5 * (z**2).sum(-1)

    # 1. The factors of r before the exponentials, for each channel: the power of Sigma, and the ratio of the Gaussians'
    # normalisers. A normaliser is a constant / std, so p's normaliser / q's normaliser is (q's std) / (p's std). In
    # this ratio, std_factor cancels.
    log_sigma = q.sum_of_other_log_stds - p.sum_of_other_log_stds
    log_factor = sigma_power * log_sigma + q.log_std - p.log_std

    # 2. The product over the channels, and the exponentials.
    return log_factor.sum(-1) + exponent(p) - exponent(q)


def acceptance_of_proposals(proposals: Tensor, q: PathDensity, p: PathDensity, sigma_power: int) -> Tensor:
    """The probability with which each of the ``proposals``, fp32 [..., channels], is accepted: max(0, 1 - 1 / r), fp32
    [...]. ``sigma_power``: exponent of Sigma in r.
    """
    log_r = log_ratio(proposals, q, p, sigma_power, std_factor=1.0)
    return (1 - torch.exp(-log_r)).clamp(min=0)


class RejectionNoise:
    """The random numbers with which drafts and proposals are accepted or rejected. They depend only on the tokens'
    keys, int64 [B, L]. Tests replace this class to use recorded numbers.
    """

    def __init__(self, keys: Tensor):
        self.keys = keys

    def acceptance(self, tokens: TokenIndex) -> Tensor:
        """Uniform random numbers, fp32 [N], with which the ratios r of the drafts are compared."""
        return CounterRNG(self.keys[tokens.index]).uniform(_ACCEPTANCE)[:, 0]

    def proposals(self, tokens: TokenIndex, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        """The random numbers of ``count`` proposals for each token, after ``first`` earlier proposals: standard normal
        numbers, fp32 [N, count, channels], and uniform numbers, fp32 [N, count].
        """
        rng = CounterRNG(self.keys[tokens.index])
        return rng.normal(_NORMAL, first, count, channels), rng.uniform(_UNIFORM, first, count)


class FirstAccepted(NamedTuple):
    """The first accepted one of several proposals, for each of N tokens. All fields are on the device."""

    value: Tensor  # the proposal, fp32 [N, channels]; zeros if none is accepted
    d_found: Tensor  # whether one is accepted, bool [N]
    d_index: Tensor  # which of these proposals it is, counted from 0, int64 [N]; without meaning if none is accepted


class VerifiedTokens(NamedTuple):
    """N tokens whose drafts have been verified. ``values`` is on the device, all other fields are on the host."""

    # For each token, the accepted draft or proposal, fp32 [N, channels]; zeros if the draft and all proposals were
    # rejected.
    values: Tensor
    accepted: Tensor  # bool [N], whether the draft was accepted
    # int64 [N], number of proposals up to and including the accepted one; MAX_PROPOSALS if all were rejected; 0 if the
    # draft was accepted.
    proposal_counts: Tensor
    has_value: Tensor  # bool [N], False if the draft and all proposals were rejected

    def counts(self, counted: Tensor | slice = slice(None)) -> dict[str, int]:
        """Counts for the report, over the tokens for which ``counted``, bool [N], is True; by default, over all."""
        return {
            "redraws": int(self.proposal_counts[counted].sum()),
            "redraws_exhausted": int((~self.has_value[counted]).sum()),
        }


def _to_host(*d_tensors: Tensor) -> list[Tensor]:
    """Copy tensors of one shape, bool or int64, from the device to the host in one transfer. For this, the bools become
    ints on the way.
    """
    on_host = torch.stack([d_tensor.to(torch.int64) for d_tensor in d_tensors]).cpu()
    return [part.to(d_tensor.dtype) for part, d_tensor in zip(on_host, d_tensors, strict=True)]


class Rejection:
    """Verifies drafts with a rule. In all methods, q and p belong to the N ``tokens``, as :class:`.PathDensity` says: q
    comes from the draft model's paths, and p from the target's. ``tokens`` determine the random numbers.
    """

    def __init__(self, rule: Rule, noise: RejectionNoise):
        self.rule = rule
        self.noise = noise

    def verify(self, drafts: Tensor, q: PathDensity, p: PathDensity, tokens: TokenIndex) -> VerifiedTokens:
        """Verify the ``drafts``, fp32 [N, channels], and resample the rejected ones.

        The host waits for the device once, or twice if a rejected token needs more than the first proposals.
        """
        # 1. Accept drafts with probability min(1, r).
        log_r = log_ratio(drafts, q, p, self.rule.sigma_power, self.rule.draft_std_factor)
        d_accepted = log_r > self.noise.acceptance(tokens).log()

        # 2. The first proposals, for all tokens. A token with an accepted draft ignores its proposals.
        first = self._propose(_FIRST_PROPOSALS, q, p, tokens)
        values = torch.where(d_accepted[:, None], drafts, first.value)

        # 3. Copy to the host which drafts and which proposals are accepted.
        accepted, found, index = _to_host(d_accepted, first.d_found, first.d_index)
        number = _FIRST_PROPOSALS.start + index

        # 4. The later proposals, for the tokens that have no value yet.
        missing = (~accepted & ~found).nonzero()[:, 0]
        if len(missing):
            d_missing = to_device(missing, drafts.device)
            later = self._propose_later(d_missing, q, p, tokens)
            values[d_missing] = later.value
            later_found, later_index = _to_host(later.d_found, later.d_index)
            found[missing] = later_found
            number[missing] = _LATER_PROPOSALS.start + later_index

        # 5. Count the proposals of each token. A token that still has no value got all of them.
        proposal_counts = torch.where(found, number + 1, MAX_PROPOSALS).masked_fill(accepted, 0)
        return VerifiedTokens(values, accepted, proposal_counts, has_value=accepted | found)

    def _propose(self, numbers: range, q: PathDensity, p: PathDensity, tokens: TokenIndex) -> FirstAccepted:
        """Make the proposals with these ``numbers`` for each token, and choose the first accepted one."""
        # 1. Sample all proposals, and decide which are accepted.
        normals, uniforms = self.noise.proposals(tokens, numbers.start, len(numbers), p.mean.shape[1])
        q = q.for_proposals()
        p = p.for_proposals()
        proposals = p.mean + p.log_std.exp() * normals  # fp32 [N, len(numbers), channels]
        accepted = acceptance_of_proposals(proposals, q, p, self.rule.sigma_power) > uniforms

        # 2. Choose the first accepted proposal of each token.
        any_accepted = accepted.any(1)
        chosen = accepted.to(torch.uint8).argmax(1)  # argmax returns the first of several equal maxima
        token = torch.arange(len(tokens), device=proposals.device)
        value = torch.where(any_accepted[:, None], proposals[token, chosen], 0.0)
        return FirstAccepted(value, any_accepted, chosen)

    def _propose_later(self, d_some: Tensor, q: PathDensity, p: PathDensity, tokens: TokenIndex) -> FirstAccepted:
        """Make the later proposals for some of the ``tokens``: those with the indices ``d_some``, int64 [M], on the
        device. The result is for these M tokens.
        """
        image, position = tokens.index
        some_tokens = TokenIndex((image[d_some], position[d_some]))
        return self._propose(_LATER_PROPOSALS, q.at(d_some), p.at(d_some), some_tokens)


# ------------------------------------------------------------------------------------------------ mode published


class Published(Mode):
    """Draft one AR step after another, then verify all tokens of the segment at once.

    This mode follows the published code, which differs from the paper:

    - It computes another ratio r, see :data:`PUBLISHED_RULE`.
    - A token gets at most :data:`MAX_PROPOSALS` proposals. If all are rejected, all its channels become 0.
    - The target verifies a draft without the earlier drafts of the segment: it reads only the tokens before the
      segment. So an accepted draft stays even if earlier drafts of the segment are rejected.
    - The target verifies all tokens with the guidance scale of the segment's last AR step.
    """

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        self.target_noise = noise if canvas.settings.alignment else canvas.noise_of("target")
        self.rejection = Rejection(PUBLISHED_RULE, RejectionNoise(self.keys))

    @staticmethod
    def make_table(canvas: MARCanvas) -> StepTable:
        return table_with_last_std(canvas)

    def segment(self, first: int) -> Iterator[int]:
        """Draft and verify the AR steps from ``first`` up to the next multiple of gamma, or up to the last AR step of
        the run if that is earlier. Both ends are included. For example, gamma is 4, and AR step 6 is the first after
        the prefill. Then the segments are the AR steps 6 to 8, 9 to 12, 13 to 16, and so on.
        """
        gamma = self.canvas.settings.draft_length
        last = min(math.ceil(first / gamma) * gamma, self.canvas.order.steps - 1)
        ar_steps = range(first, last + 1)

        # 1. Draft one AR step after another, and let the sampler show the drafts. No draft is decided yet.
        q_of_steps = []  # for each AR step, the draft model's density of its drafts
        for step in ar_steps:
            paths = self.drafter.draft_step(step, self.noise)
            q_of_steps.append(paths.density())
            if step < last:
                yield step + 1

        # 2. Verify all drafts, and decide all tokens of the segment.
        self.verify(ar_steps, q_of_steps)
        yield last + 1

    def verify(self, ar_steps: range, q_of_steps: Sequence[PathDensity]) -> None:
        """Verify the drafts of ``ar_steps``, given the tokens before these AR steps, and decide the tokens.

        ``q_of_steps``: for each AR step, the draft model's density of its drafts. The drafts are on the canvas.
        """
        canvas = self.canvas
        order = canvas.order
        positions = order.positions_from(ar_steps[0], len(ar_steps))
        tokens = TokenIndex.all(positions)

        # 1. Sample the target's own paths for all tokens, given only the tokens before the segment. As in the published
        # code, all tokens get the guidance scale of the last AR step.
        with canvas.clock.phase("transformer"):
            z = self.transformer(ar_steps[0], positions)
        with canvas.clock.phase("head"):
            batch = canvas.batch(self.table, tokens, z, self.target_noise)
            batch = replace(batch, cfg=torch.full_like(batch.cfg, order.cfg[ar_steps[-1]]))
            target_paths = sample_paths(self.heads, batch, self.adds_last_noise)

            # 2. Accept drafts, and resample the rejected tokens.
            q = PathDensity.joined_by_image(q_of_steps, canvas.images)
            drafts = canvas.values[tokens.index]
            verified = self.rejection.verify(drafts, q, target_paths.density(), tokens)
            canvas.report.add(**verified.counts())

        accepted = verified.accepted.view(positions.shape)
        outcome = self.count_outcomes(accepted, ~accepted)

        # 3. Decide one AR step after another. In each image, the tokens of the AR steps stand side by side. A token
        # without an accepted draft or proposal has the value 0 here, as in the published code.
        sizes = [order.sizes[step] for step in ar_steps]
        values = verified.values.view(*positions.shape, -1)
        for step, step_positions, step_values, step_outcome in zip(
            ar_steps, positions.split(sizes, 1), values.split(sizes, 1), outcome.split(sizes, 1), strict=True
        ):
            canvas.decide(step_positions, step_values, step, step_outcome)

        # 4. After a rejection, discard the features that the draft model's transformer has cached: it computed some of
        # them from a rejected draft.
        if not accepted.all():
            self.drafter.discard_drafts()


# ------------------------------------------------------------------------------------------------ mode paper


class OwnTurns:
    """Says at which AR steps each image uses drafts.

    After gamma accepted AR steps in a row, the next AR step is the image's *own turn*: the image takes the target's own
    tokens. After an own turn, or after an AR step with a rejected draft, the image counts from 0 again.

    Each image counts for itself, so its tokens do not depend on its batch, see :class:`.Mode`. In this example, gamma
    is 2, and image 2 rejects its draft of AR step 5. So this image counts from AR step 6 on, and its next own turn is
    AR step 6 + 2. ``next_turn`` has the value before the AR step; "." is the same value as before::

        AR step        4          5          6          7          8
        image 1        accepts    accepts    own turn   accepts    accepts
          next_turn    6          .          .          9          .
        image 2        accepts    rejects    accepts    accepts    own turn
          next_turn    6          .          8          .          .
    """

    next_turn: Tensor  # int64 [B] on the host, the AR step of each image's next own turn

    def __init__(self, images: int, gamma: int, first: int):
        """``images``: B. ``first``: the first AR step after the prefill, where all images begin to count."""
        self.gamma = gamma
        self.next_turn = torch.full((images,), first + gamma)

    def uses_draft(self, step: int) -> Tensor:
        """The images that use their drafts of AR step ``step``, bool [B] on the host. All other images have their own
        turn.
        """
        assert step <= self.next_turn.min(), "an image has missed its own turn"
        return step < self.next_turn

    def restart(self, images: Tensor, step: int) -> None:
        """Let the ``images``, bool [B] on the host, count again from AR step ``step`` on."""
        self.next_turn[images] = step + self.gamma


class Paper(Mode):
    """Draft gamma AR steps, accept them up to the first rejected AR step, and resample the rejected tokens.

    This mode follows the paper's algorithm 1. It applies speculative decoding (Leviathan et al. 2023, algorithm 1),
    which was made for discrete tokens, to continuous tokens:

    1. The draft model samples gamma tokens, each given the tokens before it.
    2. In one pass, the target computes the distributions of these tokens and of the token after them, each given the
       drafts before it. The target samples its own paths with the draft model's noise (trajectory alignment, equation
       3).
    3. The target accepts drafts up to the first rejected draft, and resamples this one. Later drafts are discarded.
    4. If all drafts are accepted, the target samples the next token itself.

    MAR decides several tokens in an AR step. They are independent of each other, given the tokens of earlier AR steps.
    So gamma counts AR steps here, and an AR step is accepted if all its tokens are accepted. If every AR step decides
    one token, this is the paper's algorithm. With several images, a segment ends at the first AR step at which any
    image has its own turn (point 4) or rejects a draft, see :class:`OwnTurns` and :meth:`segment`.

    The paper leaves two points open. FastAR decides them at :attr:`adds_last_noise` and in :meth:`decide`.
    """

    # A draft must be a sample of the density with which it is verified. So every diffusion step adds noise, in both
    # models. In MAR, the last one adds no noise. Here it adds noise with a std of 0.006 (the latents have a std of 1).
    # In the prefill, the target samples tokens as in MAR.
    adds_last_noise = True

    def __init__(self, canvas: MARCanvas, transformer: Transformer, drafter: MARDrafter, noise: StreamNoise):
        super().__init__(canvas, transformer, drafter, noise)
        settings = canvas.settings
        self.own_turns = OwnTurns(canvas.images, settings.draft_length, settings.prefill(canvas.order.steps))
        self.rejection = Rejection(PAPER_RULE, RejectionNoise(self.keys))

    @staticmethod
    def make_table(canvas: MARCanvas) -> StepTable:
        return table_with_last_std(canvas)

    def segment(self, first: int) -> Iterator[int]:
        """Decide the AR steps from ``first`` up to and including the first AR step at which any image has its own turn
        or rejects a draft. In the example of :class:`OwnTurns`, there are three segments::

            AR step                            4      5      6      7      8
            segment                            A      A      B      C      C
            images that use their drafts       1, 2   1, 2   2      1, 2   1
        """
        # 1. Draft the AR steps up to and including the first own turn of any image. There, the other images may use
        # drafts. If it is the own turn of all images, nothing is drafted there.
        last = min(int(self.own_turns.next_turn.min()), self.canvas.order.steps - 1)
        ar_steps = range(first, last + 1)
        drafted = [step for step in ar_steps if self.own_turns.uses_draft(step).any()]
        drafts = {step: self.drafter.draft_step(step, self.noise) for step in drafted}

        for ar_steps_of_pass in self.passes(ar_steps):
            # 2. In one pass, the target samples its own tokens of these AR steps, given the drafts of earlier AR steps.
            paths_of_steps = self.target_paths(ar_steps_of_pass)

            # 3. Decide one AR step after another.
            for step, target_paths in zip(ar_steps_of_pass, paths_of_steps, strict=True):
                if step not in drafts:
                    self.decide_own_turn(step, target_paths)
                elif self.decide(step, drafts[step], target_paths):
                    # 4. If a draft is rejected, discard all later drafts, and end the segment.
                    self.drafter.discard_drafts()
                    yield step + 1
                    return

                yield step + 1

    def target_paths(self, ar_steps: range) -> list[Paths]:
        """The target's own diffusion paths for each AR step of a pass, given the drafts of earlier AR steps."""
        batch, _, sizes = self.run_target(ar_steps)
        with self.canvas.clock.phase("head"):
            paths = sample_paths(self.heads, batch, self.adds_last_noise)
        return paths.split(sizes)

    def decide_own_turn(self, step: int, target_paths: Paths) -> None:
        """Decide an AR step that is the own turn of all images: take the tokens of the target's paths."""
        positions = self.canvas.order.positions_from(step)
        self.canvas.decide(positions, target_paths.tokens.view(*positions.shape, -1), step)
        own_turn = ~self.own_turns.uses_draft(step)
        assert own_turn.all()
        self.own_turns.restart(own_turn, step + 1)

    def decide(self, step: int, draft_paths: Paths, target_paths: Paths) -> bool:
        """Decide an AR step: accept drafts or resample them, and take the target's own tokens at own turns. Returns
        whether any image rejects a draft.
        """
        canvas = self.canvas
        positions = canvas.order.positions_from(step)
        tokens = TokenIndex.all(positions)
        uses_draft = self.own_turns.uses_draft(step)
        token_uses_draft = uses_draft[:, None].expand(positions.shape)  # bool [B, n]

        with canvas.clock.phase("head"):
            # 1. Verify all drafts.
            verified = self.rejection.verify(draft_paths.tokens, draft_paths.density(), target_paths.density(), tokens)

            # 2. Take the target's own tokens at own turns, and where all proposals were rejected. The paper makes
            # proposals until one is accepted. But if Sigma < 1, then Sigma p may be nowhere above q, so that no
            # proposal is ever accepted. The report counts a token without an accepted proposal as
            # ``redraws_exhausted``.
            d_keeps_value = to_device(token_uses_draft.flatten() & verified.has_value, canvas.device)
            values = torch.where(d_keeps_value[:, None], verified.values, target_paths.tokens)

        # 3. Count the drafts that are used.
        is_accepted = verified.accepted.view(positions.shape)
        accepted = is_accepted & token_uses_draft
        rejected = ~is_accepted & token_uses_draft
        outcome = self.count_outcomes(accepted, rejected)
        canvas.report.add(**verified.counts(token_uses_draft.flatten()))

        # 4. Decide the tokens. Images without an own turn or a rejection continue their count.
        canvas.decide(positions, values.view(*positions.shape, -1), step, outcome)
        rejects = rejected.any(1)
        self.own_turns.restart(~uses_draft | rejects, step + 1)
        return bool(rejects.any())
