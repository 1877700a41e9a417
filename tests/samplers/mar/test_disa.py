"""DiSA: diffusion steps annealed along the AR steps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.lazymar import lazymar
from fastar_nodes.samplers.mar.loop import FullTransformer, begin
from fastar_nodes.samplers.mar.mar import annealed_steps, annealed_tables, mar
from fastar_nodes.samplers.mar.settings import LazyMARSettings, MARSettings
from fastar_nodes.samplers.mar.tables import tables
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.settings import knobs
from hypothesis import given
from hypothesis import strategies as st

CURVES = knobs(MARSettings)["diffusion_steps_curve"][1].choices
FEW = MARSettings(ar_steps=6, diffusion_steps=12, cfg=2.0)


def run(model, **changes):
    return finish(mar(model, from_ids((1, 4)), dataclasses.replace(FEW, **changes), PairedNoise(5, (0, 1))))


@given(st.integers(1, 1000), st.integers(1, 1000), st.sampled_from(CURVES), st.integers(1, 300))
def test_steps_fall_from_the_first_to_the_last(a, b, curve, ar_steps):
    first, last = max(a, b), min(a, b)
    steps = annealed_steps(first, last, curve, ar_steps)
    assert len(steps) == ar_steps and steps[0] == first
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == (last if ar_steps > 1 else first)


@given(st.integers(1, 1000), st.sampled_from(CURVES), st.integers(1, 300))
def test_0_keeps_the_steps(first, curve, ar_steps):
    assert (
        annealed_steps(first, 0, curve, ar_steps) == [first] * ar_steps == annealed_steps(first, first, curve, ar_steps)
    )


def test_the_references_formula():
    """n_s = lower + int((S - 1 - s) / (S - 1) (upper - lower))."""
    assert annealed_steps(50, 5, "linear", 64) == [5 + 45 * (63 - s) // 63 for s in range(64)]
    assert annealed_steps(50, 5, "two-stage", 64) == [50] * 32 + [5] * 32
    half = annealed_steps(50, 5, "cosine", 64)
    assert half == [5 + int(round((math.cos(math.pi * s / 63) + 1) / 2 * 45, 9)) for s in range(64)]
    quarter, linear = (annealed_steps(50, 5, curve, 64) for curve in ("quarter cosine", "linear"))
    assert all(c >= n for c, n in zip(quarter, linear, strict=True))


@pytest.mark.parametrize("changes", [{}, {"diffusion_steps_curve": "cosine"}, {"diffusion_steps_end": 12}], ids=str)
def test_no_annealing_is_plain_mar_bit_for_bit(model, changes):
    few = {f.name: getattr(FEW, f.name) for f in dataclasses.fields(MARSettings)}
    plain = finish(mar(model, from_ids((1, 4)), MARSettings(**few), PairedNoise(5, (0, 1))))
    result = run(model, **changes)
    assert torch.equal(result.latents, plain.latents) and result.report.counts == plain.report.counts


@pytest.mark.parametrize("curve", CURVES)
def test_head_calls_are_the_steps_that_were_asked_for(model, curve):
    report = run(model, diffusion_steps_end=3, diffusion_steps_curve=curve).report
    counts = [len(tables(n, 950)) for n in annealed_steps(12, 3, curve, 6)]
    assert report.counts["head_calls"] == sum(counts) < 6 * len(tables(12, 950))


def test_the_first_ar_step_is_plain_mars(model):
    """The noise of fewer steps is a choice of the full number's, and the first AR step has them all."""
    plain, annealed = run(model), run(model, diffusion_steps_end=3)
    first = torch.from_numpy(plain.report.maps["step"] == 0)[:, None].expand_as(plain.latents)
    assert torch.equal(annealed.latents[first], plain.latents[first])
    assert not torch.equal(annealed.latents, plain.latents)


def test_more_steps_at_the_end_are_refused(model):
    with pytest.raises(UserError, match="^diffusion_steps_end: 13 is more than diffusion_steps, 12"):
        run(model, diffusion_steps_end=13)


@pytest.mark.parametrize(
    "changes, highest", [({"diffusion_steps_end": 3}, 950), ({"diffusion_steps_end": 3, "t_max": 999}, 999), ({}, 999)]
)
def test_few_steps_start_at_950_unless_the_setting_says_otherwise(model, changes, highest):
    official = dataclasses.replace(model, t_max=999)
    settings = dataclasses.replace(FEW, **changes)
    run = begin("mar", official, from_ids((1,)), settings, PairedNoise(5, (0,)), None, None, FullTransformer())
    assert {int(table.timestep_map[-1]) for table in annealed_tables(run, settings)} == {highest}


def test_many_steps_at_the_end_keep_the_checkpoints_t_max(model):
    official, settings = dataclasses.replace(model, t_max=999), MARSettings(diffusion_steps_end=50, ar_steps=6)
    run = begin("mar", official, from_ids((1,)), settings, PairedNoise(5, (0,)), None, None, FullTransformer())
    assert {int(table.timestep_map[-1]) for table in annealed_tables(run, settings)} == {999}


@pytest.mark.parametrize("end", [0, 3])
def test_lazymar_without_caches_is_annealed_mar_bit_for_bit(model, end):
    few = {"ar_steps": 6, "diffusion_steps": 12, "cfg": 2.0, "diffusion_steps_end": end}
    lazy = finish(lazymar(model, from_ids((1, 4)), LazyMARSettings(**few, refresh_period=1), PairedNoise(5, (0, 1))))
    assert torch.equal(lazy.latents, run(model, diffusion_steps_end=end).latents)
