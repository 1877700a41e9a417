"""Products on a CPU: the rule, its results and packed copies."""

import gc

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.lab.work.operations import counted
from fastar_nodes.networks import ops
from fastar_nodes.networks.ops import FAST, TORCH, EightBitLinear, Linear
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


def sum_of(operations, layer, dtype=torch.float32, transposed=False):
    """x + layer(inner) with the weight [[1, 2], [3, 4]]; the sum, x afterwards, and the number of operations."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    if transposed:
        x = x.T.contiguous().T
    inner = torch.tensor([[1.0, 1.0], [2.0, 0.0]], dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    with counted() as work:
        found = operations.add_product(x[None], layer, inner[None])
    return found[0].float().tolist(), x.float().tolist(), work.operations


def small(kind, bias=False, dtype=torch.float32):
    layer = kind(2, 2, bias=bias).requires_grad_(False)
    layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    if bias:
        layer.bias.zero_()
    return layer.to(dtype)


SUM = [[4.0, 9.0], [5.0, 10.0]]
X = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operations", [FAST, TORCH], ids=["fast", "torch"])
def test_a_product_is_added_in_one_call_to_the_tensor_itself(operations, dtype):
    with torch.inference_mode():
        found, x, calls = sum_of(operations, small(operations.Linear, dtype=dtype), dtype)
    assert found == x == SUM and calls == 1


@pytest.mark.parametrize("why", ["bias", "dtype", "order", "layer", "eight bits", "large", "training"])
def test_a_product_that_cannot_be_added_in_one_call_keeps_the_tensor(why, monkeypatch):
    layer = small(Linear, bias=why == "bias")
    if why == "layer":
        layer = small(nn.Linear)
    if why == "eight bits":
        layer = EightBitLinear(2, 2, None, torch.device("cpu")).requires_grad_(False)
        layer.weight.copy_(torch.tensor([[1, 2], [3, 4]]))
        layer.weight_scale.fill_(1.0)
    if why == "large":
        monkeypatch.setattr(ops, "LARGE_WEIGHT", 1)
    dtype = torch.float64 if why == "dtype" else torch.float32

    with torch.enable_grad() if why == "training" else torch.inference_mode():
        found, x, calls = sum_of(FAST, layer, dtype, transposed=why == "order")
    assert found == SUM and x == X and calls > 1
