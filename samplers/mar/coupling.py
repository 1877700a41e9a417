"""Couplings of Gaussians: turn a draft into a sample of another Gaussian, changing it as rarely as possible.

The input is a draft y ~ N(m_q, s_q^2), the output x ~ N(m_p, s_p^2), exactly, for any draft; "accepted" means x = y.
Covariances are diagonal and rows independent. A row is accepted over all channels together, because a drafted diffusion
state is usable only as a whole; channel-wise acceptance probabilities would multiply.

- :func:`reflect`, equal covariances: reflection-maximal coupling (De Bortoli, Galashov, Gretton & Doucet 2025, arXiv
  2501.05370; Bou-Rabee, Eberle & Zimmer 2020). Accepts with probability 2 Phi(-|D| / 2) = 1 - TV, the most
  that any coupling can, and needs no second draw: a rejected draft's noise is mirrored.
- :func:`reshape`, equal means: the usual speculative rejection min(1, p / q); a rejected draft is replaced by a sample of
  max(0, p - q) / Z, found by drawing from p (Leviathan et al. 2023, appendix A). Also maximal.
- :func:`couple`, the general case: reshape, then reflect. MAR's learned variances hardly differ between a draft and the target, so
  the first rarely changes the draft, and the second keeps its noise, which keeps pictures of one seed alike.

Means that differ by at most :data:`ROUNDING` (1 + |mean|) in every channel, with log stds within :data:`ROUNDING`, count as equal: fp32
evaluations of one head in two batches differ by as much. On the demo (50 diffusion steps from t = 950, temperature 0.8, 8 channels) the
smallest std of a step with noise is 0.0051, so that the total-variation error is at most 0.0044 in the worst step, 0.00012 in the median
step and 0.013 per token, at |mean| = 1 in all channels. With the demo's draft model the limit applied in none of 12,032 judged steps.

All randomness is passed in. A std of 0 means no noise, as in the last step; a draft is then accepted only if it equals the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-5
# Redraws after which a replacement is taken unconditionally; the probability of needing as many is below 1 / MOST_DRAWS.
MOST_DRAWS = 1 << 18
_BLOCK = 1 << 21  # numbers drawn at once


class Coupled(NamedTuple):
    """Samples of the target."""

    value: Tensor  # fp32 [N, channels]
    accepted: Tensor  # bool [N], whether the row is its draft


class Gaussian(NamedTuple):
    """Mean and log standard deviation, fp32 [..., channels]; minus infinity is no noise."""

    mean: Tensor
    log_std: Tensor


# Draws ``first .. first + count - 1`` of rows int64 [M]: standard normals [M, count, channels] and uniforms [M, count].
Retry = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def same(a: Gaussian, b: Gaussian) -> Tensor:
    """bool [...]: equal up to fp32 rounding in every channel."""
    mean = (a.mean - b.mean).abs() <= ROUNDING * (1 + b.mean.abs())
    std = (a.log_std == b.log_std) | ((a.log_std - b.log_std).abs() <= ROUNDING)
    return (mean & std).all(-1)


def _shape_ratio(z: Tensor, step: Tensor) -> Tensor:
    """log N(0, s_p^2) - log N(0, s_q^2) [...] at s_q z; ``step`` [..., channels] is log s_q - log s_p."""
    return (step - 0.5 * z * z * torch.expm1(2 * step)).sum(-1)


def _shift_ratio(z: Tensor, shift: Tensor) -> Tensor:
    """log N(0, I) at z + shift, less the same at z [...]."""
    return -(z * shift).sum(-1) - 0.5 * (shift * shift).sum(-1)


def acceptable(draft: Tensor, q: Gaussian, p: Gaussian, uniforms: Tensor) -> Tensor:
    """Whether :func:`couple` accepts drafts fp32 [..., channels], bool [...]; ``uniforms`` [..., 2], in (0, 1]."""
    z = (draft - q.mean) * torch.exp(-q.log_std)
    step = q.log_std - p.log_std
    shaped = uniforms[..., 0].log() <= _shape_ratio(z, step)
    shift = (q.mean - p.mean) * torch.exp(-p.log_std)
    shifted = uniforms[..., 1].log() <= _shift_ratio(z * step.exp(), shift)
    noisy = ~(torch.isneginf(q.log_std) | torch.isneginf(p.log_std)).any(-1)  # else: comparisons with NaN, all false
    return same(q, p) | (noisy & shaped & shifted)


def reshape(draft: Tensor, q: Gaussian, log_std: Tensor, uniform: Tensor, retry: Retry, asked: Tensor) -> Coupled:
    """From N(m, s_q^2) to N(m, s_p^2), means equal: accept with min(1, p / q), else sample max(0, p - q) / Z.

    A redraw from p is accepted with probability 1 - min(1, q / p): one redraw per draft on average for any p and q, because rejections are
    rare where acceptance of a redraw is. ``log_std`` is the target's, ``asked`` bool [N] the rows whose result is used; else as
    :func:`couple`.
    """
    z = (draft - q.mean) * torch.exp(-q.log_std)
    step = q.log_std - log_std
    ok = (uniform.log() <= _shape_ratio(z, step)) | ~asked
    out, todo, at, count = draft, (~ok).nonzero()[:, 0], 0, 4
    while len(todo):
        count = max(1, min(4 * count, _BLOCK // todo.numel() // z.shape[1]))
        normals, uniforms = retry(todo, at, count)
        at += count
        # log q / p at the draw: the shape ratio with p and q exchanged. NaN is accepted, so that it stays visible.
        keep = ~(uniforms.log() <= _shape_ratio(normals, -step[todo, None]))
        keep[:, -1] |= at >= MOST_DRAWS
        index = keep.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, normals.shape[2])
        drawn, hit = q.mean[todo] + log_std[todo].exp() * normals.gather(1, index)[:, 0], keep.any(1)
        out = out.index_put((todo[hit],), drawn[hit])
        todo = todo[~hit]
    return Coupled(out, ok)


def reflect(draft: Tensor, mean: Tensor, p: Gaussian, uniform: Tensor) -> Coupled:
    """From N(mean, s^2) to N(m_p, s^2), stds equal and not 0: reflection-maximal coupling.

    With z the draft's noise, D = (mean - m_p) / s and e = D / |D|: accept with min(1, exp(-z.D - |D|^2 / 2)), else
    m_p + s (z - 2 (e.z) e). ``draft`` fp32 [N, channels] is a sample of N(mean, s^2), ``uniform`` fp32 [N] in (0, 1].
    """
    std = p.log_std.exp()
    z, shift = (draft - mean) / std, (mean - p.mean) / std
    ok = uniform.log() <= _shift_ratio(z, shift)
    e = shift / shift.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(shift.dtype).tiny)
    mirrored = p.mean + std * (z - 2 * (e * z).sum(-1, keepdim=True) * e)
    return Coupled(torch.where(ok[:, None], draft, mirrored), ok)


def couple(draft: Tensor, q: Gaussian, p: Gaussian, uniforms: Tensor, retry: Retry) -> Coupled:
    """Samples of p: :func:`reshape`, then :func:`reflect`. Where p has no noise in some channel, its mean, accepted if q is the same.

    Args:
        draft: fp32 [N, channels], a sample of q.
        uniforms: fp32 [N, 2], in (0, 1]; one per step.
        retry: draws for rows that the first step rejects.
    """
    alike = same(q, p)
    still = (torch.isneginf(q.log_std) | torch.isneginf(p.log_std)).any(-1)
    value, accepted = torch.where(alike[:, None], draft, p.mean), alike
    moving = ~alike & ~still
    shaped = reshape(draft, q, p.log_std, uniforms[:, 0], retry, moving)
    shifted = reflect(shaped.value, q.mean, p, uniforms[:, 1])
    value = torch.where(moving[:, None], shifted.value, value)
    return Coupled(value, torch.where(moving, shaped.accepted & shifted.accepted, accepted))
