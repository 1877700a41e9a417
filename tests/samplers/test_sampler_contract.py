"""What every MAR sampler must do, whatever it accelerates. A new sampler is added to CASES and passes all of it.

Samplers of discrete tokens have a contract of their own in tokens/test_token_contract.py.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import COUNTS
from fastar_nodes.samplers.conditioning import Condition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid
from fastar_nodes.samplers.mar.lazymar import lazymar
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import (
    CSpDLazyMARSettings,
    CSpDSettings,
    FastHybridLazyMARSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
)
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.registry import MAR, SAMPLERS
from tiny_models import tiny_mar

FEW = {"ar_steps": 6, "diffusion_steps": 8, "cfg": 2.0}
HYBRID = FastHybridSettings(**FEW, lookahead=3, threshold=0.97, guided_steps=3)
CSPD, DRAFTED = CSpDSettings(**FEW, draft_length=2), partial(cspd, draft=tiny_mar(1))
LAZY = {"refresh_period": 3, "start_step": 1, "computed_ratio": 0.2, "block": 1}
CASES = {
    "mar": (mar, MARSettings(**FEW)),
    "mar, no guidance": (mar, dataclasses.replace(MARSettings(**FEW), cfg=1.0)),
    "mar, raster, constant cfg": (mar, MARSettings(**FEW, order="raster", cfg_schedule="constant")),
    "fasthybrid": (fasthybrid, HYBRID),
    "fasthybrid, no guidance": (fasthybrid, dataclasses.replace(HYBRID, cfg=1.0)),
    "fasthybrid, x0, step, keep": (
        fasthybrid,
        dataclasses.replace(HYBRID, guidance_space="x0", verify="step", accepted="keep"),
    ),
    "mar, annealed": (mar, MARSettings(**FEW, diffusion_steps_end=3)),
    "mar, speculation": (mar, MARSettings(**FEW, speculation=3)),
    "cspd": (DRAFTED, CSPD),
    "cspd, speculation": (DRAFTED, dataclasses.replace(CSPD, speculation=3)),
    "cspd, no guidance": (DRAFTED, dataclasses.replace(CSPD, cfg=1.0)),
    "cspd, published": (DRAFTED, dataclasses.replace(CSPD, mode="published")),
    "cspd, published, no alignment": (
        DRAFTED,
        dataclasses.replace(CSPD, mode="published", alignment=False, draft_length=1),
    ),
    "lazymar": (lazymar, LazyMARSettings(**FEW, **LAZY)),
    "lazymar, no guidance": (lazymar, dataclasses.replace(LazyMARSettings(**FEW, **LAZY), cfg=1.0)),
    "lazymar, cached head": (lazymar, LazyMARSettings(**FEW | {"diffusion_steps": 24}, **LAZY)),
    "lazymar, both branches": (
        lazymar,
        LazyMARSettings(**FEW, **LAZY, condition_cache=False),
    ),
    "fasthybrid+lazymar": (
        SAMPLERS["fasthybrid+lazymar"].run,
        FastHybridLazyMARSettings(**dataclasses.asdict(HYBRID), **LAZY),
    ),
    "cspd+lazymar": (
        partial(SAMPLERS["cspd+lazymar"].run, draft=tiny_mar(1)),
        CSpDLazyMARSettings(**dataclasses.asdict(CSPD), **LAZY),
    ),
    "fasthybrid, without position": (
        fasthybrid,
        dataclasses.replace(HYBRID, similarity="without position", threshold=0.9),
    ),
}


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


def run(case, model, images=(0, 1, 2), labels=(1, 4, 0), seed=5):
    sampler, settings = case
    return finish(sampler(model, from_ids(labels), settings, PairedNoise(seed, images), seed))


def test_every_registered_sampler_is_in_the_contract():
    listed = {getattr(sampler, "func", sampler) for sampler, _ in CASES.values()}
    missing = [name for name, entry in SAMPLERS.items() if entry.family == MAR and entry.run not in listed]
    assert not missing, f"add {', '.join(missing)} to CASES in this file"


def test_same_seed_same_picture(case, model):
    a, b = run(case, model), run(case, model)
    assert torch.equal(a.latents, b.latents)
    assert a.report.counts == b.report.counts


def test_another_seed_another_picture(case, model):
    assert (run(case, model).latents - run(case, model, seed=6).latents).abs().max() > 0.1


def test_an_image_does_not_depend_on_its_batch(case, model):
    together = run(case, model)
    for i, label in enumerate((1, 4, 0)):
        alone = run(case, model, images=(i,), labels=(label,))
        torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-4, atol=1e-4)
        for name, values in alone.report.maps.items():
            assert np.array_equal(values[0], together.report.maps[name][i]), name


def test_touches_nothing_global(case, model):
    def state():
        return (
            torch.random.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    before, weights = state(), {k: v.clone() for k, v in model.net.state_dict().items()}
    sampler, settings = case
    steps = sampler(model, from_ids((1,)), settings, PairedNoise(1, (0,)))
    next(steps)
    assert state() == before, "in the middle of a run"
    finish(steps)
    assert state() == before
    assert all(torch.equal(v, weights[k]) for k, v in model.net.state_dict().items())


def test_yields_every_step_and_can_be_left_at_any(case, model):
    sampler, settings = case
    seen = []
    for step in sampler(model, from_ids((1, 2)), settings, PairedNoise(1, (0, 1))):
        seen.append(step)
        assert (
            step.total == settings.ar_steps and step.latents.shape == (2, 4, 4, 4) and step.decided.shape == (2, 4, 4)
        )
    assert [s.done for s in seen] == list(range(1, settings.ar_steps + 1))
    counts = [int(s.decided.sum()) for s in seen]
    assert counts == sorted(counts) and counts[-1] == 32 and counts[0] < 32
    left = sampler(model, from_ids((1,)), settings, PairedNoise(1, (0,)))
    next(left)
    left.close()
    torch.testing.assert_close(run(case, model).latents, run(case, model).latents)


def test_report_adds_up(case, model):
    result = run(case, model)
    report, settings = result.report, case[1]
    if "draft_passes" in report.counts:
        assert 1 < report.counts["transformer_passes"] - report.counts["draft_passes"] <= settings.ar_steps
    else:
        assert report.counts["transformer_passes"] == settings.ar_steps
    unknown = sorted(set(report.counts) - set(COUNTS))
    assert not unknown, f"add {', '.join(unknown)} to COUNTS in reports/record.py, and explain it in docs/report.md"
    step, outcome = report.maps["step"], report.maps["outcome"]
    assert step.shape == outcome.shape == (3, 4, 4)
    assert step.min() == 0 and step.max() == settings.ar_steps - 1
    assert report.settings == dataclasses.asdict(settings) and report.images == 3 and report.seed == 5
    assert report.seconds > 0 and sum(report.phases.values()) <= report.seconds * 1.05
    if "accepted" in report.counts:
        assert report.counts["accepted"] == int((outcome == 1).sum())
        assert report.counts["rejected"] == int(((outcome == 2) | (outcome == 5)).sum())
        if report.similarity is not None:
            assert report.counts["accepted"] + report.counts["rejected"] == len(report.similarity)
    assert torch.isfinite(result.latents).all() and result.latents.dtype == torch.float32


def test_too_many_steps_and_bad_labels_say_so(case, model):
    sampler, settings = case
    with pytest.raises(UserError, match="ar_steps: 17 .* 16"):
        finish(sampler(model, from_ids((1,)), dataclasses.replace(settings, ar_steps=17), PairedNoise(1, (0,))))
    with pytest.raises(UserError, match="label 5 is outside the model's 0 to 4"):
        finish(sampler(model, from_ids((5,)), settings, PairedNoise(1, (0,))))
    with pytest.raises(UserError, match="holds no label"):
        finish(sampler(model, Condition((), ()), settings, PairedNoise(1, ())))
    with pytest.raises(UserError, match="asks for 2 images"):
        finish(sampler(model, from_ids((1, 2)), settings, PairedNoise(1, (0,))))
