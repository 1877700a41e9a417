"""Every method of a matrix product gives the same result; the choice is made once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.model_loaders.networks import matmul
from fastar_nodes.model_loaders.networks.matmul import Linear
from fastar_nodes.tools.parity import llamagen as parity_llamagen
from fastar_nodes.tools.parity import mar as parity_mar
from fastar_nodes.tools.parity.cases import judge

PARITY = Path(__file__).parents[1] / "parity"
# Cases that run the networks and the samplers.
RUNS = ("encdec", "head", "sample_tokens", "c2i.greedy", "par_4x.greedy", "zipar_c2i")


@pytest.fixture(autouse=True)
def own_choices(monkeypatch):
    """Small weights count as large, and choices of one test do not reach another."""
    monkeypatch.setattr(matmul, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(matmul, "_state", matmul._State())


def filled(wide: int, out: int, bias: bool = False) -> Linear:
    torch.manual_seed(0)
    return Linear(wide, out, bias).requires_grad_(False)


@pytest.mark.parametrize("method", [matmul.MEASURED, *matmul.METHODS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("wide", "out"), [(8, 6), (8, 7), (640, 32)])
def test_every_method_gives_the_same_product(method, bias, wide, out):
    matmul.configure(method)
    layer = filled(wide, out, bias)
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 6, 9, 40):
            x = torch.randn(rows, wide)
            for given in (x, x.T.contiguous().T, x[:, None], x[None], x.expand(2, -1, -1)):
                got = layer(given)
                assert got.shape == (*given.shape[:-1], out) and got.is_contiguous()
                torch.testing.assert_close(got, F.linear(given, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)
        assert layer(torch.zeros(0, wide)).shape == (0, out)


@pytest.mark.parametrize("method", [matmul.MEASURED, *matmul.METHODS])
@pytest.mark.parametrize("bias", [False, True])
def test_gelu_within_the_product_is_gelu(method, bias):
    matmul.configure(method)
    layer = filled(640, 32, bias)
    with torch.no_grad():
        for rows in (1, 2, 5, 200):
            x = 3 * torch.randn(2, rows, 640)
            exact = F.gelu(copy.deepcopy(layer).double()(x.double()))
            got = matmul.gelu(layer, x)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
            assert (got - F.gelu(layer(x), approximate="tanh")).abs().max() > 1e-4, "not its approximation"
    x = torch.randn(4, 640, requires_grad=True)
    matmul.gelu(layer, x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    other = torch.nn.Linear(640, 3)
    torch.testing.assert_close(matmul.gelu(other, x), F.gelu(other(x)))


@pytest.mark.slow
@pytest.mark.parametrize("method", matmul.METHODS)
@pytest.mark.usefixtures("one_thread")
def test_recorded_cases_agree_whatever_the_method(method):
    matmul.configure(method)
    cases = [*parity_mar.cases(PARITY / "mar"), *parity_llamagen.cases(PARITY / "llamagen")]
    run = [c for c in cases if any(f"/{name}" in c.name for name in RUNS)]
    assert len(run) >= 20
    with torch.no_grad():
        assert {o.verdict for o in map(judge, run)} == {"ok"}


def test_fixed_methods_are_the_ones_that_run(monkeypatch):
    called = []
    for name, call in matmul._CALLS.items():
        monkeypatch.setitem(matmul._CALLS, name, lambda *a, name=name, call=call: called.append(name) or call(*a))
    layer, usual = filled(16, 8), F.linear
    monkeypatch.setattr(matmul.F, "linear", lambda *a: called.append("linear") or usual(*a))
    with torch.no_grad():
        for method in matmul.METHODS:
            matmul.configure(method)
            layer(torch.randn(1, 16))
            layer(torch.randn(150, 16))
    many = {"columns": "linear", "halves": "linear"}  # methods for few rows only
    assert called == [name for m in matmul.METHODS for name in (m, many.get(m, m))]


def test_a_kind_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(matmul, "_measure", lambda kind, weight: measured.append(kind) or "columns")
    layer = filled(16, 8)
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 5, 8, 9, 32, 33, 129, 700, 1, 3):
            layer(torch.randn(rows, 16))
    assert [(k.width, k.rows) for k in measured] == [(16, 1), (16, 2), (16, 4), (16, 8), (16, 32), (16, 128), (0, 0)]
    assert set(matmul.choices().values()) == {"columns"}


def test_beyond_the_budget_the_nearest_row_length_decides_but_never_another_row_count(monkeypatch):
    monkeypatch.setattr(
        matmul, "_measure", lambda kind, weight: "columns" if kind == (16, 2, kind.threads) else "onednn"
    )
    with torch.no_grad():
        for wide in (16, 64):
            filled(wide, 8)(torch.randn(2, wide))
        monkeypatch.setattr(matmul._state, "spent", 1.0)
        for wide in (24, 60):
            filled(wide, 8)(torch.randn(2, wide))
        filled(16, 8)(torch.randn(8, 16))
    assert [method for kind, method in matmul.choices().items() if kind.width in (24, 60)] == ["columns", "onednn"]
    assert [method for kind, method in matmul.choices().items() if kind.rows == 8] == ["onednn"]


def test_the_fastest_method_is_chosen(monkeypatch):
    now = [0.0]
    cost = {"linear": 5.0, "columns": 2.0, "halves": 9.0, "onednn": 3.0, "packed": 1.9}

    def call(x, weight, bias):
        now[0] += cost["packed" if weight.is_mkldnn else running[0]]
        return x

    running = [""]
    for name in matmul.METHODS:
        monkeypatch.setitem(matmul._CALLS, name, lambda *a, name=name: running.__setitem__(0, name) or call(*a))
    monkeypatch.setattr(matmul, "_clock", lambda threads: lambda: now[0])
    layer, kind = filled(16, 8), matmul.Kind(16, 4, 1)
    assert matmul._measure(kind, layer.weight) == "packed"
    assert matmul._measure(kind._replace(rows=2), layer.weight) == "columns", "two rows are not packed"
    cost["packed"] = 4.7
    assert matmul._measure(kind, layer.weight) == "linear", "packing gains too little"
    cost |= {"packed": 4.9, "columns": 4.95, "onednn": 4.9}
    assert matmul._measure(kind._replace(rows=2), layer.weight) == "linear", "nothing gains enough"
    assert matmul._measure(kind._replace(rows=0), layer.weight) == "packed", "many rows: any gain"
    cost["onednn"] = 1.0
    assert matmul._measure(kind, layer.weight) == "linear", "only packed is timed"


def test_parts_are_those_of_loaded_weights_and_packed_once(monkeypatch):
    layers, other = [filled(16, 8) for _ in range(3)], filled(24, 8)
    packs: list[tuple[int, ...]] = []
    monkeypatch.setattr(matmul, "_pack", lambda w, pack=matmul._pack: packs.append(tuple(w.shape)) or pack(w))
    assert len(matmul._parts(layers[0].weight, 4, 5)) >= 5
    assert {tuple(p.shape) for p in matmul._parts(layers[0].weight, 4, 99)} == {(4, 16)}
    for rows in (1, 2, 4, 8):
        matmul._measure(matmul.Kind(16, rows, 1), layers[0].weight)
    assert packs == [(8, 16)] * matmul.PACKED_PARTS
    matmul._measure(matmul.Kind(24, 4, 1), other.weight)
    assert packs[matmul.PACKED_PARTS :] == [(8, 24)] * matmul.PACKED_PARTS


def test_packed_copies_follow_the_weight(monkeypatch):
    matmul.configure("packed")
    layer, x = filled(16, 8), torch.randn(3, 16)
    with torch.no_grad():
        first = layer(x)
        copied = copy.deepcopy(layer)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), 2 * first)
        torch.testing.assert_close(copied(x), first)
        layer.weight.data = layer.weight.data * 2
        torch.testing.assert_close(layer(x), 4 * first)


def test_packed_copies_are_bounded(monkeypatch):
    matmul.configure("packed")
    first, second, x = filled(16, 8), filled(16, 8), torch.randn(3, 16)
    monkeypatch.setattr(matmul, "PACKED_BYTES", first.weight.nbytes)
    assert first.packed().is_mkldnn and second.packed() is second.weight
    with torch.no_grad():
        torch.testing.assert_close(second(x), F.linear(x, second.weight))
        monkeypatch.setitem(matmul._CALLS, "packed", lambda *_: pytest.fail("packed"))
        monkeypatch.setitem(matmul._CALLS, "onednn", lambda x, *_: used.append(len(x)) or x[:, :8])
        used: list[int] = []
        second(torch.zeros(128, 16)), second(torch.zeros(129, 16))
        matmul.linear(torch.zeros(200, 16), second.weight), matmul.linear(torch.zeros(5, 16), second.weight)
    assert used == [129, 200], "without packing oneDNN is for many rows"
    del first
    assert not second.packed().is_mkldnn, "a refusal is remembered"


def test_other_types_and_training_take_the_usual_product(monkeypatch):
    monkeypatch.setattr(matmul, "_choose", lambda *_: pytest.fail("measured"))
    layer, x = Linear(16, 8), torch.randn(2, 16)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.any()
    with torch.no_grad():
        assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
        monkeypatch.setattr(matmul, "LARGE_WEIGHT", 16 * 8 + 1)
        layer.float()(x)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="fast is none of measured, linear"):
        matmul.configure("fast")


def test_which_methods_cover_which_products():
    even, odd, long = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, matmul.HALVES_WIDTH + 1)
    for rows, weight, wanted in (
        (1, even, {"linear", "columns", "halves"}),
        (1, long, {"linear", "columns"}),
        (1, odd, {"linear", "columns"}),
        (2, even, {"linear", "columns"}),
        (3, even, {"linear"}),
        (0, even, {"linear"}),
    ):
        assert {m for m in ("linear", "columns", "halves") if matmul._usable(m, rows, weight)} == wanted
