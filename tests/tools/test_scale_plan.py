"""The arithmetic of large sweeps, and its tables in docs/scale.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig
from fastar_nodes.tools import scale_plan

ROOT = Path(__file__).resolve().parents[2]


def test_the_documentation_holds_the_tables():
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for table in scale_plan.tables().split("\n\n"):
        assert table in text, "print them with python -m fastar_nodes.tools.scale_plan"


def test_operations_of_a_small_mar_by_hand():
    """One AR step and one diffusion step: nothing is known, the encoder reads 64 rows and the decoder 320."""
    found = scale_plan.mar("small", 8, 2, total=1000, head=200, steps=1, diffusion=1)
    products = 2 * 400 * (64 + 320)  # half of the transformer's weights each
    attention = 2 * 4 * 8 * (64**2 + 320**2)
    assert found.flops == 2 * (products + attention + 256 * 2 * 200)
    assert found.traffic == 2 * (800 + 200)


def test_operations_and_traffic_of_a_small_decoder_by_hand():
    flops, traffic = scale_plan.serial(8, 2, 1000, prefix=3, tokens=2)
    lengths = 3 + 4
    assert flops == 2 * (2 * 1000 * 5 + 2 * 4 * 8 * lengths)
    assert traffic == 2 * 1000 * 2 + 2 * scale_plan.BATCH * 2 * 2 * 8 * 2 * lengths


def test_sizes_are_the_models():
    """The parameters of the tables are those of the networks."""
    sizes = {"B": (768, 12, 12, 6, 1024), "L": (1024, 16, 16, 8, 1280), "H": (1280, 20, 16, 12, 1536)}
    for name, (width, depth, heads, blocks, head_width) in sizes.items():
        with torch.device("meta"):
            net = MAR(MARConfig(width, depth, depth, heads, 64, 256, 16, 1000, blocks, head_width))
        total, head = (sum(p.numel() for p in part.parameters()) for part in (net, net.diffloss))
        found = next(m for m in scale_plan.models() if m.name == f"MAR-{name}")
        assert scale_plan.mar(found.name, width, depth, total, head).flops == pytest.approx(found.flops, rel=1e-3)


def test_an_image_takes_the_longer_of_arithmetic_and_traffic():
    slow = scale_plan.Model("a", 256, scale_plan.FLOPS, 0.0, "")
    assert slow.seconds == 1 and slow.bytes == 196_608
    wide = scale_plan.Model("b", 256, 0.0, scale_plan.BANDWIDTH * scale_plan.BATCH, "")
    assert wide.seconds == 1
