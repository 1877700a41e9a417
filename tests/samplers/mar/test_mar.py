"""Plain MAR, DiSA and the diffusion: against the slow reference, and formulas with expected values by hand."""

import copy
import dataclasses
import math

import pytest
import torch
from fastar_nodes.networks.mar import MAR, MARConfig, MARModel
from fastar_nodes.samplers.annealing import annealed_steps
from fastar_nodes.samplers.chain import guide
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar import transformer
from fastar_nodes.samplers.mar.canvas import Order
from fastar_nodes.samplers.mar.lazy import lazymar
from fastar_nodes.samplers.mar.lazy.settings import LazyMARSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.prepare import make_order
from fastar_nodes.samplers.mar.schedule import ORDERS, masked_after
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.tables import constants, respaced_timesteps, respacing
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given
from hypothesis import strategies as st
from mar_reference import reference

FEW = {"steps": 5, "diffusion_steps": 9, "cfg": 2.5}
ANNEALED = {"steps": 6, "diffusion_steps": 12, "cfg": 2.0}


def run(model, noise=None, **settings):
    return finish(mar(model, from_ids((1, 4)), MARSettings(**{**FEW, **settings}), noise or PairedNoise(5, (0, 3))))


# Multiples of 999 / 8, 999 / 3 and 999 / 29, rounded.
NINE, FOUR = (0, 125, 250, 375, 500, 624, 749, 874, 950), (0, 333, 666, 950)
THIRTY = tuple(round(999 * i / 29) for i in range(30))


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({}, NINE),
        ({"cfg": 1.0, "temperature": 0.8}, NINE),
        ({"cfg_schedule": "constant"}, NINE),
        ({"steps": 16, "diffusion_steps": 4}, FOUR),
        ({"steps": 2, "t_max": 999, "diffusion_steps": 30}, THIRTY),
    ],
    ids=str,
)
@pytest.mark.fast_cases(1)
def test_equals_the_slow_reference(model, changes, times):
    fast, noise = run(model, **changes).latents, PairedNoise(5, (0, 3))
    slow, _ = reference(model, (1, 4), MARSettings(**{**FEW, **changes}), noise, times)
    torch.testing.assert_close(fast, slow, rtol=2e-4, atol=2e-4 * float(slow.abs().max()))


def test_modulations_of_as_many_steps_as_fit_the_budget_are_computed_at_once(model, monkeypatch):
    """A row and step have 3 x 2 + 2 vectors of width 16; the AR step has both branches of 2 x 16 tokens."""
    sizes, head = [], type(model.net.head)
    inner = head.modulations
    monkeypatch.setattr(head, "modulations", lambda self, x: sizes.append(len(x)) or inner(self, x))
    found = []
    for budget in (4 * 64 * 8 * 16, 4 * 64 * 8 * 16 - 1, 1):
        monkeypatch.setattr(transformer, "BUDGET", budget)
        found.append(run(model, steps=1).latents)
    torch.testing.assert_close(torch.stack(found[1:]), found[0].expand(2, -1, -1, -1, -1), rtol=1e-5, atol=1e-5)
    assert sizes == [4, 4, 1, 3, 3, 3, *[1] * 9]


def test_every_diffusion_step_evaluates_the_head(model):
    """Of plain MAR, also with more than 100 steps, the unit of LazyMAR's head period: both branches
    of 2 x 16 tokens.
    """
    counts = run(model, steps=1, diffusion_steps=150, t_max=999).report.counts
    assert (counts["head_calls"], counts["head_rows"]) == (150, 150 * 2 * 32)


def test_computed_rows_by_hand(model):
    """Both branches of 3 images read 2 class rows and 0, 2, 5
    and 10 tokens, and decode 2 + 16 rows at each of 4 AR steps.
    """
    settings = MARSettings(steps=4, diffusion_steps=2, cfg=2.0)
    counts = finish(mar(model, from_ids((1, 4, 0)), settings, PairedNoise(5, (0, 1, 2)))).report.counts
    assert counts["transformer_tokens"] == 2 * 3 * ((2 + 4 + 7 + 12) + 4 * 18) and counts["transformer_passes"] == 4


