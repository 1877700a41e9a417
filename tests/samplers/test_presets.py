"""Presets: values that are settings at all, exact where they say so, and nobody else's business."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.samplers import presets
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid
from fastar_nodes.samplers.mar.lazymar import lazymar
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import (
    CacheSettings,
    CSpDSettings,
    FastHybridLazyMARSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
)
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs, make
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.mulosd import mulosd
from fastar_nodes.samplers.tokens.settings import (
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TokenSettings,
    ZipARSettings,
)
from fastar_nodes.samplers.tokens.zipar import zipar
from tiny_tokens import UP
from tokens_reference import tiny_gpt

KINDS = (
    FastHybridSettings,
    CacheSettings,
    LazyMARSettings,
    FastHybridLazyMARSettings,
    CSpDSettings,
    ZipARSettings,
    MuLoSDSettings,
)
REAL = presets.NAMES[1:]
SMALL = {"ar_steps": 8, "diffusion_steps": 6, "cfg": 2.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("demo", [True, False])
@pytest.mark.parametrize("name", REAL)
def test_values_are_settings_of_the_accelerator(kind, demo, name):
    meant = presets.values(kind, name, demo)
    assert meant, "a preset that sets nothing"
    assert asdict(make(kind, meant)) | meant == asdict(make(kind, meant)), "changed when it was checked"
    shared = {*knobs(MARSettings), *knobs(TokenSettings)}
    steps = {"ar_steps", "diffusion_steps", "diffusion_steps_end", "order"}
    allowed = steps if kind is LazyMARSettings and name == "fast" else set()
    assert set(meant) & shared == allowed, "guidance and, but for LazyMAR's fast, steps are not the preset's"


def test_every_part_has_every_preset():
    assert presets.NAMES == (presets.AS_SET, "exact", "balanced", "fast")
    for part, both in presets.PRESETS.items():
        for told in both:
            assert tuple(told) == REAL, part
            if part is not LazyMARSettings:  # only one of its own, beside the caches'
                assert len({str(told[name]) for name in REAL}) == len(REAL), f"{part}: two presets are one"


def test_what_is_set_stays():
    ours = FastHybridSettings(ar_steps=12, cfg=1.5, guidance_space="x0", threshold=0.5)
    assert presets.apply(ours, presets.AS_SET, True) == ours
    for name in REAL:
        told = presets.apply(ours, name, True)
        assert (told.ar_steps, told.cfg, told.guidance_space) == (12, 1.5, "x0")
        assert told.lookahead == presets.PRESETS[FastHybridSettings][0][name]["lookahead"]
    for plain in (MARSettings(), LlamaGenSettings(), PARSettings()):
        assert presets.apply(plain, "fast", True) == plain, "it has nothing to set"


def test_a_combination_takes_the_presets_of_its_parts():
    for demo in (True, False):
        for name in REAL:
            both = presets.values(FastHybridSettings, name, demo) | presets.values(CacheSettings, name, demo)
            assert presets.values(FastHybridLazyMARSettings, name, demo) == both
            if name != "fast":
                assert presets.values(LazyMARSettings, name, demo) == presets.values(CacheSettings, name, demo)


@pytest.mark.parametrize("width, k", [(768, 7), (1024, 8), (1280, 9), (0, 8)])
def test_lookahead_follows_the_papers_model_sizes(width, k):
    for name in ("balanced", "fast"):
        assert presets.values(FastHybridSettings, name, False, width)["lookahead"] == k
        assert presets.values(FastHybridSettings, name, True, width) == presets.values(FastHybridSettings, name, True)


@pytest.mark.parametrize("steps, values", [(64, (9, 5)), (32, (5, 4))])
def test_lazymar_follows_the_papers_numbers_of_steps(steps, values):
    settings = presets.apply(LazyMARSettings(ar_steps=steps), "balanced", False)
    assert (settings.refresh_period, settings.start_step) == values


def test_exact_costs_what_plain_mar_costs(model):
    def counts(sampler, settings, **more):
        report = finish(sampler(model, from_ids([1, 3]), settings, PairedNoise(5, range(2)), 5, **more)).report
        return {k: v for k, v in report.counts.items() if k.startswith(("head", "transformer"))}

    plain = counts(mar, MARSettings(**SMALL))
    for sampler, kind in ((fasthybrid, FastHybridSettings), (lazymar, LazyMARSettings)):
        assert counts(sampler, presets.apply(kind(**SMALL), "exact", True)) == plain
    assert counts(cspd, presets.apply(CSpDSettings(**SMALL), "exact", True), draft=model) == plain


@pytest.mark.parametrize("name", ["best", "", None, "Exact"])
def test_no_such_preset(name):
    with pytest.raises(UserError, match="^preset: .* is not one of as set, exact, balanced, fast"):
        presets.apply(CacheSettings(), name, True)


# ------------------------------------------------------------------------------------------------ exact means exact


def run(sampler, model, settings):
    noise = PairedNoise(5, range(2))
    return finish(sampler(model, from_ids([1, 3]), settings, noise, 5)).latents


@pytest.mark.parametrize("demo", [True, False])
def test_exact_caches_are_plain_mar_bit_for_bit(model, demo):
    plain = run(mar, model, MARSettings(**SMALL))
    assert torch.equal(run(lazymar, model, presets.apply(LazyMARSettings(**SMALL), "exact", demo)), plain)
    assert not torch.equal(run(lazymar, model, presets.apply(LazyMARSettings(**SMALL), "balanced", demo)), plain), (
        "nothing was tested"
    )


@pytest.mark.parametrize("demo", [True, False])
@pytest.mark.parametrize(
    "sampler, kind", [(fasthybrid, FastHybridSettings), (SAMPLERS["fasthybrid+lazymar"].run, FastHybridLazyMARSettings)]
)
def test_exact_fasthybrid_is_plain_mar_within_rounding(model, demo, sampler, kind):
    plain = run(mar, model, MARSettings(**SMALL))
    assert torch.allclose(run(sampler, model, presets.apply(kind(**SMALL), "exact", demo)), plain, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(run(sampler, model, presets.apply(kind(**SMALL), "fast", demo)), plain, atol=1e-2), (
        "nothing was tested"
    )


@pytest.mark.parametrize("demo", [True, False])
def test_exact_cspd_is_the_lossless_mode(demo):
    """That lossless keeps the distribution is shown where CSpD is tested."""
    assert presets.apply(CSpDSettings(mode="published"), "exact", demo).mode == "lossless"


@pytest.mark.parametrize("demo", [True, False])
def test_exact_zipar_is_llamagen_token_for_token(demo):
    few, model = {"cfg": 2.0, "top_k": 0}, tiny_gpt(grid=8)

    def codes(sampler, settings):
        return finish(sampler(model, from_ids([1, 3]), settings, PairedDraws(5, range(2)), 5)).codes

    plain = codes(llamagen, LlamaGenSettings(**few))
    assert torch.equal(codes(zipar, presets.apply(ZipARSettings(**few, mask_undecoded=False), "exact", demo)), plain)
    assert not torch.equal(codes(zipar, presets.apply(ZipARSettings(**few), "fast", demo)), plain), "nothing was tested"


@pytest.mark.parametrize("demo", [True, False])
def test_exact_mulosd_is_the_targets_own_picture_token_for_token(demo):
    few, target, draft = {"cfg": 2.0, "top_k": 0}, tiny_gpt(grid=8), tiny_gpt(grid=4, seed=1)
    unlike = MuLoSDSettings(**few, tau=0.0, acceptance_target=0.9, resample_window=2)

    def codes(preset):
        chosen = presets.apply(unlike, preset, demo)
        return finish(
            mulosd(target, from_ids([1, 3]), chosen, PairedDraws(5, range(2)), 5, draft=draft, up_sampler=UP)
        ).codes

    plain = finish(llamagen(target, from_ids([1, 3]), LlamaGenSettings(**few), PairedDraws(5, range(2)), 5)).codes
    assert torch.equal(codes("exact"), plain)
    assert not torch.equal(codes("fast"), plain), "nothing was tested"
