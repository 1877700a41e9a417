"""CSpD's acceptance and rejection of tokens, shared by its modes ``paper`` and ``published``.

Source: Wang et al. 2024 (arXiv 2411.11925), sections 3.2 and 3.3. p is the target, q the draft, x a token. Each model
follows its own diffusion path. The density of x is the last diffusion step's, N(mean, std) in every channel; Sigma
(equation 4) is the product of sigma_q / sigma_p over all other diffusion steps and all channels.

1. A draft x is accepted with probability min(1, r(x)), where r = Sigma p(x) / q(x) (equation 5).
2. A rejected draft is replaced by a sample of max(0, Sigma p - q), normalised (equation 6): tokens are sampled from p
   until one is accepted, each with probability max(0, 1 - 1 / r(x)) (equations 10 and 11). Here they are called
   proposals; the report counts them as ``redraws``.

Where Sigma = 1 the result is a sample of p. A :class:`Rule` says what r is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....networks.torch_state import to_device
from ...noise import CounterRNG
from ..canvas import Tokens

# Most proposals for a rejected token. The first 10 are computed for every token, further ones only where needed.
TRIES = 100
_FIRST_TRIES = 10
# The number of the accepted proposal counts from 1; this value means that none was accepted.
_NONE = 0
# Lanes of a token's random numbers, after the lanes of its diffusion steps (speculation.py).
_ACCEPTANCE, _NORMAL, _UNIFORM = range(1 << 20, (1 << 20) + 3)


class Rule(NamedTuple):
    """How the ratio r is computed."""

    power: int  # of Sigma
    inner_temperature: float  # factor of the stds of both densities when a draft is verified; proposals have none


# Equations 5 and 11, derived again from the paper's text.
DERIVED = Rule(power=1, inner_temperature=1.0)


class RejectionNoise:
    """Random numbers for verifying tokens, from keys, int64 [B, L]. A test injects recorded numbers."""

    def __init__(self, keys: Tensor):
        self.keys = keys

    def acceptance(self, tokens: Tokens) -> Tensor:
        """Uniform numbers, fp32 [N], with which the drafts' ratios are compared."""
        return CounterRNG(self.keys[tokens.index]).uniform(_ACCEPTANCE)[:, 0]

    def proposals(self, tokens: Tokens, first: int, count: int, channels: int) -> tuple[Tensor, Tensor]:
        """Proposals from number ``first`` on: standard normal numbers, fp32 [N, count, channels], and uniform numbers,
        fp32 [N, count].
        """
        rng = CounterRNG(self.keys[tokens.index])
        return rng.normal(_NORMAL, first, count, channels), rng.uniform(_UNIFORM, first, count)


class LastStep(NamedTuple):
    """The part of a diffusion path that its density needs, fp32 [..., channels] each."""

    mean: Tensor  # of the last step
    log_std: Tensor
    other_log_stds: Tensor  # sum of the log stds of all other steps

    def rows(self, *index: Any) -> LastStep:
        """The parts at an index."""
        return LastStep(self.mean[index], self.log_std[index], self.other_log_stds[index])


def image_by_image(of_steps: Sequence[LastStep], images: int) -> LastStep:
    """Join the tokens of several AR steps. The result has one image after another, and for each image the tokens of all
    these AR steps.
    """
    parts = []
    for part in zip(*of_steps, strict=True):
        of_images = [x.unflatten(0, (images, -1)) for x in part]
        parts.append(torch.cat(of_images, 1).flatten(0, 1))
    return LastStep(*parts)


def log_ratio(token: Tensor, q: LastStep, p: LastStep, rule: Rule) -> Tensor:
    """log r of tokens [..., channels], fp32 [...]."""

    def exponent(last: LastStep) -> Tensor:
        z = (token - last.mean) * torch.exp(-last.log_std) / rule.inner_temperature
        return -0.5 * (z**2).sum(-1)

    log_sigma = q.other_log_stds - p.other_log_stds
    return (rule.power * log_sigma + q.log_std - p.log_std).sum(-1) + exponent(p) - exponent(q)


