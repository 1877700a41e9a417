"""Couplings of Gaussians: turn a draft into a sample of a different Gaussian, but change the draft as rarely as
possible.

The input is a draft y, sampled from q = N(m_q, s_q^2). For any q, the output x is exactly a sample of the target,
p = N(m_p, s_p^2). "Accepted" means x = y. Covariances are diagonal, and rows are independent. All channels of a row are
accepted or rejected together, because a drafted diffusion state is usable only as a whole. If each channel were
accepted or rejected by itself, the channels' probabilities would multiply, so a whole state would rarely be accepted.

- :func:`couple_means`, for equal covariances: reflection-maximal coupling (De Bortoli, Galashov, Gretton & Doucet 2025,
  arXiv 2501.05370; Bou-Rabee, Eberle & Zimmer 2020). It mirrors the noise of a rejected draft.
- :func:`couple_stds`, for equal means: the usual rejection of speculative decoding (Leviathan et al. 2023, appendix A).
- :func:`couple`, for the general case, MAR's learned variances: couple_stds, then couple_means.
- :func:`couple_fixed`, for BitDance and NextStep, whose variances are fixed: couple_means alone.

TV is the total variation distance between q and p. No coupling can accept more often than with probability 1 - TV.
couple_means and couple_stds reach this probability. A std of 0 means no noise, as in the last step of most diffusions.
The caller computes all random numbers, so no function here waits for the device.

Shapes: N rows of ``channels`` numbers. A row is a diffusion step of a token or of a block, flattened.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Two Gaussians count as equal if, in every channel, their means differ by at most ROUNDING (1 + |m_p|) and their log
# stds by at most ROUNDING. The tolerance is needed, because the fp32 outputs of one head in two different batches
# differ by about as much. The tolerance causes an error in the samples' distribution. For example, the demo model
# with temperature 0.8, 8 channels and 50 diffusion steps from t = 950 has a std of at least 0.0051 in every step with
# noise. If |m_p| = 1 in all channels, the error in total variation is at most 0.0044 in the worst step, 0.00012 in
# the median step, and 0.013 over all steps of a token. In 12,032 verified steps with the demo's draft model, q and p
# were never close enough to count as equal, so the tolerance caused no error.
ROUNDING = 1e-5


class Gaussian(NamedTuple):
    """Mean and log standard deviation, fp32 [..., channels] each; a log std of minus infinity means no noise."""

    mean: Tensor
    log_std: Tensor

    def at(self, *index: Tensor) -> Gaussian:
        """The distributions with the indices ``index``, one tensor for each dimension."""
        return Gaussian(self.mean[index], self.log_std[index])

    def flat(self) -> Gaussian:
        """The same distributions, with all dimensions after the first merged into one."""
        return Gaussian(self.mean.flatten(1), self.log_std.flatten(1))


class Proposals(NamedTuple):
    """Random numbers for T proposals in each of N rows. A proposal is a sample of p. If the draft of a row is rejected,
    the first accepted proposal replaces it.
    """

    normals: Tensor  # standard normal, fp32 [N, T, channels]
    uniforms: Tensor  # in (0, 1], fp32 [N, T]; each decides whether one proposal is accepted


class Coupled(NamedTuple):
    """The outputs of a coupling for N rows."""

    value: Tensor  # fp32 [N, channels]
    accepted: Tensor  # bool [N], whether the value is the draft
    # bool [N], whether the value is a sample of the target. False if couple_stds rejects the draft and all proposals;
    # then the value comes from the last proposal, or if there are no proposals, from the draft.
    is_sample: Tensor


def count_as_equal(q: Gaussian, p: Gaussian) -> Tensor:
    """Whether two Gaussians are equal up to fp32 rounding in every channel, bool [...]. See :data:`ROUNDING`."""
    equal_means = (q.mean - p.mean).abs() <= ROUNDING * (1 + p.mean.abs())
    # Two log stds of minus infinity are close, too.
    equal_stds = torch.isclose(q.log_std, p.log_std, rtol=0, atol=ROUNDING)
    return (equal_means & equal_stds).all(-1)


def noiseless(q: Gaussian, p: Gaussian) -> Tensor:
    """Whether q or p has no noise in some channel, bool [...]."""
    return (torch.isneginf(q.log_std) | torch.isneginf(p.log_std)).any(-1)


def _shape_ratio(z: Tensor, log_std_gap: Tensor) -> Tensor:
    """The log density of N(0, s_p^2) minus the log density of N(0, s_q^2), both at s_q z, fp32 [...].

    ``log_std_gap``: log s_q - log s_p, fp32 [..., channels].
    """
    return (log_std_gap - 0.5 * z * z * torch.expm1(2 * log_std_gap)).sum(-1)


def _shift_ratio(z: Tensor, shift: Tensor) -> Tensor:
    """The log density of N(0, I) at z + shift minus the log density at z, fp32 [...]."""
    return -(z * shift).sum(-1) - 0.5 * (shift * shift).sum(-1)


def couple_stds(
    draft: Tensor, q: Gaussian, log_std: Tensor, uniform: Tensor, proposals: Proposals | None = None
) -> Coupled:
    """Turn a draft, a sample of q = N(m, s_q^2), into a sample of p = N(m, s_p^2), with the same mean m. Accept the
    draft with probability min(1, p / q). Otherwise sample from max(0, p - q) / Z, where Z normalises the density. To
    find this sample, accept or reject proposals from p. ``log_std``: log s_p.

    A proposal from p is accepted with probability 1 - min(1, q / p). A draft is rejected with probability TV. If TV is
    above 0, a rejected draft needs 1 / TV proposals on average, but an accepted draft needs none. So the average over
    all drafts is at most one proposal per draft, for any p and q. The probability that a draft needs more than T
    proposals is below 1 / T.
    """
    # 1. Decide whether the draft is accepted.
    z = (draft - q.mean) * torch.exp(-q.log_std)
    log_std_gap = q.log_std - log_std
    accepted = uniform.log() <= _shape_ratio(z, log_std_gap)
    if proposals is None:
        return Coupled(draft, accepted, accepted)

    # 2. Decide which proposals are accepted: log q / p is the shape ratio with p and q exchanged. Every comparison with
    # NaN is False, so the negation accepts a proposal with NaN, and the NaN stays visible.
    proposal_accepted = ~(proposals.uniforms.log() <= _shape_ratio(proposals.normals, -log_std_gap[:, None]))
    any_accepted = proposal_accepted.any(1)

    # 3. The first accepted proposal replaces a rejected draft.
    chosen = torch.where(any_accepted, proposal_accepted.to(torch.uint8).argmax(1), proposal_accepted.shape[1] - 1)
    row = torch.arange(len(draft), device=draft.device)
    resampled = q.mean + log_std.exp() * proposals.normals[row, chosen]
    return Coupled(torch.where(accepted[:, None], draft, resampled), accepted, accepted | any_accepted)


def couple_means(draft: Tensor, mean: Tensor, p: Gaussian, uniform: Tensor) -> Coupled:
    """Turn a sample of N(mean, s^2) into a sample of p = N(m_p, s^2) by reflection-maximal coupling. Both Gaussians
    have the same std s, which is above 0.

    Let z be the draft's noise, D = (mean - m_p) / s and e = D / |D|. The draft is accepted with probability
    min(1, exp(-z.D - |D|^2 / 2)). On average, this is 2 Phi(-|D| / 2) = 1 - TV, where Phi is the standard normal
    distribution function. A rejected draft is replaced by m_p + s (z - 2 (e.z) e), which needs no new random numbers.

    Args:
        draft: fp32 [N, channels], a sample of N(mean, s^2).
        uniform: fp32 [N] in (0, 1].
    """
    # 1. Decide whether the draft is accepted.
    std = p.log_std.exp()
    z = (draft - mean) / std
    shift = (mean - p.mean) / std
    accepted = uniform.log() <= _shift_ratio(z, shift)

    # 2. Mirror the noise of rejected drafts. If the means are equal, D is 0; the draft is then accepted, and the clamp
    # only avoids NaN.
    e = shift / shift.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(shift.dtype).tiny)
    mirrored = p.mean + std * (z - 2 * (e * z).sum(-1, keepdim=True) * e)
    return Coupled(torch.where(accepted[:, None], draft, mirrored), accepted, torch.ones_like(accepted))


def couple(draft: Tensor, q: Gaussian, p: Gaussian, uniforms: Tensor, proposals: Proposals | None = None) -> Coupled:
    """Turn samples of q into samples of p: :func:`couple_stds`, then :func:`couple_means`.

    MAR's learned variances hardly differ between a draft and the target, so couple_stds rarely changes the draft. Then
    couple_means keeps or mirrors the draft's noise. So an image with drafts and an image of the same seed without
    drafts are similar to each other.

    The first of these cases that applies decides:

    1. If q and p count as equal, the draft is accepted.
    2. If q or p has no noise in some channel, the result is the mean of p, and the draft counts as rejected.
    3. Otherwise, the two couplings decide.

    The code computes every case for all rows. It starts with case 3, so that case 2 or 1 can replace the result.

    Args:
        draft: fp32 [N, channels], a sample of q.
        uniforms: in (0, 1], fp32 [N, 2]: one for ``couple_stds`` and one for ``couple_means``.
        proposals: for the drafts that ``couple_stds`` rejects; None for no proposals. A caller can repeat the call with
            these proposals followed by more proposals. The second call then gives new values only to the rows whose
            value was not yet a sample of p.
    """
    # Case 3.
    first = couple_stds(draft, q, p.log_std, uniforms[:, 0], proposals)
    second = couple_means(first.value, q.mean, p, uniforms[:, 1])
    accepted = first.accepted & second.accepted

    # Case 2 replaces case 3: without noise, the sample is the mean.
    without_noise = noiseless(q, p)
    value = torch.where(without_noise[:, None], p.mean, second.value)

    # Case 1 replaces both: a draft from an equal distribution is a sample of p already.
    is_equal = count_as_equal(q, p)
    value = torch.where(is_equal[:, None], draft, value)

    accepted = is_equal | (~without_noise & accepted)
    is_sample = is_equal | without_noise | first.is_sample
    return Coupled(value, accepted, is_sample)


def couple_fixed(draft: Tensor, q: Gaussian, p: Gaussian, uniforms: Tensor) -> Coupled:
    """:func:`couple` for Gaussians with the same std.

    In a row with a std of 0, couple_means divides by 0. Then ``value`` and ``accepted`` mean nothing, and ``is_sample``
    is True as in every row. Speculation computes such rows, but does not use these two outputs: the step is not
    verified, and the state after it is the mean (:class:`.StepEquations`).

    ``uniforms``: in (0, 1], fp32 [N, 1].
    """
    return couple_means(draft, q.mean, p, uniforms[:, 0])
