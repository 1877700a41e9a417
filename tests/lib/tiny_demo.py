"""Tiny configurations of the demo's networks, and checkpoints with random weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastar_nodes.lab.training import (
    binary_recipe,
    bitdance_recipe,
    draft_recipe,
    enlarging_recipe,
    hybrid_recipe,
    latent_recipe,
    recipes,
    ta_tok_recipe,
    tar_recipes,
    token_recipes,
)
from fastar_nodes.networks.autoencoder import KLConfig, VQConfig
from fastar_nodes.networks.enlarging import EnlargingConfig
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.mar import MARConfig
from fastar_nodes.networks.ta_tok import TATokConfig

KL = KLConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=8, groups=4)
MAR = MARConfig(32, 1, 1, 2, buffer=2, tokens=64, channels=8, classes=10, head_depth=1, head_width=16)
VQ = VQConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=8, codes=32, groups=4)
GPT_CONFIG = LlamaConfig(16, 1, 2, 2, hidden=16, vocab=VQ.codes, condition="class", condition_size=10)
TA_TOK = TATokConfig(
    width=24, code_width=8, codes=16, depth=1, heads=2, hidden=16, places=6, encoder_depth=1, encoder_heads=2,
    encoder_hidden=16, patch=4, side=6, input_size=24,
)  # fmt: skip
BINARY = replace(binary_recipe.BINARY, widths=(8, 8, 8, 8), blocks=1, groups=4)
LATENT_SAMPLERS = latent_recipe.Recipe(width=8, up_small=1, up_large=1, down_small=1)
ENLARGING = EnlargingConfig(width=8, fine=4, blocks=(0, 1, 0, 1))
BITDANCE = replace(bitdance_recipe.BITDANCE, dim=24, depth=1, heads=2, kv_heads=2, hidden=16)
BITDANCE_HEAD = replace(bitdance_recipe.HEAD, condition=BITDANCE.dim, width=64, depth=1, heads=1)
_language_config, _detokenizer_config = tar_recipes.language_config, tar_recipes.detokenizer_config


def language(codes: int = TA_TOK.codes) -> Any:
    """Configuration of a tiny Tar language model."""
    return replace(_language_config(codes), dim=32, depth=2, heads=2, kv_heads=1, queries=32, hidden=32)


def detokenizer(grid: int, width: int = TA_TOK.width, side: int = TA_TOK.side, vocab: int = VQ.codes) -> LlamaConfig:
    """Configuration of a tiny de-tokenizer."""
    config = _detokenizer_config(grid, width, side, vocab)
    return replace(config, dim=32, depth=2, heads=2, kv_heads=2, hidden=32)


def shrink_demo(patch: pytest.MonkeyPatch) -> None:
    """Make all networks of the demo's recipes tiny."""
    patch.setattr(recipes, "KL", KL)
    patch.setattr(recipes, "TARGET", MAR)
    patch.setattr(draft_recipe, "DRAFT", replace(MAR, dim=16))
    patch.setattr(hybrid_recipe, "TARGET", MAR)
    patch.setattr(token_recipes, "VQ", VQ)
    configs = {name: replace(GPT_CONFIG, special=r.config.special) for name, r in token_recipes.RECIPES.items()}
    small = {name: replace(token_recipes.RECIPES[name], config=config) for name, config in configs.items()}
    patch.setattr(token_recipes, "RECIPES", small)
    patch.setattr(ta_tok_recipe, "TA_TOK", TA_TOK)
    patch.setattr(latent_recipe, "DEMO", LATENT_SAMPLERS)
    for module in (tar_recipes, hybrid_recipe):
        patch.setattr(module, "language_config", language)
    patch.setattr(tar_recipes, "detokenizer_config", detokenizer)
    patch.setattr(binary_recipe, "BINARY", BINARY)
    patch.setattr(bitdance_recipe, "BITDANCE", BITDANCE)
    patch.setattr(bitdance_recipe, "HEAD", BITDANCE_HEAD)
    patch.setattr(enlarging_recipe, "PARTS", dict.fromkeys(enlarging_recipe.PARTS, ENLARGING))
    sides = {kind: {side // 4: 1 for side in counts} for kind, counts in enlarging_recipe.PICTURES.items()}
    patch.setattr(enlarging_recipe, "PICTURES", sides)


def scattered(net: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights that sample varied images; at initialisation all codes of a GPT are equally likely."""
    g = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=g) * (1.0 if p.ndim > 1 else 0.1) + (p.ndim < 2)
    return net


def sharp(net: torch.nn.Module, seed: int = 7, scale: float = 3.0) -> Any:
    """Random weights with a dominant most likely value that depends on the whole input."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1:
                embeds = "emb" in name or name == "abs_pe"
                p.copy_(torch.randn(p.shape, generator=g) * (1 if embeds else scale * p.shape[1] ** -0.5))
    return net.eval().requires_grad_(False)


def write_gpt(folder: Path, name: str, grid: int, seed: int, special: int = 0, **defaults: object) -> None:
    """A class-conditional GPT, or a PAR of ``special + 1`` regions, with ``defaults`` in its metadata."""
    net = scattered(Llama(replace(GPT_CONFIG, special=special)), seed)
    about = dict(heads=2, grid=grid, label_set="picture-book", defaults=defaults)
    recipes.save_checkpoint(net, folder / f"{name}.safetensors", **about)


def cells_of(text: str) -> list[list[str]]:
    """Cells of a Markdown table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