def test_tokens_and_latents_are_inverse():
    patched = MARModel(MAR(MARConfig(8, 1, 1, 2, 1, 9, 2 * 4, 3, 1, 8)), "patched", latent_scale=0.25, patch=2)
    latents = torch.randn(2, 2, 6, 6)
    tokens = patched.to_tokens(latents)
    assert tokens.shape == (2, 9, 8)
    torch.testing.assert_close(patched.to_latents(tokens), latents)
    # Channel-major inside a token, as upstream's patchify: token 0 is the first 2 x 2 patch.
    torch.testing.assert_close(tokens[0, 0].view(2, 2, 2) / 0.25, latents[0, :, :2, :2])


@pytest.mark.parametrize(
    ("tokens", "steps", "step", "left"), [(64, 39, 25, 32), (256, 51, 33, 128), (256, 60, 36, 145)]
)
def test_the_number_of_masked_tokens_is_rounded_to_fp32_before_the_floor(tokens, steps, step, left):
    """As published. The cosine of 26/39 of a right angle is 1/2, but the product 64 cos is 31.999... in float64."""
    assert tokens * math.cos(math.pi / 2 * (step + 1) / steps) < left
    assert masked_after(tokens, steps)[step] == left


def raster(**settings) -> Order:
    return make_order(torch.arange(15, -1, -1)[None], MARSettings(steps=4, cfg=3.0, **settings))


def test_the_guidance_scale_grows_with_the_decided_tokens():
    """1 + (cfg - 1) (L - m) / L, m masked tokens after the step: 14, 11, 6, and 1 for the last step, as published."""
    assert raster().cfg == pytest.approx([1 + 2 * 2 / 16, 1 + 2 * 5 / 16, 1 + 2 * 10 / 16, 1 + 2 * 15 / 16])
    assert raster(cfg_schedule="constant").cfg == (3.0,) * 4


@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(1, 80))),
    st.integers(0, 99),
)
def test_an_order_partitions_the_image(sizes, seed):
    tokens, steps, reach = sizes
    order = make_order(PairedNoise(seed, (0, 1)).orders(tokens), MARSettings(steps=steps))
    groups = list(order.plan.values())
    assert torch.equal(torch.cat(groups, 1).sort(1).values, torch.arange(tokens).expand(2, -1))
    assert all(group.numel() for group in groups)
    for s in range(steps):
        assert torch.equal(
            order.decided_before(s), torch.cat([order.decision_order[:, :0], *groups[:s]], 1).sort(1).values
        )
        assert torch.equal(order.positions_from(s, reach), torch.cat(groups[s : s + reach], 1))
    assert all(1 <= c <= 3.0 for c in order.cfg) and list(order.cfg) == sorted(order.cfg)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_a_permutation_whatever_the_batch(name):
    for grid in range(1, 33):
        # One token has no second entry to take flips from.
        random = PairedNoise(grid, range(3)).orders(grid * grid) if grid > 1 else torch.zeros(3, 2)[:, :1].long()
        if grid == 1 and name == "halton":
            continue
        orders = ORDERS[name](random)
        assert torch.equal(orders.sort(1).values, torch.arange(grid * grid).expand(3, -1))
        assert torch.equal(ORDERS[name](random[1:2]), orders[1:2])
        assert name != "random" or torch.equal(orders, random)


def revealed(order: str, *random: int) -> list[int]:
    """Positions in the order in which they are decided, of an image with this random order, its first entry last."""
    return ORDERS[order](torch.tensor([random]).flip(1))[0].tolist()


def test_raster_by_hand():
    random = (8, 0, 5, 1, 3, 7, 2, 6, 4)  # revealed from its end: 4, 6, 2, 7, 3, 1, 5, 0, 8
    assert revealed("raster", *random) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


