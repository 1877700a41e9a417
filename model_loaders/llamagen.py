"""Loader of LlamaGen and PAR checkpoints, and the checks it shares with Tar's de-tokenizers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from ..errors import UserError
from . import checkpoint as ck
from .families import INT8, choose_dtype, read
from .networks.llama import Llama, LlamaConfig, TokenModel

LARGEST_GRID = 128
# Image sizes in file names; a token has 16 pixels a side in every released model (VQ-16).
_SIZES = re.compile(r"(?<!\d)(256|384|512|1024)(?!\d)")
# Official PAR file names give the speed-up instead of the image size, which is 384 pixels.
_PAR_NAME, _PAR_GRID = re.compile(r"par-(xl|xxl|1b|3b)-\d+x", re.IGNORECASE), 24
_ROPE_TABLE = "freqs_cis"  # of some files; recomputed from the grid


def load_llamagen(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    heads: int | None = None,
) -> TokenModel:
    """Load a LlamaGen (class- or text-conditional) or a PAR of any size; shared arguments and errors: see :mod:`.checkpoint`.

    A PAR is identified by its transition tokens. The dtype "auto" prefers bf16, as upstream. ``grid``: tokens per side (16, 24, 32 for 256,
    384, 512 pixels), 2 to 128; None takes the metadata's, that of a stored RoPE table, or of the file name. ``heads`` None takes the
    metadata's, else those of the official model of that width. Other metadata entries: ``label_set`` ("imagenet-1k" for 1000 classes) and
    ``name``. A UserError also if the grid is unknown, contradicts the file, or is not divisible into PAR's regions.
    """
    compute = choose_dtype(dtype, device, "llamagen")
    file = read(path, "llamagen")
    config = gpt_config(file, heads or file.number("heads", None, 1, 1024))
    across = math.isqrt(config.regions)
    if across**2 != config.regions:
        expected = "a PAR has one less than a square number (3, 8, 15, ...)"
        raise file.error(f"holds {config.special} transition tokens, but {expected}")
    stated = file.number("grid", None, 2, LARGEST_GRID)
    if stated is None and _ROPE_TABLE in file.state:
        with ck.misfits(file):
            stated = square_root(len(file.state[_ROPE_TABLE]) - (config.text_rows or 1) - config.special)
    par = config.special and _PAR_NAME.search(file.stem)
    side = find_grid(file, grid, stated, {_PAR_GRID} if par else set())
    if side % across:
        regions = f"the {across}x{across} regions of the PAR {file.path.name}; choose the grid it was trained with"
        raise UserError(f"grid: {side}x{side} tokens cannot be divided into {regions}")
    imagenet = config.condition == "class" and config.condition_size == 1000
    weights = file.filter(lambda name: name != _ROPE_TABLE)
    return TokenModel(
        net=ck.load_strictly(weights, lambda: Llama(config), dtype=compute, device=device, int8=dtype == INT8),
        name=file.name,
        grid=side,
        label_set=file.text("label_set", "imagenet-1k" if imagenet else ""),
    )


def gpt_config(file: ck.Checkpoint, heads: int | None) -> LlamaConfig:
    """Derive a GPT's shape from its weights; ``heads`` None: those of the official model of the same width."""
    if any("emb" in name and tensor.ndim != 2 for name, tensor in file.state.items()):
        raise file.error(f"does not fit {file.what}: its embeddings are misshaped")
    with ck.misfits(file):
        config = LlamaConfig.of_llamagen(file.state, heads)
    if min(config.dim, config.depth, config.hidden, config.vocab, config.condition_size) < 1:
        raise file.error(f"does not fit {file.what}: a part of it is missing or empty")
    return config


def square_root(tokens: int) -> int | None:
    """Side of a square grid of so many tokens; None if it is no grid of 2x2 or more."""
    side = math.isqrt(max(0, tokens))
    return side if side >= 2 and side**2 == tokens else None


def find_grid(file: ck.Checkpoint, requested: int | None, stated: int | None, usual: set[int]) -> int:
    """Tokens per side of the image: requested, else stated by the file's content, else by its name, else ``usual``; a UserError if the
    requested number is out of range or contradicts the file, or none is known."""
    name = file.path.name
    known = {stated} if stated else {int(size) // 16 for size in _SIZES.findall(file.stem)} or usual
    if requested is not None:
        if not 2 <= requested <= LARGEST_GRID:
            raise UserError(f"grid: {requested} tokens a side is outside 2 to {LARGEST_GRID}; choose auto")
        if known and requested not in known:
            sizes = " or ".join(f"{side}x{side}" for side in sorted(known))
            raise UserError(f"grid: {name} is for {sizes} tokens, not {requested}x{requested}; choose auto")
        return requested
    if len(known) != 1:
        sizes = "16 (256 pixels), 24 (384), 32 (512) or 64 (1024)"
        raise UserError(f"grid: {name} does not say how large its pictures are; choose {sizes}, as it was trained")
    return known.pop()
