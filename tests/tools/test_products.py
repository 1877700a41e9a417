"""The benchmark of matrix products: its shapes and its table; it measures nothing here."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.model_loaders.networks import matmul
from fastar_nodes.tools import products
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def forgotten():
    """Choices are those of this test."""
    matmul.configure()
    yield
    matmul.configure()


def test_shapes_of_official_models():
    with torch.device("meta"):
        mar, gpt = products.large(products.network("MAR-B")), products.large(products.network("LlamaGen-B"))
    assert {(2304, 768), (768, 768), (3072, 768), (3072, 1024), (1024, 1024)} <= set(mar)
    assert (16384, 768) in gpt and all(a * b >= matmul.LARGE_WEIGHT for a, b in [*mar, *gpt])


@pytest.fixture
def small(monkeypatch):
    """The networks are two layers of 512 x 512 and 1024 x 512."""
    monkeypatch.setattr(
        products, "network", lambda name: nn.Sequential(matmul.Linear(512, 512), matmul.Linear(512, 1024))
    )


def test_a_slow_choice_is_reported(monkeypatch, capsys, small):
    monkeypatch.setattr(
        products, "ratios", lambda shape, rows, pairs: ("packed", 1.2 if shape[0] == 1024 else 0.5, 1.0)
    )
    monkeypatch.setattr(products, "LONGEST", 60.0)
    assert products.main(["--models", "MAR-B", "--rows", "2", "4"]) == 1
    out = capsys.readouterr().out
    assert "| MAR-B | 512 x 512 | 2 | packed | 0.50 | 1.00 |" in out
    assert out.count("slower than F.linear: MAR-B | 1024 x 512") == 2 and "is 1.20." in out
    assert not matmul.choices(), "later runs in this process choose for themselves"


def test_long_timing_is_reported(monkeypatch, capsys, small):
    monkeypatch.setattr(products, "ratios", lambda shape, rows, pairs: ("packed", 0.5, 1.0))
    monkeypatch.setattr(products, "LONGEST", -1.0)
    assert products.main(["--models", "MAR-B", "--rows", "2"]) == 1
    assert "too long: MAR-B" in capsys.readouterr().out


def test_a_pair_compares_the_chosen_method_with_linear(small):
    assert products.choose(products.network("MAR-B"), [2]) > 0
    method, ratio, noise = products.ratios((512, 512), 2, 3)
    assert method in matmul.METHODS and ratio > 0 and noise > 0
    assert matmul.choices()
