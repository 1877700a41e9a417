"""The self-speculative head: its cost, and where it is off. Its
distribution: ``test_paired_lossless.py`` and ``test_lossless.py``.
"""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.networks.mar import DiffusionHead
from fastar_nodes.networks.speed import Recordable
from fastar_nodes.reports.record import Report
from fastar_nodes.samplers import chain, diffusion_steps
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.coupling import Gaussian
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar import transformer
from fastar_nodes.samplers.mar.lazy import LazyTransformer
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.tables import respacing
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise
from fastar_nodes.samplers.speculation import DraftedSteps, Speculation
from tiny_models import tiny_mar

FEW = MARSettings(steps=4, diffusion_steps=8, cfg=2.0)


def run(model, labels=(1, 4, 0), images=(0, 1, 2), **changes):
    return finish(mar(model, from_ids(labels), dataclasses.replace(FEW, **changes), PairedNoise(5, images)))


def test_off_at_0_and_without_noise(model):
    off, cold = run(model), run(model, temperature=0.0)
    assert torch.equal(run(model, speculation=0).latents, off.latents)
    still = run(model, temperature=0.0, speculation=8)
    assert torch.equal(still.latents, cold.latents) and still.report.counts == cold.report.counts


@pytest.mark.parametrize(
    "change", [{}, {"cfg": 1.0}, {"temperature": 0.8}, {"t_max": 999, "diffusion_steps": 30}], ids=str
)
@pytest.mark.fast_cases(2)
def test_a_window_of_one_takes_the_heads_own_steps(model, change):
    off, one = run(model, **change), run(model, speculation=1, **change)
    scale = float(off.latents.abs().max())
    torch.testing.assert_close(one.latents, off.latents, rtol=1e-4, atol=1e-4 * scale)
    assert one.report.counts == off.report.counts


@pytest.mark.parametrize("length", [2, 3, 8, 64])
@pytest.mark.fast_cases("3")
def test_what_it_costs(model, length):
    """A call moves every row by a step at least; rows are the drafted states, twice with guidance."""
    off, on = run(model).report.counts, run(model, speculation=length).report.counts
    assert on["head_calls"] <= off["head_calls"]
    assert on["head_rows"] == 2 * on["drafted_steps"]
    assert on["drafted_steps"] <= on["head_calls"] * length * 3 * 7  # at most 7 tokens an AR step
    assert 0 < on["accepted_steps"] < on["drafted_steps"]
    # Every diffusion step of every token was either accepted or, once a call and row, put right.
    assert on["accepted_steps"] < 3 * 16 * 8 <= on["accepted_steps"] + on["head_rows"] // 2


def test_stale_predictions_that_never_change_are_always_right(model, monkeypatch):
    """If the head says the same at every state, drafts are right: a call does L steps."""
    monkeypatch.setattr(Speculation, "predict", lambda self, row, step, x: (x * 0 + 0.3, x * 0))
    verified: list[int] = []
    real = Speculation.verify
    monkeypatch.setattr(Speculation, "verify", lambda *a: verified.append(1) or real(*a))
    report = run(model, speculation=4, diffusion_steps=13).report
    # The first drafts are made of x0 = 0 and may fail; from then on 4 steps a call.
    assert len(verified) <= 4 * (4 + 4) and report.counts["accepted_steps"] >= 48 * 9


def test_states_are_evaluated_as_many_at_once_as_fit_the_budget(model, monkeypatch):
    """A state has 3 x 2 + 2 modulations of width 16 in each branch of guidance."""
    sizes, head = [], type(model.net.head)
    inner = head.denoise
    monkeypatch.setattr(head, "denoise", lambda self, x, m: sizes.append(len(x)) or inner(self, x, m))
    short = {"labels": (1,), "images": (0,), "steps": 1, "diffusion_steps": 5, "speculation": 4}
    whole = run(model, **short)
    for budget, states in ((2 * 2 * 8 * 16, 2), (2 * 2 * 8 * 16 - 1, 1), (1, 1)):
        sizes.clear()
        monkeypatch.setattr(transformer, "BUDGET", budget)
        parts = run(model, **short)
        torch.testing.assert_close(parts.latents, whole.latents, rtol=1e-4, atol=1e-3)
        assert max(sizes) == states and 2 * sum(sizes) == whole.report.counts["head_rows"]
        assert parts.report.counts["head_calls"] == len(sizes)


class Narrow:
    """A head that predicts zeros and, at every state, a std of e^-0.0001."""

    def at_states(self, row, k, x):
        return torch.cat([torch.zeros_like(x), torch.full_like(x, -1e-4)], 1)[None]


