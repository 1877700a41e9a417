"""Loader of LlamaGen and PAR checkpoints, and the checks it shares with Tar's de-tokenizers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from ..errors import UserError
from . import checkpoint as ck
from .families import expect
from .networks.llama import Llama, LlamaConfig, TokenModel
from .networks.ops import quantize

IMAGENET_CLASSES = 1000
LARGEST_GRID = 128
# Pixels per token and side in every released model (VQ-16).
_OFFICIAL_STRIDE = 16
_SIZES = re.compile(r"(?<!\d)(256|384|512)(?!\d)")
# Official PAR file names give the speed-up instead of the image size, which is 384 pixels.
_PAR_NAME, _PAR_GRID = re.compile(r"par-(xl|xxl|1b|3b)-\d+x", re.IGNORECASE), 24
# RoPE table of some files; recomputed from the grid.
_ROPE_TABLE = "freqs_cis"


def load_llamagen(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    heads: int | None = None,
) -> TokenModel:
    """Load a LlamaGen (class- or text-conditional) or a PAR of any size with the official parameter names.

    The shape is derived from the weights. A PAR is identified by its transition tokens, one fewer than the tokens it
    predicts in parallel. The head count is ``heads``, the metadata entry ``heads``, or that of the official model of the same
    width. Other metadata entries: ``grid``, ``label_set`` ("imagenet-1k" for 1000 classes) and ``name`` (the file's stem).

    Args:
        path: see :func:`.checkpoint.read`; any nesting that DDP, DeepSpeed or FSDP write.
        dtype: "auto", "fp32", "bf16", "fp16" or "int8", see :func:`.checkpoint.choose_dtype` (with bf16, as upstream).
        device: device of the weights.
        grid: tokens per side (16, 24, 32 for 256, 384, 512 pixels), 2 to 128. The weights do not determine it; None takes
            it from the metadata, a stored RoPE table, or the file name.
        heads: attention heads, for files whose metadata and width do not determine them.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not a LlamaGen, does not fit, or has invalid metadata; the grid is unknown,
            contradicts the file, or is not divisible into PAR's regions.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    file = ck.read(path)
    expect(file, "llamagen")
    config = gpt_config(file, "a LlamaGen", heads or file.number("heads", None, 1, 1024, int))
    if math.isqrt(config.regions) ** 2 != config.regions:
        raise file.error(
            f"holds {config.special} transition tokens, but a PAR has one less than a square number (3, 8, 15, ...)"
        )
    side = _grid(file, config, grid)
    what = "a PAR" if config.special else "a LlamaGen"
    net = ck.build(file, what, lambda: Llama(config))
    imagenet = config.condition == "class" and config.condition_size == IMAGENET_CLASSES
    weights = file.filter(lambda name: name != _ROPE_TABLE)
    ck.load_strictly(net, weights, what, dtype=compute, device=device)
    return TokenModel(
        net=quantize(net) if dtype == ck.INT8 else net,
        name=file.name,
        grid=side,
        label_set=file.text("label_set", "imagenet-1k" if imagenet else ""),
    )


def gpt_config(file: ck.Checkpoint, what: str, heads: int | None) -> LlamaConfig:
    """Derive a GPT's shape from its weights.

    Args:
        what: the kind of network ("a LlamaGen"), for messages.
        heads: attention heads; None for those of the official model of the same width.

    Raises:
        UserError: weights are missing, empty or misshaped, or do not fit the head count.
    """
    if any("emb" in name and tensor.ndim != 2 for name, tensor in file.state.items()):
        raise file.error(f"does not fit {what}: its embeddings are misshaped")
    with ck.shape_errors(file, what):
        config = LlamaConfig.of_llamagen(file.state, heads)
    if min(config.dim, config.depth, config.hidden, config.vocab, config.condition_size) < 1:
        raise file.error(f"does not fit {what}: a part of it is missing or empty")
    return config


def find_grid(file: ck.Checkpoint, requested: int | None, stated: int | None, named: set[int], usual: str) -> int:
    """Tokens per side of the image: the requested number, else the one that the file states, else the one of its name.

    Args:
        stated: tokens per side that the file's content determines, or None.
        named: tokens per side of the image sizes in its name.
        usual: the usual values, for messages.

    Raises:
        UserError: the requested number is out of range or contradicts the file, or none is known.
    """
    name, known = file.path.name, named if stated is None else {stated}
    if requested is not None:
        if not 2 <= requested <= LARGEST_GRID:
            raise UserError(f"grid: {requested} tokens a side is outside 2 to {LARGEST_GRID}; {usual} are usual")
        if known and requested not in known:
            sizes = " or ".join(f"{side}x{side}" for side in sorted(known))
            raise UserError(f"grid: {name} is for {sizes} tokens, not {requested}x{requested}; choose auto")
        return requested
    if len(known) != 1:
        raise UserError(
            f"grid: {name} does not say how large its pictures are; choose one of {usual}, as it was trained"
        )
    return known.pop()


def grids_in_name(stem: str, sizes: re.Pattern[str]) -> set[int]:
    """Tokens per side of the image sizes in pixels that a file name contains."""
    return {int(size) // _OFFICIAL_STRIDE for size in sizes.findall(stem)}


def _grid(file: ck.Checkpoint, config: LlamaConfig, requested: int | None) -> int:
    """Tokens per side of the image.

    Raises:
        UserError: see :func:`load_llamagen`.
    """
    named = grids_in_name(file.path.stem, _SIZES)
    if not named and config.special and _PAR_NAME.search(file.path.stem):
        named = {_PAR_GRID}
    side = find_grid(file, requested, _stated_grid(file, config), named, "16 (256 pixels), 24 (384) and 32 (512)")
    across = math.isqrt(config.regions)
    if side % across:
        raise UserError(
            f"grid: {side}x{side} tokens cannot be divided into the {across}x{across} regions of the PAR {file.path.name}; choose the "
            "grid it was trained with"
        )
    return side


def _stated_grid(file: ck.Checkpoint, config: LlamaConfig) -> int | None:
    """Tokens per side from the metadata, else from the length of a stored RoPE table; None if neither determines it."""
    stated = file.number("grid", None, 2, LARGEST_GRID, int)
    if stated is not None or _ROPE_TABLE not in file.state:
        return stated
    rows, prefix = file.state[_ROPE_TABLE].shape[:1], config.text_rows or 1
    side = math.isqrt(max(0, rows[0] - prefix - config.special)) if rows else 0
    return side if side >= 2 and rows[0] == side**2 + prefix + config.special else None
