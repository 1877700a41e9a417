"""Files of random weights, small enough to be made for a test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from fastar_nodes.model_loaders.networks.mar import MARConfig
from safetensors.torch import save_file

MAR_SIZE = MARConfig(
    dim=16, encoder_depth=1, decoder_depth=2, heads=2, buffer=2, tokens=16, channels=4, classes=10, head_depth=1,
    head_width=16,
)  # fmt: skip


def write(net: torch.nn.Module, path: Path, seed: int, **metadata: object) -> Path:
    """Random weights with text metadata."""
    g = torch.Generator().manual_seed(seed)
    state = {}
    for name, p in net.state_dict().items():
        flat = p.ndim < 2
        state[name] = torch.randn(p.shape, generator=g) * (0.1 if flat else 0.7 / max(1, p[0].numel()) ** 0.5)
        if flat and name.endswith("weight"):
            state[name] += 1
    save_file(state, path, metadata={k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()})
    return path
