"""The formulas of a diffusion step, one by one, which the package computes in one expression (``Ancestral``)."""

from __future__ import annotations

import math

from fastar_nodes.samplers.mar.tables import Tables
from torch import Tensor


def predict_x0(table: Tables, i: int, x: Tensor, eps: Tensor) -> Tensor:
    """x0 from x_t and predicted noise, not clipped. Shapes equal."""
    return float(table.sqrt_recip_alphas_cumprod[i]) * x - float(table.sqrt_recipm1_alphas_cumprod[i]) * eps


def posterior_mean(table: Tables, i: int, x: Tensor, x0: Tensor) -> Tensor:
    """Mean of q(x_{t-1} | x_t, x0)."""
    return float(table.posterior_mean_coef1[i]) * x0 + float(table.posterior_mean_coef2[i]) * x


def log_variance(table: Tables, i: int, logits: Tensor) -> Tensor:
    """Learned-range log variance: logits -1..1 between the posterior's (clipped) and beta's."""
    low, high = float(table.posterior_log_variance_clipped[i]), math.log(float(table.betas[i]))
    return low + (logits + 1) * ((high - low) / 2)