# Halton points i = 1 .. 12 of bases 2 and 3 on a grid of 3 x 3, duplicates left out: (1, 1), (0, 2), (2, 0), (0, 1),
# (1, 2), (1, 0), (2, 1), (2, 2), (0, 0). The first entry of the random order is the shift (row, column), the second
# says what is mirrored: 1 transposes, then 2 mirrors the rows and 4 the columns; 8 does nothing.
@pytest.mark.parametrize(
    ("shift", "flips", "expected"),
    [
        (0, 8, [4, 2, 6, 1, 5, 3, 7, 8, 0]),
        (0, 1, [4, 6, 2, 3, 7, 1, 5, 8, 0]),
        (0, 2, [4, 8, 0, 7, 5, 3, 1, 2, 6]),
        (0, 4, [4, 0, 8, 1, 3, 5, 7, 6, 2]),
        (0, 3, [4, 0, 8, 3, 1, 7, 5, 2, 6]),
        (5, 8, [6, 4, 2, 3, 7, 8, 0, 1, 5]),
    ],
)
def test_halton_orders_by_hand(shift, flips, expected):
    assert revealed("halton", shift, flips, 1, 2, 3, 4, 5, 6, 7) == expected


def test_a_part_of_the_condition_may_have_a_guidance_scale_of_its_own(model):
    """null + s' (part - null) + s (whole - part), of the head's predictions; the variance logits are the whole's."""
    head = model.net.head
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, head.channels, generator=g)
    z = torch.randn(3, 3, model.net.config.dim, generator=g)
    out = head.denoise(x, head.modulations(head.time_embed(torch.tensor([300]))[:, None] + head.cond_embed(z)))
    whole, part, null = out[..., : head.channels]

    def guided(branches, *scales):
        return guide(branches, torch.tensor([scales]).expand(3, -1), head.channels)

    prediction, logits = guided(out, 7.5, 2.0)
    torch.testing.assert_close(prediction, null + 2.0 * (part - null) + 7.5 * (whole - part))
    assert torch.equal(logits, out[0, :, head.channels :])

    # With one scale for both, or a part that is nothing, these are the two branches of usual guidance.
    plain, _ = guided(out[[0, 2]], 7.5)
    torch.testing.assert_close(guided(out, 7.5, 7.5)[0], plain)
    torch.testing.assert_close(guided(out[[0, 2, 2]], 7.5, 3.0)[0], plain)


def test_annealed_steps_by_hand():
    """45 (1 - u) at u = 0, 1/4, 1/2, 3/4, 1 is 45, 33.75, 22.5, 11.25, 0."""
    assert annealed_steps(50, 5, 5) == [50, 38, 27, 16, 5]


def test_a_whole_fraction_does_not_fall_short_of_it():
    """1 - u of 11 AR steps is a tenth each: 10 (1 - u) is whole, though (1 - 0.9) * 10 is 0.999... in float64."""
    assert annealed_steps(11, 1, 11) == list(range(11, 0, -1))


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 300))
def test_steps_fall_from_the_first_to_the_last(a, b, ar_steps):
    first, last = max(a, b), min(a, b)
    steps = annealed_steps(first, last, ar_steps)
    assert len(steps) == ar_steps and steps == sorted(steps, reverse=True)
    assert (steps[0], steps[-1]) == (first, last if ar_steps > 1 else first)


def test_head_calls_are_the_steps_that_were_asked_for(model):
    """9 - floor(9 s / 5) + 3 steps at AR step s, of which those
    above t = 950 coincide: 12, 10, 8, 6, 4 and 3, all kept.
    """
    report = run(model, **ANNEALED, diffusion_steps_end=3).report
    assert report.counts["head_calls"] == 12 + 10 + 8 + 6 + 4 + 3


@pytest.mark.parametrize("end", [12, 13, 1000])
@pytest.mark.fast_cases(1)
def test_no_fewer_steps_at_the_end_are_plain_mar(model, end):
    """As a new node shows it: the number of diffusion steps, which may be lowered afterwards."""
    found = run(model, **ANNEALED, diffusion_steps_end=end)
    assert torch.equal(found.latents, run(model, **ANNEALED).latents)
    assert MARSettings(**ANNEALED, diffusion_steps_end=end).exact(4)


@pytest.mark.parametrize("end", [12, 13, 1000])
@pytest.mark.fast_cases(1)
def test_no_fewer_steps_at_the_end_start_where_plain_mar_starts(model, end):
    """At 999, of a model that chooses no timestep itself: only steps that fall to a few start at 950. The report says
    what was used, so that no end of the diffusion steps is in it.
    """
    official = dataclasses.replace(model, t_max=999)
    few = {"steps": 3, "diffusion_steps": 12, "cfg": 1.0}
    found = run(official, **few, diffusion_steps_end=end)
    assert torch.equal(found.latents, run(official, **few).latents)
    assert found.report.settings == run(official, **few).report.settings
    assert found.report.settings["diffusion_steps_end"] is None


