"""FastHybrid: where it is plain MAR, what its cost is, and that it decides image by image."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from fastar_nodes.reports.record import REDONE
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar import fasthybrid as module
from fastar_nodes.samplers.mar.diffusion import HeadBatch, ancestral_step, denoise, step_numbers
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid, guidance_weights
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import FastHybridSettings, MARBase, MARSettings
from fastar_nodes.samplers.mar.tables import tables
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given
from hypothesis import strategies as st

BASE = {"ar_steps": 8, "diffusion_steps": 12, "cfg": 2.0}
LABELS, NOISE = from_ids((1, 4, 0)), PairedNoise(5, (0, 1, 2))


def run(model, **settings):
    return finish(fasthybrid(model, LABELS, FastHybridSettings(**BASE, **settings), NOISE))


@pytest.fixture(scope="module")
def plain(model):
    return finish(mar(model, LABELS, MARSettings(**BASE), NOISE))


def test_lookahead_off_is_plain_mar_bit_for_bit(model, plain):
    off = run(model, lookahead=0)
    assert torch.equal(off.latents, plain.latents)
    assert off.report.counts == plain.report.counts


@pytest.mark.parametrize("verify", ["token", "step"])
@pytest.mark.parametrize("lookahead", [1, 3, 50])
def test_rejecting_everything_is_plain_mar(model, plain, lookahead, verify):
    result = run(model, lookahead=lookahead, threshold=1.01, verify=verify)
    torch.testing.assert_close(result.latents, plain.latents, rtol=1e-4, atol=1e-4)
    assert result.report.counts["accepted"] == 0
    assert result.report.counts["head_calls"] == plain.report.counts["head_calls"]


@pytest.mark.parametrize("lookahead", [2, 3, 8])
def test_accepting_everything_costs_what_the_paper_says(model, lookahead):
    """Sequential head calls: T a segment, T_g for each of its other steps (paper: Q T + Q T_g (K - 1)), less one where the
    weight is 1."""
    result = run(model, lookahead=lookahead, threshold=-1.0, guided_steps=4)
    segments = math.ceil(8 / lookahead)
    assert result.report.counts["head_calls"] == segments * 12 + (8 - segments) * 3
    assert result.report.counts["rejected"] == result.report.counts["restarts"] == 0


def test_thresholds_are_monotone_in_work(model):
    calls = [run(model, lookahead=4, threshold=t, guided_steps=4).report for t in (-1.0, 0.95, 0.98, 0.995, 1.01)]
    accepted = [r.acceptance for r in calls]
    assert accepted[0] == 1 and accepted[-1] == 0
    assert [r.counts["head_calls"] for r in calls] == sorted(r.counts["head_calls"] for r in calls)


def test_a_rejection_in_one_image_costs_the_others_nothing(model):
    """Rows of the full pass are those of the restarting images only."""
    threshold = 0.97
    together = run(model, lookahead=4, threshold=threshold, guided_steps=4).report
    rows = 0
    for i, label in enumerate((1, 4, 0)):
        settings = FastHybridSettings(**BASE, lookahead=4, threshold=threshold, guided_steps=4)
        rows += finish(fasthybrid(model, from_ids((label,)), settings, PairedNoise(5, (i,)))).report.counts["head_rows"]
    assert 0 < together.acceptance < 1, "the case must have both outcomes to say anything"
    assert together.counts["head_rows"] == rows


def alone(model, i, **settings):
    label = LABELS.labels[i]
    kind = FastHybridSettings(**BASE, **settings)
    return finish(fasthybrid(model, from_ids((label,)), kind, PairedNoise(5, (i,))))


@pytest.mark.parametrize("more", [{}, {"verify": "step"}, {"accepted": "keep"}, {"diffusion_steps_end": 6}], ids=str)
@pytest.mark.parametrize("threshold", [0.95, 0.97, 0.99])
def test_every_image_of_a_batch_is_itself_alone(model, threshold, more):
    settings = {"lookahead": 3, "threshold": threshold, "guided_steps": 4, **more}
    together, parts = run(model, **settings), [alone(model, i, **settings) for i in range(3)]
    for i, part in enumerate(parts):
        torch.testing.assert_close(together.latents[i : i + 1], part.latents, rtol=1e-4, atol=1e-4)
    for count in ("accepted", "rejected", "restarts", "head_rows"):
        assert together.report.counts[count] == sum(part.report.counts[count] for part in parts), count


def test_lookaheads_of_a_batch_start_together(model):
    """A full pass at every multiple of k, and one more for each AR step at which any image restarts."""
    settings = {"lookahead": 4, "threshold": 0.97, "guided_steps": 4, "accepted": "keep"}
    together, parts = run(model, **settings), [alone(model, i, **settings) for i in range(3)]
    full = [part.report.counts["head_calls"] // 12 for part in parts]
    assert max(full) > 2, "no image restarts: the case says nothing"
    restarts = {
        int(s)
        for part in parts
        for s in np.unique(part.report.maps["step"][part.report.maps["outcome"] == REDONE])
        if s % 4
    }
    assert together.report.counts["head_calls"] == 12 * (2 + len(restarts))


def test_both_tables_of_an_ar_step_share_their_head_calls(model, monkeypatch):
    settings = {"lookahead": 4, "threshold": 0.97, "guided_steps": 4}
    joint = run(model, **settings)

    monkeypatch.setattr(module, "denoise", lambda run, *batches: [denoise(run, b)[0] for b in batches])
    separate = run(model, **settings)
    torch.testing.assert_close(joint.latents, separate.latents, rtol=1e-4, atol=1e-4)
    assert joint.report.counts["head_rows"] == separate.report.counts["head_rows"]
    assert joint.report.counts["head_calls"] < separate.report.counts["head_calls"]


@pytest.mark.parametrize("start", [1, 3, 8, 50])
def test_steps_before_the_first_lookahead_are_plain_mars(model, plain, start):
    result = run(model, lookahead=4, threshold=-1.0, guided_steps=4, lookahead_start=start)
    early = torch.from_numpy(plain.report.maps["step"] < start)[:, None]
    torch.testing.assert_close(result.latents * early, plain.latents * early, rtol=1e-4, atol=1e-4)
    full = [step for step in range(8) if step <= start or step % 4 == 0]
    assert result.report.counts["head_calls"] == len(full) * 12 + (8 - len(full)) * 3
    assert (result.report.counts["accepted"] == 0) == (start >= 8)


@pytest.mark.parametrize("space", ["mean", "x0"])
def test_the_guided_mean_is_the_papers_mixture(space):
    """Against the posterior mean of a predicted x0 that is formed."""
    table, g = tables(7, 950), torch.Generator().manual_seed(0)
    x, eps, draft = (torch.randn(5, 4, generator=g) for _ in range(3))
    weights = guidance_weights("cos", len(table))
    out, cfg, none = torch.cat([eps, torch.zeros_like(eps)], 1)[None], torch.ones(5, 1), torch.zeros(5, 4)
    plain, guided = (HeadBatch(eps[None], cfg, x, none[None], table, draft, gamma) for gamma in ((), weights))
    for k, gamma in enumerate(weights):
        t = len(table) - 1 - k
        x0 = table.sqrt_recip_alphas_cumprod[t] * x - table.sqrt_recipm1_alphas_cumprod[t] * eps
        coef1, coef2 = table.posterior_mean_coef1[t], table.posterior_mean_coef2[t]
        mean = (coef1 * x0 + coef2 * x).float()
        _, found, _ = ancestral_step(step_numbers(plain, False)[k], x, out, cfg, none, None, space)
        torch.testing.assert_close(found, mean, rtol=1e-3, atol=1e-4)
        if space == "mean":
            want = (1 - gamma) * mean + gamma * draft
        else:
            want = (coef1 * ((1 - gamma) * x0 + gamma * draft) + coef2 * x).float()
        _, found, _ = ancestral_step(step_numbers(guided, False)[k], x, out, cfg, none, draft, space)
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("space", ["mean", "x0"])
def test_a_step_of_weight_1_does_not_depend_on_the_head(space):
    """What the skipped evaluation would have given changes the std only, within the learned range."""
    table = tables(4, 950)
    draft, x, eps = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    weights, cfg, none = guidance_weights("cos", len(table)), torch.ones(5, 1), torch.zeros(5, 4)
    assert [gamma == 1 for gamma in weights] == [True] + [False] * (len(table) - 1)
    numbers = step_numbers(HeadBatch(eps[None], cfg, x, none[None], table, draft, weights), False)[0]
    outs = torch.cat([eps, none], 1)[None], torch.zeros(1, 5, 8)
    found, without = (ancestral_step(numbers, x, out, cfg, none, draft, space)[1] for out in outs)
    torch.testing.assert_close(found, without)


def test_lookahead_0_keeps_annealed_steps(model):
    annealed = finish(mar(model, LABELS, MARSettings(**BASE, diffusion_steps_end=3), NOISE))
    assert torch.equal(run(model, lookahead=0, diffusion_steps_end=3).latents, annealed.latents)
    rejected = run(model, lookahead=2, threshold=1.01, diffusion_steps_end=3)
    torch.testing.assert_close(rejected.latents, annealed.latents, rtol=1e-4, atol=1e-4)


def test_whole_step_verification_redoes_whole_steps(model):
    report = run(model, lookahead=4, threshold=0.97, verify="step").report
    step, outcome = report.maps["step"], report.maps["outcome"]
    for image in range(3):
        for s in range(8):
            assert len(np.unique(outcome[image][step[image] == s])) == 1


def test_keeping_drafts_needs_no_guided_steps(model):
    report = run(model, lookahead=4, threshold=-1.0, accepted="keep").report
    assert report.counts["head_calls"] == 2 * 12


def test_a_full_pull_in_x0_space_returns_the_draft(model, monkeypatch):
    monkeypatch.setattr(module, "guidance_weights", lambda schedule, steps: (1.0,) * steps)
    pulled = run(model, lookahead=8, threshold=-1.0, guidance_space="x0")
    kept = run(model, lookahead=8, threshold=-1.0, accepted="keep")
    torch.testing.assert_close(pulled.latents, kept.latents, rtol=1e-4, atol=1e-4)


@given(st.sampled_from(["cos", "linear-down", "square", "linear-up", "none"]), st.integers(1, 200))
def test_guidance_weights_stay_in_range_and_keep_their_direction(schedule, steps):
    w = guidance_weights(schedule, steps)
    assert len(w) == steps and all(0 <= x <= 1 for x in w)
    if schedule == "none":
        assert set(w) == {0.0}
    elif schedule == "linear-up":
        assert list(w) == sorted(w)
    else:
        assert w[0] == pytest.approx(1) and list(w) == sorted(w, reverse=True)


def test_cosine_weight_is_the_papers_formula():
    w = guidance_weights("cos", 10)
    for i, t in enumerate(range(10, 0, -1)):
        assert w[i] == pytest.approx(1 - math.cos(math.pi * t / 20) ** 2)


def test_settings_extend_plain_mars():
    plain, hybrid = (tuple(f.name for f in dataclasses.fields(s)) for s in (MARBase, FastHybridSettings))
    assert hybrid[: len(plain)] == plain
