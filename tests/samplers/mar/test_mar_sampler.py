"""Plain MAR against the slow reference, and its schedules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.mar import MARModel
from fastar_nodes.samplers.conditioning import Condition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar import diffusion
from fastar_nodes.samplers.mar.loop import Plan
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.schedule import ORDERS, masked_after
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.tables import respaced_timesteps
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given
from hypothesis import strategies as st
from mar_reference import reference_mar

FEW = MARSettings(ar_steps=5, diffusion_steps=9, cfg=2.5)


CHANGES = [
    {},
    {"cfg": 1.0},
    {"cfg_schedule": "constant"},
    {"temperature": 0.8},
    {"ar_steps": 16},
    {"t_max": 999, "diffusion_steps": 30},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_equals_the_slow_reference(model, change):
    settings = dataclasses.replace(FEW, **change)
    noise = PairedNoise(11, (0, 3))
    times = respaced_timesteps(settings.diffusion_steps, settings.t_max or model.t_max)
    slow = reference_mar(model, (2, 4), settings, noise, times)
    fast = finish(mar(model, from_ids((2, 4)), settings, noise)).latents
    torch.testing.assert_close(fast, slow, rtol=2e-4, atol=2e-4 * float(slow.abs().max()))


def test_modulations_in_chunks_change_nothing(model, monkeypatch):
    noise = PairedNoise(3, (0, 1))
    whole = finish(mar(model, from_ids((1, 2)), FEW, noise)).latents
    monkeypatch.setattr(diffusion, "BUDGET", 1)
    torch.testing.assert_close(finish(mar(model, from_ids((1, 2)), FEW, noise)).latents, whole, rtol=1e-5, atol=1e-5)


def test_raster_decides_row_by_row(model):
    settings = dataclasses.replace(FEW, order="raster", ar_steps=16)
    report = finish(mar(model, from_ids((0,)), settings, PairedNoise(1, (0,)))).report
    assert report.maps["step"][0].flatten().tolist() == list(range(16))


def test_guidance_pulls_towards_the_class(model):
    noise, settings = PairedNoise(1, (0,)), dataclasses.replace(FEW, cfg_schedule="constant")
    free, weak, strong = (
        finish(mar(model, from_ids((0,)), dataclasses.replace(settings, cfg=s), noise)).latents for s in (1.0, 1.5, 6.0)
    )
    assert (strong - free).norm() > (weak - free).norm() > 0


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_mask_schedule_decides_every_token_once(sizes):
    tokens, steps = sizes
    left = [tokens, *masked_after(tokens, steps)]
    assert len(left) == steps + 1 and left[-1] == 0
    assert all(a - b >= 1 for a, b in zip(left, left[1:], strict=False))


@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(1, 80))),
    st.integers(0, 99),
)
def test_plan_partitions_the_picture(sizes, seed):
    tokens, steps, reach = sizes
    plan = Plan(PairedNoise(seed, (0, 1)).orders(tokens), MARSettings(ar_steps=steps))
    groups = [plan.ahead(s) for s in range(steps)]
    assert torch.equal(torch.cat(groups, 1).sort(1).values, torch.arange(tokens).expand(2, -1))
    for s in range(steps):
        assert torch.equal(plan.known(s), torch.cat([plan.reveal[:, :0], *groups[:s]], 1).sort(1).values)
        assert torch.equal(plan.ahead(s, reach), torch.cat(groups[s : s + reach], 1))
    assert all(1 <= c <= 3.0 for c in plan.cfg) and plan.cfg == sorted(plan.cfg)


def test_tokens_are_revealed_from_the_end_of_an_order():
    plan = Plan(ORDERS["raster"](torch.zeros(1, 4)), MARSettings(ar_steps=4))
    assert plan.reveal.tolist() == [[0, 1, 2, 3]]


def test_labels_of_another_set_are_refused(model):
    named = MARModel(model.net, "tiny", 1.0, label_set="picture-book")
    with pytest.raises(UserError, match="imagenet-1k.*picture-book"):
        finish(mar(named, Condition((1,), ("goldfish",), "imagenet-1k"), FEW, PairedNoise(0, (0,))))


def test_tokens_and_latents_are_inverse():
    from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig

    config = MARConfig(8, 1, 1, 2, 1, 9, 2 * 4, 3, 1, 8)
    patched = MARModel(MAR(config), "patched", latent_scale=0.25, patch=2)
    latents = torch.randn(2, 2, 6, 6)
    tokens = patched.to_tokens(latents)
    assert tokens.shape == (2, 9, 8)
    torch.testing.assert_close(patched.to_latents(tokens), latents)
    # Channel-major inside a token, as upstream's patchify: token 0 is the first 2 x 2 patch.
    torch.testing.assert_close(tokens[0, 0].view(2, 2, 2) / 0.25, latents[0, :, :2, :2])
