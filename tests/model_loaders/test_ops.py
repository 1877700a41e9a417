"""Products on a CPU: the rule, its results and packed copies; int8 weights, and every family of samplers on them."""

import gc

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks import ops
from fastar_nodes.model_loaders.networks.ops import Int8Linear, Linear, outputs, remark
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.registry import find
from fastar_nodes.samplers.settings import make
from fastar_nodes.samplers.tokens.draws import PairedDraws
from torch import nn

ONEDNN = pytest.mark.skipif(not ops._has_onednn(), reason="this PyTorch has no oneDNN")


@pytest.fixture(params=[True, False], ids=["AMD", "Intel"])
def amd(request, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every weight is large, on a processor of each vendor."""
    monkeypatch.setattr(ops, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(ops, "_is_amd", lambda: request.param)
    return request.param


def filled(width: int, height: int, bias: bool = True) -> Linear:
    torch.manual_seed(width + height)
    return Linear(width, height, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("height", [8, 7, 65])
def test_every_product_is_that_of_the_library(amd, height, bias):
    layer = filled(16, height, bias)
    with torch.inference_mode():
        for shape in ((0,), (1,), (2,), (3,), (5,), (200,), (1, 2), (2, 1, 3), (4, 0)):
            x = torch.randn(*shape, 16)
            expected = F.linear(x, layer.weight, layer.bias)
            for found in (layer(x), ops.linear(x, layer.weight, layer.bias)):
                assert found.shape == expected.shape
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        x = torch.randn(16, 5).T  # not contiguous
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


@ONEDNN
def test_the_rule(amd, monkeypatch):
    used: list[str] = []

    def spy(owner: object, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: used.append(name) or call(*a))

    for name in ("bmm", "baddbmm"):
        spy(torch, name)
    spy(F, "linear")
    spy(torch.ops.mkldnn, "_linear_pointwise")
    onednn, plain = ["_linear_pointwise"], ["linear"]
    one, two = (["baddbmm"], onednn) if amd else (plain, plain)
    wide = filled(ops.HALVES_WIDTH + 2, 4)
    cases = {
        "rows": [(filled(16, 8), rows, kind) for rows, kind in ((1, one), (2, two), (3, onednn), (300, onednn))],
        "odd heights have no halves": [(filled(16, 7), 1, plain), (filled(16, 7), 2, two)],
        "long rows": [(wide, 1, plain), (wide, 2, two), (wide, 3, onednn)],
    }
    with torch.inference_mode():
        for why, products in cases.items():
            for layer, rows, expected in products:
                used.clear()
                layer(torch.ones(rows, layer.in_features))
                assert used == expected, (why, rows)
        layer, kept = filled(16, 8), len(ops._PACKED)
        for rows, expected in ((2, two), (3, onednn)):  # without an owner nothing is packed
            used.clear()
            ops.linear(torch.ones(rows, 16), layer.weight, layer.bias)
            assert used == expected and len(ops._PACKED) == kept


def test_everything_else_is_left_to_the_library(amd, monkeypatch):
    layer, x = filled(16, 8), torch.randn(2, 16)
    monkeypatch.setattr(ops, "_has_onednn", lambda: pytest.fail("not F.linear"))
    monkeypatch.setattr(ops, "_is_amd", lambda: pytest.fail("not F.linear"))
    x.requires_grad_()
    layer.requires_grad_()(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    with torch.inference_mode():
        layer.to(torch.bfloat16)(x.bfloat16())
        layer.float().to("meta")(torch.ones(2, 16, device="meta"))
        monkeypatch.setattr(ops, "LARGE_WEIGHT", 16 * 8 + 1)
        filled(16, 8)(x)


@ONEDNN
def test_a_packed_copy_follows_its_weight_and_ends_with_its_layer(amd):
    before, layer, x = len(ops._PACKED), filled(16, 8), torch.randn(4, 16)
    with torch.no_grad():
        for change in (
            lambda layer: None,
            lambda layer: layer.weight.mul_(2),
            lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.randn(8, 16), requires_grad=False)),
        ):
            change(layer)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
            held = ops._PACKED[layer][1]
            assert layer(x) is not None and ops._PACKED[layer][1] is held, "packed once"
    assert len(ops._PACKED) == before + 1
    del layer
    gc.collect()
    assert len(ops._PACKED) == before


@ONEDNN
def test_the_first_layers_of_a_network_are_packed_whatever_else_is_loaded(amd, monkeypatch):
    monkeypatch.setattr(ops, "PACKED_BYTES", 2 * 16 * 8 * 4)
    nets = [nn.ModuleList([filled(16, 8), filled(16, 8), filled(16, 8)]) for _ in range(2)]
    with torch.inference_mode():
        for net in nets:
            ops.limit_packing(net)
            for layer in net:
                layer(torch.ones(4, 16))
    assert [[layer in ops._PACKED for layer in net] for net in nets] == [[True, True, False]] * 2


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
    layer = filled(40, 24, bias)
    x = torch.randn(rows, 40) * torch.logspace(-3, 3, rows)[:, None]
    mine, plain = Int8Linear.of(layer)(x).double(), _plain(layer, x)
    # A sum of halves may round to the other neighbour: one step of one product.
    assert (mine - plain).abs().max() <= 2e-2 * plain.abs().max()
    assert (mine - plain).norm() <= 2e-3 * plain.norm()


@pytest.mark.parametrize("rows", [2, 3, 16, 65])
def test_rows_do_not_influence_each_other(rows):
    layer, x = Int8Linear.of(filled(64, 96)), torch.randn(rows, 64)
    x[0] *= 1000
    together = layer(x)
    assert all(torch.equal(together[i : i + 1], layer(x[i : i + 1])) for i in range(rows))


def test_zeros_empty_batches_and_more_axes():
    layer = Int8Linear.of(filled(16, 8))
    assert torch.equal(layer(torch.zeros(2, 16)), layer.bias.expand(2, 8))
    assert layer(torch.zeros(2, 0, 16)).shape == (2, 0, 8)
    x = torch.randn(2, 3, 16)
    assert torch.equal(layer(x)[1, 2], layer(x[1, 2]))
    dead = filled(16, 8)
    dead.weight[3] = 0  # a pruned channel
    assert torch.equal(Int8Linear.of(dead)(x)[..., 3], dead.bias[3].expand(2, 3))


@pytest.mark.parametrize("kind", [nn.Linear, Int8Linear])
def test_some_outputs_of_a_layer(kind):
    layer, x = filled(16, 24), torch.randn(5, 16)
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
@pytest.mark.fast_cases("mar")
def test_mar_samplers(root, sampler):
    entry, found = find(sampler), {}
    for dtype in ("fp32", "int8"):
        model = load_mar(root / "demo" / "checkpoints" / "mar.safetensors", dtype)
        settings = make(entry.settings, {"steps": 8, "diffusion_steps": 10, "temperature": 0.0})
        condition = from_ids([0, 3])
        with torch.inference_mode():
            found[dtype] = finish(entry.run(model, condition, settings, PairedNoise(7, range(2))))
    a, b = found["fp32"].latents, found["int8"].latents
    assert 0 < (a - b).norm() < 0.6 * a.norm()  # another image, or the same; not noise
    assert found["int8"].report.note.startswith("int8 weights") and not found["fp32"].report.note


@pytest.mark.slow
def test_image_of_a_batch_equals_the_image_alone(root):
    model, entry = load_llamagen(root / "demo" / "checkpoints" / "llamagen-low.safetensors", "int8"), find("llamagen")
    with torch.inference_mode():
        made = [
            finish(entry.run(model, from_ids(ids), make(entry.settings, {}), PairedDraws(7, at)))
            for ids, at in (([1, 5], range(2)), ([5], range(1, 2)))
        ]
    assert torch.equal(made[0].codes[1:], made[1].codes)
    assert made[0].report.note.startswith("int8 weights")