def test_redraws_go_on_until_one_is_kept():
    """Drafts of N(0, 1) at 3, of which the head's kernel is 1e-4 narrower: it rejects 9 - 1 times 1e-4 of them.

    Only between -1 and 1 is its density the larger one, by so little that it keeps one redraw of some 20,000; whatever
    replaces a draft lies there.
    """
    rows = 20_000
    noisy = diffusion_steps.DiffusionStep(
        data_x=0.0,
        data_per_prediction=1.0,
        x_coefficient=0.0,
        data_coefficient=1.0,
        log_std_middle=0.0,
        log_std_per_logit=1.0,
    )
    table = diffusion_steps.step_table([noisy, noisy._replace(log_std_middle=-math.inf)], torch.zeros(2, 1))
    zeros = torch.zeros(rows, 1)
    chains = chain.DiffusionBatch(zeros[None], torch.ones(rows, 1), zeros, torch.zeros(2, rows, 1), table)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(0))
    report = Report("mar", "tiny", {}, None, 1, "cpu")
    paths = Speculation(tiny_mar().net, Narrow(), chains, CounterRNG(keys), report)

    zero = zeros[:, None]
    accepted = paths.verify(np.arange(rows), DraftedSteps(zero, zero + 3, Gaussian(zero, zero)))
    kept = torch.from_numpy(accepted) == 1
    assert 5 < int((~kept).sum()) < 32
    assert bool((paths.x[kept] == 3).all()) and bool((paths.x[~kept].abs() <= 1).all())


def cached(model, end=None, **changes):
    settings = dataclasses.replace(FEW, speculation=4, diffusion_steps=30, diffusion_steps_end=end)
    look = partial(LazyTransformer, settings=CacheSettings(**changes))
    return finish(mar(model, from_ids((1,)), settings, PairedNoise(0, (0,)), make_transformer=look))


@pytest.mark.parametrize("end", [None, 3])
def test_a_cached_head_cannot_be_verified_with(model, end):
    """Nor where it is cached in the first AR steps only, as the last ones have few diffusion steps."""
    with pytest.raises(UserError, match="speculation: .*head_cache"):
        cached(model, end)


@pytest.mark.parametrize("full", [{"head_cache": False}, {"refresh_period": 1}], ids=str)
@pytest.mark.fast_cases(1)
def test_a_head_that_is_not_cached_can(model, full):
    assert cached(model, **full).report.counts["drafted_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 4])
def test_half_the_sequential_calls_on_the_demo(root, images):
    model = load_mar(root / "demo" / "checkpoints" / "mar.safetensors", "fp32")
    settings = MARSettings(steps=4, diffusion_steps=100, cfg=2.0, speculation=8)
    counts = finish(mar(model, from_ids(range(images)), settings, PairedNoise(7, range(images)))).report.counts
    assert counts["head_calls"] <= 4 * 96 / 2


def test_modulations_that_fit_the_budget_are_kept(monkeypatch):
    """Modulations of a row and a step: three of every block and two of the last layer, in both branches."""
    net, width = tiny_mar().net, 16 * (3 * 2 + 2)
    made = []
    modulations = DiffusionHead.modulations
    monkeypatch.setattr(DiffusionHead, "modulations", lambda self, e: made.append(e.shape) or modulations(self, e))
    table = diffusion_steps.step_table(respacing(5, 950).without_last_noise, torch.zeros(5, 16))
    rows = chain.DiffusionBatch(torch.zeros(2, 3, 16), torch.ones(3, 1), torch.zeros(3, 4), torch.zeros(5, 3, 4), table)
    index = torch.tensor([0, 2, 1]), torch.tensor([4, 0, 2])
    outs = []
    for budget, shapes in ((5 * 6 * width, [(5, 2, 3, 16)]), (5 * 6 * width - 1, [(2, 3, 16)] * 2)):
        made.clear()
        head = chain.SpeculationHead(net, net.head, rows, Report("mar", "tiny", {}, None, 1, "cpu"), budget)
        outs += [head.at_states(*index, torch.ones(3, 4)), head.at_states(*index, torch.ones(3, 4))]
        assert made == shapes
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_every_evaluation_of_the_head_may_be_compiled(model, monkeypatch):
    """Else a report would say "speed: compile" of a head that ran plain."""
    calls: list[int] = []

    def compiled(self, function, part):
        if part != "diffusion head":
            return function
        return lambda *args: calls.append(1) or function(*args)

    monkeypatch.setattr(Recordable, "compiled", compiled)
    for length in (1, 3):
        calls.clear()
        assert run(model, speculation=length).report.counts["head_calls"] == len(calls) > 0
