"""How CSpD accepts, rejects and resamples tokens in its modes ``paper`` and ``published``.

Source: Wang et al. 2024 (arXiv 2411.11925), sections 3.2 and 3.3. p(x) is the density of a token x under the target,
and q(x) is its density under the draft model. Each model samples a token on a diffusion *path*: the states from noise
to the token. The model's density is the Gaussian of its path's last diffusion step, with a mean and a std for every
channel. Sigma (equation 4) is a product of ratios sigma_q / sigma_p, in which sigma_q is the draft model's std and
sigma_p is the target's. Sigma has such a factor for each channel of each diffusion step except the last.

1. A draft x is accepted with probability min(1, r(x)), where r(x) = Sigma p(x) / q(x) (equation 5).
2. A sample of max(0, Sigma p - q), normalised, replaces a rejected draft (equation 6). To get this sample, CSpD samples
   *proposals* x from p. It accepts each with probability max(0, 1 - 1 / r(x)) and stops at the first accepted one
   (equations 10 and 11). The report counts the proposals as ``redraws``.

If Sigma = 1, the result is a sample of p. The published code computes r differently from the paper, so each of the two
modes has its own :class:`Rule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...noise import CounterRNG
from ..canvas import TokenIndex

# Largest number of proposals for a rejected token. The first 10 proposals are computed for every token, the later ones
# only for rejected tokens that need them.
TRIES = 100
_FIRST_TRIES = range(1, 11)
_LATER_TRIES = range(11, TRIES + 1)
# A token's proposals are numbered from 1. This number means that none of the proposals so far was accepted.
_NONE_ACCEPTED = 0
# Lanes of a token's random numbers: independent sequences, see noise.py. The lanes below 1 << 20 belong to the token's
# diffusion steps (speculation.py).
_ACCEPTANCE, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)


class Rule(NamedTuple):
    """How a mode computes the ratio r."""

    sigma_power: int  # exponent of Sigma in every r
    draft_std_factor: float  # factor for the stds of p and q in the r of a draft; in the r of a proposal, it is 1


# Equations 5 and 11 as we derived them from the paper's text (paper.py).
PAPER_RULE = Rule(sigma_power=1, draft_std_factor=1.0)


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


class LastStep(NamedTuple):
    """What the ratio r needs from one model's diffusion paths, fp32 [..., channels] each."""

    mean: Tensor  # mean of the last diffusion step
    log_std: Tensor  # log std of the last diffusion step
    other_log_stds: Tensor  # sum of the log stds of all other diffusion steps

    def rows(self, index: Tensor) -> LastStep:
        """The tokens at ``index``, int64 [N]."""
        return LastStep(*(field[index] for field in self))

    def for_proposals(self) -> LastStep:
        """The same N tokens, with an additional axis for the proposals of each token: fp32 [N, 1, channels]."""
        return LastStep(*(field[:, None] for field in self))


def joined_by_image(parts_of_steps: Sequence[LastStep], images: int) -> LastStep:
    """Join the tokens of several AR steps. The result has one image after another, each with its tokens of all these
    AR steps.
    """
    joined = []
    for field_of_steps in zip(*parts_of_steps, strict=True):  # for each field of LastStep, the tensors of all AR steps
        by_image = [x.unflatten(0, (images, -1)) for x in field_of_steps]
        joined.append(torch.cat(by_image, 1).flatten(0, 1))
    return LastStep(*joined)


def log_ratio(token: Tensor, q: LastStep, p: LastStep, sigma_power: int, std_factor: float) -> Tensor:
    """log r of each draft or proposal, fp32 [...].

    Args:
        token: fp32 [..., channels].
        sigma_power: exponent of Sigma in r.
        std_factor: factor for the stds of p and q.
    """

    def exponent(last: LastStep) -> Tensor:
        z = (token - last.mean) * torch.exp(-last.log_std) / std_factor
        return -0.5 * (z**2).sum(-1)

    log_sigma = q.other_log_stds - p.other_log_stds
    return (sigma_power * log_sigma + q.log_std - p.log_std).sum(-1) + exponent(p) - exponent(q)


def acceptance_of_proposals(proposals: Tensor, q: LastStep, p: LastStep, sigma_power: int) -> Tensor:
    """The probability with which each of the ``proposals``, fp32 [..., channels], is accepted: max(0, 1 - 1 / r), fp32
    [...]. ``sigma_power``: exponent of Sigma in r.
    """
    log_r = log_ratio(proposals, q, p, sigma_power, std_factor=1.0)
    return (1 - torch.exp(-log_r)).clamp(min=0)


