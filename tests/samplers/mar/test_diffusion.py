"""Diffusion tables and arithmetic by their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from diffusion_reference import log_variance, predict_x0
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.mar.diffusion import guide
from fastar_nodes.samplers.mar.tables import cosine_betas, respaced_timesteps, tables
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.integers(2, 1000), st.integers(0, 999))
def test_respacing_is_ascending_within_bounds_and_keeps_both_ends(count, t_max):
    times = respaced_timesteps(count, t_max)
    assert times == sorted(set(times)) and times[0] == 0 and times[-1] == t_max and len(times) <= count


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1000), st.integers(1, 999))
def test_tables_follow_from_the_kept_products(count, t_max):
    table = tables(count, t_max)
    full = torch.cumprod(1 - cosine_betas(), 0)[table.timestep_map]
    torch.testing.assert_close(table.alphas_cumprod, full, rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.cumprod(1 - table.betas, 0), full, rtol=1e-9, atol=0)
    assert torch.isfinite(table.posterior_log_variance_clipped).all()


@given(st.integers(0, 99))
def test_the_noise_that_made_x_leads_back_to_x0(i):
    table = tables(100, 950)
    g = torch.Generator().manual_seed(i)
    x0, eps = torch.randn(7, 4, generator=g, dtype=torch.float64), torch.randn(7, 4, generator=g, dtype=torch.float64)
    i = min(i, len(table) - 1)
    x = table.alphas_cumprod[i].sqrt() * x0 + (1 - table.alphas_cumprod[i]).sqrt() * eps
    torch.testing.assert_close(predict_x0(table, i, x, eps), x0)


def test_first_step_gain_is_why_t_max_exists():
    """The figures in the module's text: 1 / sqrt(alpha) of the first step."""
    gain = {n: float((1 - tables(n).betas[-1]) ** -0.5) for n in (100, 10)}
    assert gain[100] == pytest.approx(316, rel=0.01) and gain[10] == pytest.approx(3493, rel=0.01)
    assert float((1 - tables(10, 950).betas[-1]) ** -0.5) == pytest.approx(2.2, rel=0.05)


def test_variance_logits_span_the_two_bounds():
    table = tables(50, 950)
    for i in (0, 20, len(table) - 1):
        low, high = (float(log_variance(table, i, torch.tensor([v]))) for v in (-1.0, 1.0))
        assert low == pytest.approx(float(table.posterior_log_variance_clipped[i]), rel=1e-5)
        assert high == pytest.approx(math.log(float(table.betas[i])), rel=1e-5)


def test_guidance_leaves_the_variance_alone():
    out, null = torch.randn(3, 8), torch.randn(3, 8)
    eps, logits = guide(torch.stack([out, null]), 2.0)
    torch.testing.assert_close(eps, null[:, :4] + 2 * (out[:, :4] - null[:, :4]))
    assert torch.equal(logits, out[:, 4:])
    assert torch.equal(guide(torch.stack([out, null]), 1.0)[0].round(decimals=4), out[:, :4].round(decimals=4))
    assert torch.equal(guide(out[None], 2.0)[0], out[:, :4])


@pytest.mark.parametrize(
    ("count", "t_max", "name"), [(0, 999, "diffusion steps"), (1001, 999, "diffusion steps"), (10, 1000, "t_max")]
)
def test_out_of_range_says_which(count, t_max, name):
    with pytest.raises(UserError, match=name):
        tables(count, t_max)
