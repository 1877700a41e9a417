"""A tiny random MAR, quick enough for every test, and recorded-free noise."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig, MARModel


def tiny_mar(seed: int = 0, tokens: int = 16, heads: int = 2) -> MARModel:
    config = MARConfig(
        dim=16, encoder_depth=2, decoder_depth=2, heads=heads, buffer=2, tokens=tokens, channels=4, classes=5,
        head_depth=2, head_width=16,
    )  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    net = MAR(config).eval().requires_grad_(False)
    for name, p in net.named_parameters():
        p.copy_(torch.randn(p.shape, generator=g) * (0.5 / max(1, p.shape[-1]) ** 0.5 if p.ndim == 2 else 0.1))
        if "norm" in name and name.endswith("weight") or "_ln.weight" in name:
            p.add_(1.0)
    return MARModel(net, "tiny", latent_scale=0.5, t_max=950)


@pytest.fixture(scope="session")
def model() -> MARModel:
    return tiny_mar()
