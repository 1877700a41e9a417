"""Couplings of Gaussians: turn a draft into a sample of another Gaussian, changing it as rarely as possible.

The input is a draft y ~ N(m_q, s_q^2), the output x ~ N(m_p, s_p^2), exactly, for any draft; "accepted" means x = y.
Covariances are diagonal and rows independent. A row is accepted over all channels together, because a drafted diffusion
state is usable only as a whole; channel-wise acceptance probabilities would multiply.

- :func:`reflect`, equal covariances: reflection-maximal coupling (De Bortoli, Galashov, Gretton & Doucet 2025, arXiv
  2501.05370; Bou-Rabee, Eberle & Zimmer 2020). Accepts with probability 2 Phi(-|D| / 2) = 1 - TV, the most
  that any coupling can, and needs no second draw: a rejected draft's noise is mirrored.
- :func:`reshape`, equal means: the usual speculative rejection min(1, p / q); a rejected draft is replaced by a sample
  of max(0, p - q) / Z, found by drawing from p (Leviathan et al. 2023, appendix A). Also maximal.
- :func:`couple`, the general case: reshape, then reflect. MAR's learned variances hardly differ between a draft and the
  target, so the first rarely changes the draft, and the second keeps its noise, which keeps images of one seed alike.
- :func:`couple_fixed`, for BitDance, whose variances are fixed: reflect alone.

Means that differ by at most :data:`ROUNDING` (1 + |mean|) in every channel, with log stds within :data:`ROUNDING`,
count as equal: fp32 evaluations of one head in two batches differ by as much. On the demo (50 diffusion steps from
t = 950, temperature 0.8, 8 channels) the smallest std of a step with noise is 0.0051, so the total-variation error
is at most 0.0044 in the worst step, 0.00012 in the median step and 0.013 per token, at |mean| = 1 in all channels. With
the demo's draft model the limit applied in none of 12,032 verified steps.

All randomness is passed in, so nothing here waits for the device. A std of 0 means no noise, as in the last step;
a draft is then accepted only if it equals the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-5


class Gaussian(NamedTuple):
    """Mean and log standard deviation, fp32 [..., channels]; minus infinity is no noise."""

    mean: Tensor
    log_std: Tensor

    def rows(self, *index: Tensor) -> Gaussian:
        """The distributions at an index."""
        return Gaussian(self.mean[index], self.log_std[index])

    def flat(self) -> Gaussian:
        """The same with all dimensions but the first in one."""
        return Gaussian(self.mean.flatten(1), self.log_std.flatten(1))


class Proposals(NamedTuple):
    """Random numbers of the first T proposals for N rows: samples of p, of which one replaces a rejected draft."""

    normals: Tensor  # standard normal, fp32 [N, T, channels]
    uniforms: Tensor  # in (0, 1], fp32 [N, T], which decide whether a proposal is accepted


class Coupled(NamedTuple):
    """Samples of the target."""

    value: Tensor  # fp32 [N, channels]
    accepted: Tensor  # bool [N], whether the row is its draft
    # bool [N], whether the value is a sample of the target. It is not if the draft and all proposals are rejected: then
    # the value is the last proposal, or the draft if there are no proposals.
    is_sample: Tensor


def same(a: Gaussian, b: Gaussian) -> Tensor:
    """Whether two Gaussians are equal up to fp32 rounding in every channel, bool [...]."""
    mean = (a.mean - b.mean).abs() <= ROUNDING * (1 + b.mean.abs())
    std = torch.isclose(a.log_std, b.log_std, rtol=0, atol=ROUNDING)  # two without noise, minus infinity, are equal
    return (mean & std).all(-1)


def noiseless(q: Gaussian, p: Gaussian) -> Tensor:
    """bool [...]: either of them has no noise in some channel."""
    return (torch.isneginf(q.log_std) | torch.isneginf(p.log_std)).any(-1)


def _shape_ratio(z: Tensor, log_std_gap: Tensor) -> Tensor:
    """log N(0, s_p^2) - log N(0, s_q^2) [...] at s_q z; ``log_std_gap`` [..., channels] is log s_q - log s_p."""
    return (log_std_gap - 0.5 * z * z * torch.expm1(2 * log_std_gap)).sum(-1)


def _shift_ratio(z: Tensor, shift: Tensor) -> Tensor:
    """log N(0, I) at z + shift, less the same at z [...]."""
    return -(z * shift).sum(-1) - 0.5 * (shift * shift).sum(-1)


def reshape(
    draft: Tensor, q: Gaussian, log_std: Tensor, uniform: Tensor, proposals: Proposals | None = None
) -> Coupled:
    """From N(m, s_q^2) to N(m, s_p^2), means equal: accept with min(1, p / q), else sample max(0, p - q) / Z.

    A proposal from p is accepted with probability 1 - min(1, q / p): one proposal per draft on average for any p and q,
    because drafts are rarely rejected where proposals are rarely accepted. More than T are needed with a probability
    below 1 / T. ``log_std`` is the target's.
    """
    # 1. Accept the draft.
    z = (draft - q.mean) * torch.exp(-q.log_std)
    log_std_gap = q.log_std - log_std
    accepted = uniform.log() <= _shape_ratio(z, log_std_gap)
    if proposals is None:
        return Coupled(draft, accepted, accepted)

    # 2. Accept proposals: log q / p is the shape ratio with p and q exchanged. NaN is accepted and stays visible.
    suits = ~(proposals.uniforms.log() <= _shape_ratio(proposals.normals, -log_std_gap[:, None]))
    found = suits.any(1)

    # 3. The first accepted one replaces a rejected draft.
    first = torch.where(found, suits.to(torch.uint8).argmax(1), suits.shape[1] - 1)
    row = torch.arange(len(draft), device=draft.device)
    resampled = q.mean + log_std.exp() * proposals.normals[row, first]
    return Coupled(torch.where(accepted[:, None], draft, resampled), accepted, accepted | found)


def reflect(draft: Tensor, mean: Tensor, p: Gaussian, uniform: Tensor) -> Coupled:
    """From N(mean, s^2) to N(m_p, s^2), stds equal and not 0: reflection-maximal coupling.

    With z the draft's noise, D = (mean - m_p) / s and e = D / |D|: accept with min(1, exp(-z.D - |D|^2 / 2)), else
    m_p + s (z - 2 (e.z) e). ``draft`` fp32 [N, channels] is a sample of N(mean, s^2), ``uniform`` fp32 [N] in (0, 1].
    """
    # 1. Accept the draft.
    std = p.log_std.exp()
    z = (draft - mean) / std
    shift = (mean - p.mean) / std
    accepted = uniform.log() <= _shift_ratio(z, shift)

    # 2. Else mirror its noise.
    e = shift / shift.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(shift.dtype).tiny)
    mirrored = p.mean + std * (z - 2 * (e * z).sum(-1, keepdim=True) * e)
    return Coupled(torch.where(accepted[:, None], draft, mirrored), accepted, torch.ones_like(accepted))


def couple(draft: Tensor, q: Gaussian, p: Gaussian, uniforms: Tensor, proposals: Proposals | None = None) -> Coupled:
    """Samples of p: :func:`reshape`, then :func:`reflect`.

    Where either has no noise in some channel, the sample is the mean of p, which is accepted if q is the same.

    Args:
        draft: fp32 [N, channels], a sample of q.
        uniforms: in (0, 1], fp32 [N, 2], one for each of the two.
        proposals: for rows that the first of the two rejects; None for none. More of them, with the same first ones,
            change only the rows that are no samples yet.
    """
    reshaped = reshape(draft, q, p.log_std, uniforms[:, 0], proposals)
    reflected = reflect(reshaped.value, q.mean, p, uniforms[:, 1])
    accepted = reshaped.accepted & reflected.accepted

    # Without noise the sample is the mean.
    without_noise = noiseless(q, p)
    value = torch.where(without_noise[:, None], p.mean, reflected.value)

    # A draft from an equal distribution is a sample of p already.
    is_equal = same(q, p)
    value = torch.where(is_equal[:, None], draft, value)
    return Coupled(value, is_equal | (~without_noise & accepted), is_equal | without_noise | reshaped.is_sample)


def couple_fixed(draft: Tensor, q: Gaussian, p: Gaussian, uniforms: Tensor) -> Coupled:
    """:func:`couple` of Gaussians with equal stds, none of them 0; ``uniforms`` fp32 [N, 1]."""
    return reflect(draft, q.mean, p, uniforms[:, 0])
