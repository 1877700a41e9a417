"""The benchmark of matrix products: its shapes and its table; it measures nothing here."""

from __future__ import annotations

import pytest
from fastar_nodes.model_loaders.networks import matmul
from fastar_nodes.tools import products

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def forgotten():
    """Choices are those of this test."""
    matmul.configure()
    yield
    matmul.configure()


def test_shapes_of_official_models():
    found = products.shapes(["MAR-B", "LlamaGen-B"])
    assert {(2304, 768), (768, 768), (3072, 768), (3072, 1024), (1024, 1024)} <= set(found)
    assert found[16384, 768] == "LlamaGen-B" and all(a * b >= matmul.LARGE_WEIGHT for a, b in found)


def test_a_slow_choice_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(products, "shapes", lambda names: {(2304, 768): "MAR-B", (1024, 1024): "MAR-B"})
    monkeypatch.setattr(
        products, "ratios", lambda shape, rows, pairs: ("packed", 1.2 if shape[0] == 1024 else 0.5, 1.0)
    )
    assert products.main(["--rows", "2", "4"]) == 1
    out = capsys.readouterr().out
    assert "| 2304 x 768 | 2 | packed | 0.50 | 1.00 |" in out
    assert out.count("slower than F.linear: 1024 x 1024") == 2


def test_a_pair_compares_the_chosen_method_with_linear():
    method, ratio, noise = products.ratios((512, 512), 2, 3)
    assert method in matmul.METHODS and ratio > 0 and noise > 0
    assert matmul.choices()
