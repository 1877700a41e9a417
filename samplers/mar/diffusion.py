"""Diffusion arithmetic of MAR's head: cosine schedule, respaced tables, the ancestral step with learned variance.

Source: Nichol & Dhariwal 2021 (improved DDPM) as used by MAR; x0 is never clipped. Everything is plain fp32 or float64.

Reason for ``t_max``: every respacing of 1000 steps includes t = 999, where abar = 2.4e-9. With N steps the first one
multiplies the network's error by 1 / sqrt(alpha): 316 at N = 100, 3493 at N = 10. Starting at t = 950 makes that factor
2.2 at N = 10, which small models and few steps need. 999 is the official behaviour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...errors import UserError
from ..noise import copied

STEPS = 1000


# Largest beta of MAR's and Harmon's diffusion. UniPic's is 0.2, which changes the nine highest timesteps.
MAX_BETA = 0.999


def cosine_betas(steps: int = STEPS, max_beta: float = MAX_BETA) -> Tensor:
    """betas [steps] float64 of abar(t) = cos^2(pi/2 (t + 0.008) / 1.008), at most ``max_beta``."""

    def abar(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    return torch.tensor(
        [min(1 - abar((i + 1) / steps) / abar(i / steps), max_beta) for i in range(steps)], dtype=torch.float64
    )


def respaced_timesteps(count: int, t_max: int = STEPS - 1) -> list[int]:
    """The ``count`` timesteps of a respacing, ascending, as a set clipped at ``t_max`` (so possibly fewer).

    Args:
        count: 1 to 1000. One step keeps only t = 0, as upstream does, unless clipped timesteps say otherwise.
        t_max: highest timestep, 0..999.
    """
    stride = (STEPS - 1) / (count - 1) if count > 1 else 1.0
    at, out = 0.0, []
    for _ in range(count):
        out.append(min(round(at), t_max))  # banker's rounding of an accumulated float, exactly as upstream
        at += stride
    return sorted(set(out))


@dataclass(frozen=True)
class Tables:
    """Per-step constants of a respaced diffusion, float64 [S], index 0 = the lowest timestep."""

    timestep_map: Tensor
    betas: Tensor
    alphas_cumprod: Tensor
    alphas_cumprod_prev: Tensor
    sqrt_recip_alphas_cumprod: Tensor
    sqrt_recipm1_alphas_cumprod: Tensor
    posterior_variance: Tensor
    posterior_log_variance_clipped: Tensor
    posterior_mean_coef1: Tensor
    posterior_mean_coef2: Tensor

    def __len__(self) -> int:
        return len(self.betas)


@lru_cache(maxsize=64)
def tables(count: int = STEPS, t_max: int = STEPS - 1, max_beta: float = MAX_BETA) -> Tables:
    """Tables of a ``count``-step respacing that starts at or below ``t_max``, of the diffusion with betas up to ``max_beta``.

    Raises:
        UserError: count or t_max outside 1..1000 or 0..999.
    """
    if not 1 <= count <= STEPS:
        raise UserError(f"diffusion steps: {count} is outside 1 to {STEPS}.")
    if not 0 <= t_max < STEPS:
        raise UserError(f"t_max: {t_max} is outside 0 to {STEPS - 1}.")
    return tables_at(tuple(respaced_timesteps(count, t_max)), max_beta)


@lru_cache(maxsize=64)
def tables_at(timesteps: tuple[int, ...], max_beta: float = MAX_BETA) -> Tables:
    """Tables for explicit ascending timesteps (0..999)."""
    kept = torch.tensor(timesteps)
    abar = torch.cumprod(1 - cosine_betas(max_beta=max_beta), 0)[kept]
    before = torch.cat([torch.ones(1, dtype=torch.float64), abar[:-1]])
    betas = 1 - abar / before
    # As upstream, the product is accumulated again from the new betas, which decides the last digits.
    abar = torch.cumprod(1 - betas, 0)
    before = torch.cat([torch.ones(1, dtype=torch.float64), abar[:-1]])
    variance = betas * (1 - before) / (1 - abar)
    floor = torch.cat([variance[1:2], variance[1:]]) if len(kept) > 1 else variance.clamp(min=1e-20)
    return Tables(
        kept,
        betas,
        abar,
        before,
        (1 / abar).sqrt(),
        (1 / abar - 1).sqrt(),
        variance,
        floor.log(),
        betas * before.sqrt() / (1 - abar),
        (1 - before) * (1 - betas).sqrt() / (1 - abar),
    )


class Ancestral:
    """One ancestral step: x_{t-1} = mu(x_t, eps) + temperature sigma noise, with mu and sigma from the head's output.

    mu is linear in x_t and eps, so it is computed in one expression and x0 is never formed.

    Args:
        table: diffusion tables, S steps.
        temperature: factor of the noise.
        device: of the tokens.
        compiled: compiled :func:`advance`, for more than one row; None: the step runs as written.

    Attributes:
        draft: fp32 [N, channels] that the mean is drawn to; None for none.
        collects: number of tensors that :meth:`collected` returns.
    """

    draft: Tensor | None = None
    collects = 0

    def __init__(
        self, table: Tables, temperature: float, device: torch.device, compiled: Callable[..., Tensor] | None = None
    ):
        self.compiled = compiled
        self._numbers: Tensor | None = None
        # log sigma = middle + slope * logits; logits 0 is halfway between the two bounds of the learned range.
        low, high = table.posterior_log_variance_clipped, table.betas.log()
        middle, slope = (low + high) / 4, (high - low) / 4
        columns = (
            table.sqrt_recip_alphas_cumprod,
            table.sqrt_recipm1_alphas_cumprod,
            table.posterior_mean_coef1,
            table.posterior_mean_coef2,
            slope,
        )
        self.coefficients = list(zip(*(column.flip(0).tolist() for column in columns), strict=True))
        # exp(slope * logits) as a power of the logits.
        self.bases = [math.exp(slope) for *_, slope in self.coefficients]
        self.std = (middle.exp().flip(0) * temperature).to(device, torch.float32)[:, None, None]

    def take(self, rule: Ancestral) -> None:
        """Step as another rule does."""
        self.coefficients, self.std, self.bases, self.compiled = rule.coefficients, rule.std, rule.bases, rule.compiled
        self._numbers = None

    def fresh(self, draft: Tensor | None) -> Ancestral:
        """A copy for one loop, with its draft."""
        out = copy(self)
        out.draft = draft
        return out

    def collected(self) -> tuple[Tensor, ...]:
        """What this step noted during a loop, beside its result; [N, ...] each."""
        return ()

    def key(self) -> Hashable:
        """Equal for steps that compute the same from equal tensors."""
        steps = enumerate(self.coefficients)
        return type(self), tuple((*self.linear(k), c[4], self.of_draft(k), self.free(k)) for k, c in steps)

    def scaled(self, noise: Tensor) -> Tensor:
        """Step noise [S, N, channels] times the temperature and the part of sigma that does not depend on the logits."""
        return noise * self.std

    def free(self, k: int) -> bool:
        """Whether executed step ``k`` needs no head output; logits 0, the middle of the learned range, then stand for it."""
        return False

    def mean(self, k: int, x: Tensor, eps: Tensor) -> Tensor:
        """mu [N, channels] of executed step ``k`` (0 is the highest timestep) from x and guided noise [N, channels]."""
        of_x, of_eps = self.linear(k)
        return self.pulled(k, (x * of_x).add_(eps, alpha=-of_eps))

    def linear(self, k: int) -> tuple[float, float]:
        """Coefficients of mu = of_x x - of_eps eps in executed step ``k``."""
        recip, recipm1, coef1, coef2, _ = self.coefficients[k]
        return coef1 * recip + coef2, coef1 * recipm1

    def of_draft(self, k: int) -> float:
        """Coefficient of the draft in executed step ``k``."""
        return 0.0

    def pulled(self, k: int, mean: Tensor) -> Tensor:
        """mu [N, channels] or [N, P, channels] of executed step ``k`` plus the draft's part, in place."""
        if self.draft is None:
            return mean
        return mean.add_(self.draft if mean.ndim == 2 else self.draft[:, None], alpha=self.of_draft(k))

    @property
    def numbers(self) -> Tensor:
        """Coefficients of every step on the device, fp32 [S, 5]; see :func:`advance`."""
        if self._numbers is None:
            last = len(self.coefficients) - 1
            rows = [
                (*self.linear(k), c[4], self.of_draft(k), float(k != last)) for k, c in enumerate(self.coefficients)
            ]
            self._numbers = copied(torch.tensor(rows), self.std.device)
        return self._numbers

    def __call__(self, k: int, x: Tensor, eps: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
        """x [N, channels] after executed step ``k``.

        Args:
            k: 0 for the highest timestep.
            x: fp32 [N, channels].
            eps, logits: guided noise and variance logits of the head at x, fp32 [N, channels].
            noise: the step's entry of :meth:`scaled`, [N, channels]. Not used in the last step.
        """
        return self._noised(k, self.mean(k, x, eps), logits, noise)

    def branches(self, k: int, x: Tensor, out: Tensor, mix: Tensor, noise: Tensor) -> Tensor:
        """x after executed step ``k``, once for each branch of guidance: :func:`guide` and :meth:`__call__` in one.

        Args:
            k: 0 for the highest timestep.
            x: fp32 [N, P, channels], P equal copies: 2 with guidance, else 1.
            out: head output [N, P, 2 channels], the conditional one first.
            mix: guidance of :func:`mixture`, fp32 [N, P, P].
            noise: the step's entry of :meth:`scaled`, [N, 1, channels].
        """
        if self.compiled is not None and len(x) > 1:
            return self.compiled(x, out, mix, noise, self.numbers[k], self.draft)
        channels, (of_x, of_eps) = x.shape[2], self.linear(k)
        mean = torch.baddbmm(x, mix, out[..., :channels], beta=of_x, alpha=-of_eps)
        return self._noised(k, self.pulled(k, mean), out[:, :1, channels:], noise)

    def _noised(self, k: int, mean: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
        """mean + sigma noise, in place; the mean alone in the last step."""
        if k + 1 == len(self.coefficients):
            return mean
        return mean.addcmul_(torch.pow(self.bases[k], logits), noise)


def advance(x: Tensor, out: Tensor, mix: Tensor, noise: Tensor, numbers: Tensor, draft: Tensor | None) -> Tensor:
    """:meth:`Ancestral.branches` for the compiler: coefficients are values of a tensor, so that one compilation covers all steps.

    Args:
        x, out, mix, noise: see there.
        numbers: fp32 [5], coefficients of x, eps, the logits in log sigma and the draft; 0 if the step adds no noise, else 1.
        draft: see :class:`Ancestral`.
    """
    channels = x.shape[2]
    mean = numbers[0] * x - numbers[1] * (mix[..., None] * out[:, None, :, :channels]).sum(2)
    if draft is not None:
        mean = mean + numbers[3] * draft[:, None]
    return mean + numbers[4] * torch.exp(numbers[2] * out[:, :1, channels:]) * noise


def mixture(scale: Tensor, guided: bool) -> Tensor:
    """Guidance as a matrix: :func:`guide`'s noise is a row of it times (conditional, null).

    Args:
        scale: guidance scale fp32 [N, 1].
        guided: whether there is a null branch.

    Returns:
        fp32 [N, 2, 2] with rows (s, 1 - s); without guidance ones [N, 1, 1].
    """
    if not guided:
        return torch.ones_like(scale)[..., None]
    return torch.cat([scale, 1 - scale], 1)[:, None].expand(-1, 2, -1)


def guide(out: Tensor, null: Tensor | None, scale: Tensor | float, channels: int) -> tuple[Tensor, Tensor]:
    """Classifier-free guidance on the noise only: eps_u + s (eps_c - eps_u); the variance logits stay conditional.

    Args:
        out: conditional head output [N, 2 channels].
        null: the null class's, or None for no guidance.
        scale: number or [N, 1].
        channels: token channels.

    Returns:
        eps [N, channels] and variance logits [N, channels].
    """
    eps, logits = out[:, :channels], out[:, channels:]
    if null is not None:
        eps_null = null[:, :channels]
        eps = eps_null + scale * (eps - eps_null)
    return eps, logits