def acceptance_of_proposals(token: Tensor, q: LastStep, p: LastStep, rule: Rule) -> Tensor:
    """Probability fp32 [...] that a proposal [..., channels] is accepted: max(0, 1 - 1 / r), with the stds as they
    are.
    """
    log_r = log_ratio(token, q, p, rule._replace(inner_temperature=1.0))
    return (1 - torch.exp(-log_r)).clamp(min=0)


class Resampled(NamedTuple):
    """N drafts after their verification. The tokens are on the device, the other fields on the host."""

    # The accepted drafts and proposals, fp32 [N, channels]; zero where the draft and all proposals were rejected.
    tokens: Tensor
    accepted: Tensor  # bool [N], whether the draft was
    proposals: Tensor  # int64 [N], proposals for a rejected draft, the accepted one included; 0 for an accepted draft
    found: Tensor  # bool [N], False where the draft and all proposals were rejected

    def counts(self, rows: Tensor | slice = slice(None)) -> dict[str, int]:
        """Counts of the report, of some rows: bool [N] or all."""
        return {"redraws": int(self.proposals[rows].sum()), "redraws_exhausted": int((~self.found[rows]).sum())}


def accept_or_resample(
    drafts: Tensor, q: LastStep, p: LastStep, rule: Rule, noise: RejectionNoise, tokens: Tokens
) -> Resampled:
    """Verify the drafts of N tokens, fp32 [N, channels], and resample the rejected ones.

    The host reads from the device once, or twice if a rejected token accepts none of the first proposals.
    """
    # 1. Accept with probability min(1, r).
    accepted = log_ratio(drafts, q, p, rule) > noise.acceptance(tokens).log()

    # 2. The first proposals, for all tokens.
    proposal, number = try_proposals(noise, tokens, q, p, rule, 0, _FIRST_TRIES)
    values = torch.where(accepted[:, None], drafts, proposal)

    # 3. The other proposals, for rejected tokens whose proposals so far were all rejected.
    rejected, number = torch.stack([(~accepted).to(number.dtype), number]).cpu()
    rejected = rejected.bool()
    missing = (rejected & (number == _NONE)).nonzero()[:, 0]
    if len(missing):
        i = to_device(missing, drafts.device)
        more = TRIES - _FIRST_TRIES
        image, position = tokens.index
        some = Tokens((image[i], position[i]))
        values[i], later = try_proposals(noise, some, q.rows(i), p.rows(i), rule, _FIRST_TRIES, more)
        number[missing] = later.cpu()

    exhausted = rejected & (number == _NONE)
    proposals = number.masked_fill(exhausted, TRIES).masked_fill(~rejected, 0)
    return Resampled(values, ~rejected, proposals, found=~exhausted)


def try_proposals(
    noise: RejectionNoise, tokens: Tokens, q: LastStep, p: LastStep, rule: Rule, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Try proposals ``first .. first + count - 1`` from p's kernel for N tokens.

    Returns the first proposal that each token accepts, fp32 [N, channels], and its number from 1, int64 [N]; zeros and
    _NONE for a token that accepts none.
    """
    normals, uniforms = noise.proposals(tokens, first, count, p.mean.shape[1])
    q = q.rows(slice(None), None)
    p = p.rows(slice(None), None)
    proposals = p.mean + p.log_std.exp() * normals
    accepted = acceptance_of_proposals(proposals, q, p, rule) > uniforms

    found = accepted.any(1)
    chosen = accepted.to(torch.uint8).argmax(1)
    row = torch.arange(len(tokens), device=proposals.device)
    value = torch.where(found[:, None], proposals[row, chosen], 0.0)
    return value, torch.where(found, first + 1 + chosen, _NONE)
