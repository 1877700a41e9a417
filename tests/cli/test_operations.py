"""Operations an image at official depths, on the path of a GPU: every one is a launch there.

Counts do not depend on widths, so the networks here are narrow. Meta tensors take the path of a GPU; masked samplers read values
and run on the CPU, whose path is the same for few rows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fastar_nodes.cli.bench import official, official_gpt
from fastar_nodes.cli.bench_references import DTOK_SIZES
from fastar_nodes.cli.bench_work import counted
from fastar_nodes.model_loaders.networks.llama import Llama, TokenModel
from fastar_nodes.model_loaders.networks.mar import MAR, MARModel
from fastar_nodes.samplers.conditioning import FeatureCondition, from_ids
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def operations_a_step(steps, first: int, count: int) -> float:
    """Mean operations of ``count`` steps of a sampler, after ``first`` of them."""
    for _ in range(first):
        next(steps)
    with counted() as work:
        for _ in range(count):
            next(steps)
    return work.operations / count


def narrow_gpt(config, **changes):
    config = replace(config, dim=8 * config.heads, hidden=16, **changes)
    with torch.device("meta"):
        return Llama(config).eval().requires_grad_(False)


def test_mar_b():
    """64 AR steps of 100 diffusion steps from t = 950, guided: 376,730 operations before, 56 a diffusion step."""
    net = MAR(replace(official("MAR-B"), dim=24, head_width=16)).eval().requires_grad_(False)
    model = MARModel(net, "narrow", t_max=950)
    settings = MARSettings(ar_steps=64, diffusion_steps=100, cfg=3.0)
    found = operations_a_step(mar(model, from_ids((1,)), settings, PairedNoise(1, (0,))), 2, 2)
    short = operations_a_step(
        mar(model, from_ids((1,)), replace(settings, diffusion_steps=50), PairedNoise(1, (0,))), 2, 2
    )
    steps = [len(model_tables(model, n)) for n in (100, 50)]
    assert (found - short) / (steps[0] - steps[1]) <= 36
    assert 64 * found <= 250_000


def model_tables(model, count):
    from fastar_nodes.samplers.mar.tables import tables

    return tables(count, model.t_max)


def test_llamagen_xl_384():
    """576 guided tokens: 523,130 operations before."""
    model = TokenModel(narrow_gpt(official_gpt("LlamaGen-XL")), "narrow", 24)
    settings = LlamaGenSettings(cfg=4.0, top_k=2000)
    steps = llamagen(model, from_ids((1,)), settings, PairedDraws(1, (0,)))
    assert 576 * operations_a_step(steps, 2, 4) <= 220_000


def test_tar_1024():
    """4,096 tokens of the larger AR-DTok, guided: 527 operations a token before."""
    _, depth, heads = DTOK_SIZES["AR-DTok-LP"]
    config = replace(official_gpt("LlamaGen-XL"), depth=depth, heads=heads, kv_heads=heads)
    net = narrow_gpt(config, condition="features", condition_size=4, absolute=4 + 64 * 64)
    steps = llamagen(
        TokenModel(net, "narrow", 64),
        FeatureCondition((torch.zeros(4, 4),), ("",)),
        LlamaGenSettings(cfg=4.0, top_k=0),
        PairedDraws(1, (0,)),
    )
    assert operations_a_step(steps, 2, 4) <= 290