class VerifiedTokens(NamedTuple):
    """N tokens whose drafts have been verified. ``values`` is on the device, all other fields are on the host."""

    # For each token, the accepted draft or proposal, fp32 [N, channels]; zeros if the draft and all proposals were
    # rejected.
    values: Tensor
    accepted: Tensor  # bool [N], whether the draft was accepted
    proposals: Tensor  # int64 [N], number of proposals up to the accepted one; 0 if the draft was accepted
    has_value: Tensor  # bool [N], False if the draft and all proposals were rejected

    def counts(self, rows: Tensor | slice = slice(None)) -> dict[str, int]:
        """Counts for the report, over the tokens for which ``rows``, bool [N], is True; by default, over all tokens."""
        return {"redraws": int(self.proposals[rows].sum()), "redraws_exhausted": int((~self.has_value[rows]).sum())}


def accept_or_resample(
    drafts: Tensor, q: LastStep, p: LastStep, rule: Rule, noise: RejectionNoise, tokens: TokenIndex
) -> VerifiedTokens:
    """Verify the ``drafts`` of N tokens, fp32 [N, channels], and resample the rejected tokens.

    The host waits for the device once, or twice if a rejected token needs more than the first proposals.

    Args:
        q, p: the last diffusion steps of the draft model (q) and of the target (p), see :class:`LastStep`.
        rule: the acceptance rule of the mode.
        noise: the random numbers of acceptances and proposals.
        tokens: images and positions of the N tokens, which determine their random numbers.
    """
    # 1. Accept drafts with probability min(1, r). A tensor with d_ in front of its name is on the device; the tensor
    # with the same name without d_ is its copy on the host.
    log_r = log_ratio(drafts, q, p, rule.sigma_power, rule.draft_std_factor)
    d_accepted = log_r > noise.acceptance(tokens).log()

    # 2. The first proposals, for all tokens.
    proposal, d_numbers = try_proposals(_FIRST_TRIES, q, p, rule.sigma_power, noise, tokens)
    values = torch.where(d_accepted[:, None], drafts, proposal)

    # 3. Copy which drafts were accepted, and the numbers of the accepted proposals, to the host in one transfer.
    accepted_as_int, numbers = torch.stack([d_accepted.to(d_numbers.dtype), d_numbers]).cpu()
    accepted = accepted_as_int.bool()

    # 4. More proposals, for the tokens that have no value yet.
    missing = (~accepted & (numbers == _NONE_ACCEPTED)).nonzero()[:, 0]
    if len(missing):
        d_missing = to_device(missing, drafts.device)
        image, position = tokens.index
        some = TokenIndex((image[d_missing], position[d_missing]))
        some_q, some_p = q.rows(d_missing), p.rows(d_missing)
        later_proposal, d_later_numbers = try_proposals(_LATER_TRIES, some_q, some_p, rule.sigma_power, noise, some)
        values[d_missing] = later_proposal
        numbers[missing] = d_later_numbers.cpu()

    # 5. Count the proposals of each token. A token that still has no value made all TRIES.
    has_value = accepted | (numbers != _NONE_ACCEPTED)
    proposals = torch.where(has_value, numbers, TRIES)
    proposals[accepted] = 0
    return VerifiedTokens(values, accepted, proposals, has_value)


def try_proposals(
    numbers: range, q: LastStep, p: LastStep, sigma_power: int, noise: RejectionNoise, tokens: TokenIndex
) -> tuple[Tensor, Tensor]:
    """Try the proposals with these ``numbers``, which count from 1, for each of N tokens. ``sigma_power``: exponent of
    Sigma in r.

    Returns:
        The first accepted proposal for each token, fp32 [N, channels], and the number of this proposal, int64 [N]. A
        token without an accepted proposal has zeros, and the number _NONE_ACCEPTED.
    """
    normals, uniforms = noise.proposals(tokens, numbers.start - 1, len(numbers), p.mean.shape[1])
    q = q.for_proposals()
    p = p.for_proposals()
    proposals = p.mean + p.log_std.exp() * normals
    accepted = acceptance_of_proposals(proposals, q, p, sigma_power) > uniforms

    has_accepted = accepted.any(1)
    chosen = accepted.to(torch.uint8).argmax(1)
    row = torch.arange(len(tokens), device=proposals.device)
    value = torch.where(has_accepted[:, None], proposals[row, chosen], 0.0)
    return value, torch.where(has_accepted, numbers.start + chosen, _NONE_ACCEPTED)