def test_lazymar_without_caches_speculates_as_mar(model):
    settings = LazyMARSettings(**ANNEALED, speculation=3, refresh_period=1, head_cache=False)
    lazy = finish(lazymar(model, from_ids((1, 4)), settings, PairedNoise(5, (0, 3))))
    assert torch.equal(lazy.latents, run(model, **ANNEALED, speculation=3).latents)
    assert settings.lossless() and not settings.exact(4)
    assert not dataclasses.replace(settings, refresh_period=2).lossless(), "the caches approximate"


def test_lazymar_without_caches_is_annealed_mar_bit_for_bit(model):
    settings = LazyMARSettings(**ANNEALED, diffusion_steps_end=3, refresh_period=1)
    lazy = finish(lazymar(model, from_ids((1, 4)), settings, PairedNoise(5, (0, 3))))
    assert torch.equal(lazy.latents, run(model, **ANNEALED, diffusion_steps_end=3).latents)


@pytest.mark.parametrize(
    ("end", "own", "highest"), [(29, None, 950), (30, None, 999), (None, None, 999), (29, 999, 999)]
)
@pytest.mark.fast_cases("29-None-950", "30-None-999")
def test_fewer_than_30_steps_at_the_end_start_at_950(model, end, own, highest):
    """Unless the setting ``t_max`` says otherwise."""
    official = dataclasses.replace(model, t_max=999)

    def latents(t_max: int | None) -> torch.Tensor:
        # No noise within the diffusion: a table that is clipped has fewer steps and would take other entries.
        few = {"steps": 3, "diffusion_steps": 32, "cfg": 1.0, "temperature": 0.0}
        return run(official, **few, diffusion_steps_end=end, t_max=t_max).latents

    assert torch.equal(latents(own), latents(highest)) and not torch.equal(latents(own), latents(1949 - highest))


@pytest.mark.parametrize(("end", "entries"), [(6, [0, 2, 4, 6, 8, 10]), (5, [0, 2, 4, 7, 9]), (3, [0, 4, 8])])
def test_fewer_diffusion_steps_take_evenly_spaced_noise(model, end, entries):
    """Entries floor(k S / s) of S = 12. The last AR step is compared with a run of s steps that has this noise only.

    With ``z_proj`` at 0 the transformer's output does not depend on the tokens, so that both runs have the same.
    """
    net = copy.deepcopy(model.net)
    net.z_proj.weight.zero_()
    blind, labels, noise = dataclasses.replace(model, net=net), from_ids((1, 4)), PairedNoise(5, (0, 1))
    few = MARSettings(steps=2, diffusion_steps=12, cfg=2.0, diffusion_steps_end=end)
    annealed = finish(mar(blind, labels, few, noise))
    short = dataclasses.replace(few, diffusion_steps=end, diffusion_steps_end=None)

    class Spaced(PairedNoise):
        def step_noise(self, stream, count, tokens, channels):
            return super().step_noise(stream, 12, tokens, channels)[:, entries]

    expected = finish(mar(blind, labels, short, Spaced(5, (0, 1))))
    last = torch.from_numpy(annealed.report.maps["step"] == 1)[:, None].expand_as(annealed.latents)
    torch.testing.assert_close(annealed.latents[last], expected.latents[last], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(annealed.latents[~last], expected.latents[~last])


def test_one_timestep_has_the_log_variances_of_the_trained_schedule():
    """Of betas 4.12842e-5 and 4.61418e-5 at t = 0 and 1: between
    log(beta_1 (1 - abar_0) / (1 - abar_1)) and log(beta_0).
    """
    assert respaced_timesteps(1) == [0] and respacing(2, 0).timestep_map.tolist() == [0]
    assert constants([0]).posterior_log_variance_clipped.tolist() == pytest.approx([-10.7340825])
    numbers = respacing(1).steps[0]
    assert numbers.log_std_middle == pytest.approx((-10.7340825 - 10.0950301) / 4)
    assert numbers.log_std_per_logit == pytest.approx((-10.0950301 + 10.7340825) / 4)
