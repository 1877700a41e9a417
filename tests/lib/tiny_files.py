"""Files of random weights, small enough to be made for a test."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from fastar_nodes.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.mar import MARConfig
from safetensors.torch import save_file
from tar_files import OF_CODES

MAR_SIZE = MARConfig(16, 1, 2, 2, buffer=2, tokens=16, channels=4, classes=10, head_depth=1, head_width=16)
GPT_SIZE = LlamaConfig(dim=16, depth=1, heads=2, kv_heads=2, hidden=24, vocab=24, condition="class", condition_size=10)
VQ_SIZE = VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=24, code_channels=4, groups=4)
# Reads the codes of the tiny Tar, of which there are 20.
READER = replace(OF_CODES, codes=20)


def write_gpt(path: Path, seed: int, grid: int = 4, config: LlamaConfig = GPT_SIZE, **metadata: object) -> Path:
    """A LlamaGen; with ``config.special`` a PAR."""
    about = {"label_set": "picture-book", "name": f"tiny {path.stem}", "defaults": {"cfg": 2.0, "top_k": 0}}
    return write(Llama(config), path, seed, heads=2, grid=grid, **{**about, **metadata})


def write_vq(path: Path, config: VQConfig = VQ_SIZE) -> Path:
    """A VQ tokenizer."""
    return write(VQAutoencoder(config), path, 7, groups=4, name="tiny vq")


def write(net: torch.nn.Module, path: Path, seed: int, **metadata: object) -> Path:
    """Random weights with text metadata."""
    g = torch.Generator().manual_seed(seed)
    state = {}
    for name, p in net.state_dict().items():
        flat = p.ndim < 2
        state[name] = torch.randn(p.shape, generator=g) * (0.1 if flat else 0.7 / max(1, p[0].numel()) ** 0.5)
        if flat and name.endswith("weight"):
            state[name] += 1
    return save(path, {"": state}, **metadata)


def save(path: Path, parts: dict[str, dict[str, torch.Tensor]], **metadata: object) -> Path:
    """Weights under their prefixes, with text metadata."""
    state = {prefix + name: t.contiguous() for prefix, part in parts.items() for name, t in part.items()}
    save_file(state, path, {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()})
    return path
