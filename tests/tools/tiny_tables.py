"""Tiny random checkpoints for the ablation tables of token models."""

from __future__ import annotations

from pathlib import Path

import torch
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig
from fastar_nodes.tools.training import recipes
from fastar_nodes.tools.training.judge import Judge

VQ = VQConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=8, codes=32, groups=4)
_SIZE = dict(dim=16, depth=1, heads=2, kv_heads=2, hidden=16, vocab=VQ.codes, condition="class", condition_size=10)


def scattered(net: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights that sample varied images; at initialisation all codes of a GPT are equally likely."""
    g = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=g) * (1.0 if p.ndim > 1 else 0.1) + (p.ndim < 2)
    return net


def new_folder(tmp_path_factory) -> Path:
    """A folder with the checkpoints of every table: tokenizer and judge."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    recipes.save_checkpoint(scattered(VQAutoencoder(VQ), 1), folder / "vq.safetensors", groups=4)
    recipes.save_checkpoint(Judge(), folder / "judge.safetensors", tolerance=0.05)
    return folder


def write_gpt(folder: Path, name: str, grid: int, seed: int, special: int = 0, **defaults: object) -> None:
    """A class-conditional GPT, or a PAR of ``special + 1`` regions, with ``defaults`` in its metadata."""
    net = scattered(Llama(LlamaConfig(**_SIZE, special=special)), seed)
    about = dict(heads=2, grid=grid, label_set="picture-book", defaults=defaults)
    recipes.save_checkpoint(net, folder / f"{name}.safetensors", **about)
