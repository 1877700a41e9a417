"""The coefficients of the diffusion steps of MAR's head.

The head is trained on 1000 timesteps with a cosine schedule: each timestep t adds noise of variance beta to a token.
*Respacing* chooses fewer timesteps for sampling.

Source: Nichol & Dhariwal 2021 (improved DDPM) as used by MAR (Li et al. 2024, arXiv 2406.11838, section 3.2).

Reading order: :func:`cosine_betas`, the schedule of the training; :func:`respaced_timesteps`; :func:`constants`, the
published code's constants of a respacing; and :func:`respacing`, which turns them into steps. *abar* at a timestep is
the product of 1 - beta over all timesteps up to it. Shapes: S steps of a respacing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..diffusion_steps import DiffusionStep

TRAINING_STEPS = 1000
# Largest beta in the diffusion of MAR and Harmon. UniPic's largest beta is 0.2, so the betas of its nine highest
# timesteps are different.
MAX_BETA = 0.999


def cosine_betas(max_beta: float = MAX_BETA) -> Tensor:
    """The betas of the cosine schedule, float64 [1000], each at most ``max_beta``. In this schedule, abar after i of
    the 1000 timesteps is proportional to cos^2(pi/2 (i / 1000 + 0.008) / 1.008).
    """
    abar = [math.cos((i / TRAINING_STEPS + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(TRAINING_STEPS + 1)]
    return torch.tensor([min(1 - abar[i + 1] / abar[i], max_beta) for i in range(TRAINING_STEPS)], dtype=torch.float64)


def respaced_timesteps(count: int, t_max: int = TRAINING_STEPS - 1) -> list[int]:
    """The timesteps of a respacing to ``count`` steps (1 to 1000), ascending. One timestep ``t_max`` replaces all
    timesteps above it, so the result may have fewer than ``count`` timesteps. If ``count`` is 1, the timestep is 0.

    Reason for ``t_max``: without it, every respacing to two or more steps starts at t = 999. There, abar is only
    2.4e-9. The first step multiplies the head's error by 1 / sqrt(alpha), where alpha is abar at t = 999 divided by
    abar at the next lower timestep of the respacing. This factor is 316 with 100 steps and 3493 with 10 steps. If the
    first timestep is 950, the factor with 10 steps is only 2.3. Small models and runs with few steps need such a small
    factor. The first timestep of the official models is 999.
    """
    stride = (TRAINING_STEPS - 1) / (count - 1) if count > 1 else 1.0

    timestep = 0.0
    out = set()
    for _ in range(count):
        # As in the published code: add floats, and round the sum with Python's round.
        out.add(min(round(timestep), t_max))
        timestep += stride

    return sorted(out)


@dataclass(frozen=True)
class Constants:
    """Constants of a respaced diffusion of S steps, float64 [S] each, lowest timestep first.

    The fields have the names of the published code, and ``lab/parity`` compares all fields with the published code. No
    sampler reads ``alphas_cumprod_prev`` or ``posterior_variance``.
    """

    timestep_map: Tensor  # int64: the timestep of each step, 0 to 999
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
    """A respaced diffusion of S steps, as a sampler reads it."""

    timestep_map: Tensor  # int64 [S], ascending
    # One entry per step, highest timestep first. From the state x of a token, the head predicts noise eps and logits. A
    # step then computes the clean token x0 = data_x x + data_per_prediction eps. The next state has the mean
    # data_coefficient x0 + x_coefficient x and the log std log_std_middle + log_std_per_logit logits.
    steps: list[DiffusionStep]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def without_last_noise(self) -> list[DiffusionStep]:
        """The steps that sample a token: like :attr:`steps`, but the last step adds no noise."""
        return [*self.steps[:-1], self.steps[-1]._replace(log_std_middle=-math.inf)]


@lru_cache(maxsize=64)
def respacing(count: int = TRAINING_STEPS, t_max: int = TRAINING_STEPS - 1, max_beta: float = MAX_BETA) -> Respacing:
    """The respacing to at most ``count`` steps with timesteps up to ``t_max``, see :func:`respaced_timesteps`.

    ``max_beta``: the largest beta with which the head was trained.
    """
    return respacing_at(tuple(respaced_timesteps(count, t_max)), max_beta)


@lru_cache(maxsize=64)
def respacing_at(timesteps: tuple[int, ...], max_beta: float = MAX_BETA) -> Respacing:
    """The respacing with these timesteps (0 to 999), ascending; ``max_beta`` as in :func:`respacing`."""
    c = constants(timesteps, max_beta)
    # The log variance of a step is linear in the logit that the head predicts: ``low`` at logit -1, and ``high`` at
    # logit 1. The log std is half the log variance.
    low = c.posterior_log_variance_clipped
    high = c.betas.log()

    columns = [
        c.sqrt_recip_alphas_cumprod,  # data_x
        -c.sqrt_recipm1_alphas_cumprod,  # data_per_prediction
        c.posterior_mean_coef2,  # x_coefficient
        c.posterior_mean_coef1,  # data_coefficient
        (low + high) / 4,  # log_std_middle
        (high - low) / 4,  # log_std_per_logit
    ]
    steps = torch.stack(columns, dim=1).flip(0)  # [S, 6], highest timestep first
    return Respacing(c.timestep_map, [DiffusionStep(*coefficients) for coefficients in steps.tolist()])


def constants(timesteps: Sequence[int] = range(TRAINING_STEPS), max_beta: float = MAX_BETA) -> Constants:
    """The constants of a respacing with these timesteps (0 to 999), ascending; ``max_beta`` as in :func:`respacing`."""
    timestep_map = torch.tensor(timesteps)
    trained = cosine_betas(max_beta)
    trained_abar = torch.cumprod(1 - trained, 0)
    respaced_abar = trained_abar[timestep_map]
    betas = 1 - respaced_abar / _previous_abar(respaced_abar)

    # As in the published code, compute abar once more, from the new betas. So abar and the published code's abar are
    # identical to the last digit.
    abar = torch.cumprod(1 - betas, 0)
    previous_abar = _previous_abar(abar)

    variance = betas * (1 - previous_abar) / (1 - abar)
    if len(timestep_map) > 1:
        # At the lowest timestep, the variance is 0, and 0 has no logarithm. Use the next higher timestep's variance.
        clipped = torch.cat([variance[1:2], variance[1:]])
    else:
        # A single step has no higher timestep. Use the variance of its timestep in the diffusion of 1000 steps, because
        # this is the lower bound of the variance that the head was trained to predict. The variance of timestep 0 is 0,
        # so timestep 0 takes the variance of timestep 1.
        t = timestep_map.clamp(min=1)
        clipped = trained[t] * (1 - trained_abar[t - 1]) / (1 - trained_abar[t])

    return Constants(
        timestep_map=timestep_map,
        betas=betas,
        alphas_cumprod=abar,
        alphas_cumprod_prev=previous_abar,
        sqrt_recip_alphas_cumprod=(1 / abar).sqrt(),
        sqrt_recipm1_alphas_cumprod=(1 / abar - 1).sqrt(),
        posterior_variance=variance,
        posterior_log_variance_clipped=clipped.log(),
        posterior_mean_coef1=betas * previous_abar.sqrt() / (1 - abar),
        posterior_mean_coef2=(1 - previous_abar) * (1 - betas).sqrt() / (1 - abar),
    )


def _previous_abar(abar: Tensor) -> Tensor:
    """For each timestep, the abar of the next lower timestep; 1 for the lowest timestep."""
    return torch.cat([torch.ones(1, dtype=torch.float64), abar[:-1]])
