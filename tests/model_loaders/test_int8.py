"""int8 weights: the product, what is replaced, and every family of samplers on them."""

import pytest
import torch
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.int8 import Int8Linear, outputs, quantize, remark
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.registry import find
from fastar_nodes.samplers.settings import make
from fastar_nodes.samplers.tokens.draws import PairedDraws
from torch import nn


def _layer(out: int, width: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias=bias).requires_grad_(False)


def _plain(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Weights and activations rounded one by one, in float64."""
    out = torch.zeros(len(x), layer.out_features, dtype=torch.float64)
    for i, row in enumerate(x):
        step = row.abs().max() / 127
        row = torch.round(row / step).double() * step
        for j, w in enumerate(layer.weight):
            scale = w.abs().max() / 127
            out[i, j] = (row * torch.round(w / scale).double()).sum() * scale
        if layer.bias is not None:
            out[i] += layer.bias
    return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_the_product_is_that_of_rounded_factors(rows, bias):
    layer = _layer(24, 40, bias)
    x = torch.randn(rows, 40) * torch.logspace(-3, 3, rows)[:, None]
    mine, plain = Int8Linear.of(layer)(x).double(), _plain(layer, x)
    # A sum of halves may round to the other neighbour: one step of one product.
    assert (mine - plain).abs().max() <= 2e-2 * plain.abs().max()
    assert (mine - plain).norm() <= 2e-3 * plain.norm()


@pytest.mark.parametrize("rows", [2, 3, 16, 65])
def test_rows_do_not_influence_each_other(rows):
    layer, x = Int8Linear.of(_layer(96, 64)), torch.randn(rows, 64)
    x[0] *= 1000
    together = layer(x)
    assert all(torch.equal(together[i : i + 1], layer(x[i : i + 1])) for i in range(rows))


def test_zeros_empty_batches_and_more_axes():
    layer = Int8Linear.of(_layer(8, 16))
    assert torch.equal(layer(torch.zeros(2, 16)), layer.bias.expand(2, 8))
    assert layer(torch.zeros(2, 0, 16)).shape == (2, 0, 8)
    x = torch.randn(2, 3, 16)
    assert torch.equal(layer(x)[1, 2], layer(x[1, 2]))
    dead = _layer(8, 16)
    dead.weight[3] = 0  # a pruned channel
    assert torch.equal(Int8Linear.of(dead)(x)[..., 3], dead.bias[3].expand(2, 3))


@pytest.mark.parametrize("kind", [nn.Linear, Int8Linear])
def test_some_outputs_of_a_layer(kind):
    layer, x = _layer(24, 16), torch.randn(5, 16)
    whole = layer if kind is nn.Linear else Int8Linear.of(layer)
    torch.testing.assert_close(outputs(whole, 8, 20)(x), whole(x)[:, 8:20])


def test_only_blocks_are_replaced(root):
    net = load_mar(root / "demo" / "checkpoints" / "mar.safetensors", "int8").net
    replaced = {name for name, module in net.named_modules() if isinstance(module, Int8Linear)}
    kept = {name for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    assert {"encoder_blocks.0.attn.qkv", "diffloss.net.res_blocks.0.adaLN_modulation.1"} <= replaced
    assert {"z_proj", "decoder_embed", "diffloss.net.input_proj", "diffloss.net.final_layer.linear"} <= kept
    assert "diffloss.net.time_embed.mlp.0" in kept and not any("_blocks" in name for name in kept)
    whole = load_mar(root / "demo" / "checkpoints" / "mar.safetensors", "fp32").net
    size = [sum(p.nbytes for p in n.parameters()) for n in (net, whole)]
    assert size[0] < 0.4 * size[1]
    assert remark(net).startswith("int8 weights") and remark(whole) == ""


@pytest.mark.parametrize("sampler", ["mar", "fasthybrid", "lazymar"])
def test_mar_samplers(root, sampler):
    entry, found = find(sampler), {}
    for dtype in ("fp32", "int8"):
        model = load_mar(root / "demo" / "checkpoints" / "mar.safetensors", dtype)
        settings = make(entry.settings, {"ar_steps": 8, "diffusion_steps": 10, "temperature": 0.0})
        condition = from_ids([0, 3])
        with torch.inference_mode():
            found[dtype] = finish(entry.run(model, condition, settings, PairedNoise(7, range(2)), 7))
    a, b = found["fp32"].latents, found["int8"].latents
    assert 0 < (a - b).norm() < 0.6 * a.norm()  # another picture, or the same; not noise
    assert found["int8"].report.note.startswith("int8 weights") and not found["fp32"].report.note


def test_image_of_a_batch_equals_the_image_alone(root):
    model, entry = load_llamagen(root / "demo" / "checkpoints" / "llamagen-low.safetensors", "int8"), find("llamagen")
    with torch.inference_mode():
        made = [
            finish(entry.run(model, from_ids(ids), make(entry.settings, {}), PairedDraws(7, at), 7))
            for ids, at in (([1, 5], range(2)), ([5], range(1, 2)))
        ]
    assert torch.equal(made[0].codes[1:], made[1].codes)
    assert made[0].report.note.startswith("int8 weights")


def test_quantize_leaves_other_modules():
    net = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.SiLU())]), "output": nn.Linear(8, 4)}
    )
    assert quantize(net) is net and isinstance(net["layers"][0][0], Int8Linear)
    assert type(net["output"]) is nn.Linear and type(net["layers"][0][1]) is nn.SiLU
