"""The numbers of the diffusion steps of MAR's head: cosine schedule and respacing.

Source: Nichol & Dhariwal 2021 (improved DDPM) as used by MAR (Li et al. 2024, arXiv 2406.11838, section 3.2).

Reason for ``t_max``: every respacing of 1000 steps includes t = 999, where abar, the product of all 1 - beta up to t,
is only 2.4e-9. The first of N steps multiplies the network's error by 1 / sqrt(alpha), where alpha is abar at t = 999
divided by abar at the next lower timestep. This factor is 316 at N = 100, and 3493 at N = 10. If the first timestep is
950, the factor is only 2.2 at N = 10. Small models, and runs with few steps, need such a small factor. The official
models start at 999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..chain import DiffusionStep

STEPS = 1000
# Largest beta of MAR's and Harmon's diffusion. UniPic's is 0.2, which changes the nine highest timesteps.
MAX_BETA = 0.999


def cosine_betas(max_beta: float = MAX_BETA) -> Tensor:
    """betas [1000] float64 of abar(t) = cos^2(pi/2 (t + 0.008) / 1.008), at most ``max_beta``."""
    abar = [math.cos((i / STEPS + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(STEPS + 1)]
    return torch.tensor([min(1 - abar[i + 1] / abar[i], max_beta) for i in range(STEPS)], dtype=torch.float64)


def respaced_timesteps(count: int, t_max: int = STEPS - 1) -> list[int]:
    """The timesteps of a respacing to ``count`` steps (1 to 1000), ascending. They are clipped at ``t_max``, so there
    may be fewer. A single step has t = 0.
    """
    stride = (STEPS - 1) / (count - 1) if count > 1 else 1.0

    position = 0.0
    out = set()
    for _ in range(count):
        # Python's rounding of an accumulated float, exactly as in the published code.
        out.add(min(round(position), t_max))
        position += stride

    return sorted(out)


@dataclass(frozen=True)
class Constants:
    """Constants of a respaced diffusion under the names of the published code, float64 [S], index 0 = the lowest
    timestep. ``lab/parity`` compares all of them with the published code's; no sampler reads ``alphas_cumprod_prev``
    and ``posterior_variance``.
    """

    timestep_map: Tensor  # int64
    betas: Tensor
    alphas_cumprod: Tensor
    alphas_cumprod_prev: Tensor
    sqrt_recip_alphas_cumprod: Tensor
    sqrt_recipm1_alphas_cumprod: Tensor
    posterior_variance: Tensor
    posterior_log_variance_clipped: Tensor
    posterior_mean_coef1: Tensor
    posterior_mean_coef2: Tensor


@dataclass(frozen=True)
class Respacing:
    """A respaced diffusion of S steps: the part of its constants that a sampler reads."""

    timestep_map: Tensor  # int64 [S], ascending
    # Highest timestep first: x0 = data_x x + data_out eps, mu = data_coefficient x0 + x_coefficient x, and log sigma =
    # middle + slope logits.
    steps: list[DiffusionStep]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def without_last_noise(self) -> list[DiffusionStep]:
        """The steps with which a token is sampled: the last one adds no noise."""
        return [*self.steps[:-1], self.steps[-1]._replace(middle=-math.inf)]


@lru_cache(maxsize=64)
def respacing(count: int = STEPS, t_max: int = STEPS - 1, max_beta: float = MAX_BETA) -> Respacing:
    """The respacing to ``count`` steps that starts at or below ``t_max``, of the diffusion with betas up to
    ``max_beta``; see :func:`respaced_timesteps`.
    """
    return respacing_at(tuple(respaced_timesteps(count, t_max)), max_beta)


@lru_cache(maxsize=64)
def respacing_at(timesteps: tuple[int, ...], max_beta: float = MAX_BETA) -> Respacing:
    """The respacing with these timesteps (0..999), ascending."""
    c = constants(timesteps, max_beta)
    # The learned log variance lies between the posterior's and log beta; log sigma is half of it.
    low = c.posterior_log_variance_clipped
    high = c.betas.log()

    columns = [
        c.sqrt_recip_alphas_cumprod,  # data_x
        -c.sqrt_recipm1_alphas_cumprod,  # data_out
        c.posterior_mean_coef2,  # x_coefficient
        c.posterior_mean_coef1,  # data_coefficient
        (low + high) / 4,  # middle
        (high - low) / 4,  # slope
    ]
    rows = torch.stack(columns, dim=1).flip(0)  # highest timestep first
    return Respacing(c.timestep_map, [DiffusionStep(*row) for row in rows.tolist()])


def constants(timesteps: Sequence[int] = range(STEPS), max_beta: float = MAX_BETA) -> Constants:
    """Constants for explicit ascending timesteps (0..999)."""
    kept = torch.tensor(timesteps)
    trained = cosine_betas(max_beta)
    trained_abar = torch.cumprod(1 - trained, 0)
    abar = trained_abar[kept]
    betas = 1 - abar / _before(abar)

    # As in the published code, the product is accumulated again from the new betas, which decides the last digits.
    abar = torch.cumprod(1 - betas, 0)
    before = _before(abar)

    variance = betas * (1 - before) / (1 - abar)
    if len(kept) > 1:
        # The variance of the lowest timestep is 0, which has no logarithm. That of the next timestep replaces it.
        clipped = torch.cat([variance[1:2], variance[1:]])
    else:
        # A single step has no timestep above it. The variance of the 1000-step diffusion is used, because the network
        # was trained to choose a variance between that variance and beta.
        t = kept.clamp(min=1)
        clipped = trained[t] * (1 - trained_abar[t - 1]) / (1 - trained_abar[t])

    return Constants(
        timestep_map=kept,
        betas=betas,
        alphas_cumprod=abar,
        alphas_cumprod_prev=before,
        sqrt_recip_alphas_cumprod=(1 / abar).sqrt(),
        sqrt_recipm1_alphas_cumprod=(1 / abar - 1).sqrt(),
        posterior_variance=variance,
        posterior_log_variance_clipped=clipped.log(),
        posterior_mean_coef1=betas * before.sqrt() / (1 - abar),
        posterior_mean_coef2=(1 - before) * (1 - betas).sqrt() / (1 - abar),
    )


def _before(abar: Tensor) -> Tensor:
    """For each timestep, abar of the timestep below it; 1 for the lowest timestep."""
    return torch.cat([torch.ones(1, dtype=torch.float64), abar[:-1]])
