"""Operations an image at official depths, on the path of a
GPU: every one is a launch there unless torch.compile joins it.

Bounds are a little above the counts of methods that are written out: a guided diffusion step and a block of a token
network have an operation for every term of their equations. Counts do not depend on widths, so the networks here are
narrow. Meta tensors take the path of a GPU; masked samplers read values and run on the CPU, whose path is the same for
few rows.
"""

from dataclasses import replace

import pytest
import torch
from fastar_nodes.lab.work.operations import counted
from fastar_nodes.model_loaders.catalogue.official import DTOK_SIZES, official, official_gpt
from fastar_nodes.networks import ops
from fastar_nodes.networks.llama import Llama, TokenModel
from fastar_nodes.networks.mar import MAR, MARModel
from fastar_nodes.networks.ops import Linear
from fastar_nodes.networks.torch_state import dot_product_attention
from fastar_nodes.samplers.conditioning import FeatureCondition, from_ids
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.tables import respacing
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise


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


@pytest.mark.slow
def test_mar_b():
    """64 AR steps of 100 diffusion steps from t = 950, guided: 4,723 operations a step, 46 a diffusion step."""
    net = MAR(replace(official("MAR-B"), dim=24, head_width=16)).eval().requires_grad_(False)
    model = MARModel(net, "narrow", t_max=950)
    settings, noise = (MARSettings(64, count, 3.0) for count in (100, 50)), PairedNoise(1, (0,))
    found, short = (operations_a_step(mar(model, from_ids((1,)), s, noise), 2, 2) for s in settings)
    assert (found - short) / (len(respacing(100, 950)) - len(respacing(50, 950))) <= 46
    assert 64 * found <= 303_000


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 480), (torch.bfloat16, 554)])
def test_llamagen_xl_384(dtype, most):
    """576 guided tokens: 479 operations each, 12 a block; 554 in bf16, which casts for the rotation."""
    net = narrow_gpt(official_gpt("LlamaGen-XL")).to(dtype)
    model = TokenModel(net, "narrow", 24)
    settings = LlamaGenSettings(cfg=4.0, top_k=2000)
    steps = llamagen(model, from_ids((1,)), settings, TokenNoise(1, (0,)))
    assert operations_a_step(steps, 2, 4) <= most


@pytest.mark.slow
def test_tar_1024():
    """4,096 tokens of the larger AR-DTok, guided: 373 operations each, 11 a block."""
    _, depth, heads = DTOK_SIZES["AR-DTok-LP"]
    config = replace(official_gpt("LlamaGen-XL"), depth=depth, heads=heads, kv_heads=heads)
    net = narrow_gpt(config, condition="features", condition_size=4, absolute=4 + 64 * 64)
    model, features = TokenModel(net, "narrow", 64), FeatureCondition((torch.zeros(4, 4),), ("",))
    steps = llamagen(model, features, LlamaGenSettings(cfg=4.0, top_k=0), TokenNoise(1, (0,)))
    assert operations_a_step(steps, 2, 4) <= 374


def test_operations_are_counted_without_views():
    x, w, b = torch.ones(3, 8), torch.ones(5, 8), torch.ones(5)
    with torch.inference_mode(), counted() as work:
        y = torch.addmm(b, x.view(3, 8), w.t())
        (y + 1).sum().item()
    assert work.operations == 4 and work.waits == 1  # addmm, add, sum, item
    assert work.multiplications == 3 * 8 * 5


def test_the_share_of_attention():
    """2 x 3 queries over 5 keys of 8 numbers: scores, and sums of values; beside a product of 2 x 3 rows."""
    q = torch.ones(1, 2, 3, 8)
    k = torch.ones(1, 2, 5, 8)
    with torch.inference_mode(), counted() as work:
        dot_product_attention(q, k, k)
        q.flatten(0, 2) @ torch.ones(8, 10)
    assert work.attention == 2 * 6 * 5 * 8
    assert work.attention_share == 480 / (480 + 6 * 8 * 10)


def test_a_cast_is_counted_where_it_copies():
    x = torch.ones(3, 8)
    with torch.inference_mode(), counted() as work:
        x.to(torch.float32).contiguous().reshape(8, 3)
    assert work.operations == 0
    with torch.inference_mode(), counted() as work:
        x.to(torch.bfloat16)
        x.t().contiguous()
    assert work.operations == 2


@pytest.mark.parametrize("rows", [1, 2, 5, 300])
def test_products_are_counted_with_every_method(rows):
    linear = Linear(512, 1024)
    with torch.inference_mode(), counted() as work:
        linear(torch.ones(rows, 512))
    doubled = rows == 2 and ops._is_amd() and ops._has_onednn()
    assert work.multiplications == (4 if doubled else rows) * 512 * 1024


@pytest.mark.slow
@pytest.mark.fast_cases(1)
def test_the_command_counts_every_sampler(lab, tiny_demo):
    done = lab("operations --samplers llamagen,zipar --set zipar.window=1 --device cpu")
    assert done.code == 0, done
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines()]
    assert rows[0] == ["sampler", "operations", "waits", "TFLOP", "attention %"] and len(rows) == 4
    plain, zipar = (int(row[1].replace(",", "")) for row in rows[2:])
    assert plain > zipar > 100 and float(rows[2][3]) >= 0
