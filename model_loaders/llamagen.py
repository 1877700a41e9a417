"""LlamaGen and PAR files to :class:`TokenModel`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from ..errors import UserError
from . import checkpoint as ck
from .networks.gpt import GPT, GPTConfig, TokenModel

IMAGENET_CLASSES = 1000
LARGEST_GRID = 128
# Pixels a token covers per side, in every released model (VQ-16).
_OFFICIAL_STRIDE = 16
_SIZES = re.compile(r"(?<!\d)(256|384|512)(?!\d)")
# PAR's files name their speed-up instead; all of them draw 384 pixels.
_PAR_NAME, _PAR_GRID = re.compile(r"par-(xl|xxl|1b|3b)-\d+x", re.IGNORECASE), 24
# The rotation table, which some files carry although it follows from the grid.
_TABLE = "freqs_cis"


def load_llamagen(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    heads: int | None = None,
) -> TokenModel:
    """Load a LlamaGen (class- or text-conditional) or a PAR of any size with the official parameter names.

    The shape follows from the weights; a PAR is known by its transition tokens, one less than the tokens it decides
    together. The head count follows from ``heads``, the metadata entry of that name, or the width of the official
    sizes. Metadata may also give ``grid``, ``label_set`` ("imagenet-1k" if there are 1000 classes) and ``name``.

    Args:
        path: see :func:`.checkpoint.read`; any nesting that DDP, DeepSpeed or FSDP leave.
        dtype: "auto", "fp32", "bf16" or "fp16", see :func:`.checkpoint.choose_dtype` (with bf16, as upstream).
        device: where the weights go.
        grid: tokens along one side of the picture (16, 24, 32 for 256, 384, 512 pixels), 2 to 128. No weight depends
            on it, so None takes it from the metadata, a stored rotation table, or the file's name.
        heads: attention heads, for files that do not say.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no LlamaGen, does not fit, or its metadata makes no sense; the grid is
            unknown, contradicts what the file says, or cannot be parted into PAR's regions.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    file = ck.read(path)
    ck.expect(file, "llamagen")
    state = {name: tensor for name, tensor in file.state.items() if name != _TABLE}
    config = _config(file, heads or ck.metadata_number(file, "heads", None, 1, 1024, int))
    side = _grid(file, config, grid)
    with torch.device("meta"):
        net = GPT(config)
    what = "a PAR" if config.special else "a LlamaGen"
    ck.load_strictly(net, state, file.path, what, dtype=compute, device=device)
    return TokenModel(
        net=net.eval().requires_grad_(False),
        name=ck.metadata_text(file, "name", file.path.stem),
        grid=side,
        label_set=ck.metadata_text(file, "label_set", "imagenet-1k" if _imagenet(config) else ""),
    )


def _imagenet(config: GPTConfig) -> bool:
    return config.condition == "class" and config.condition_size == IMAGENET_CLASSES


def _config(file: ck.Checkpoint, heads: int | None) -> GPTConfig:
    if any("embed" in name and tensor.ndim != 2 for name, tensor in file.state.items()):
        raise file.complain("does not fit a LlamaGen: its embeddings are misshaped")
    try:
        config = GPTConfig.from_state_dict(file.state, heads)
    except KeyError as e:
        raise file.complain(f"does not fit a LlamaGen: {e.args[0]} is missing") from e
    except (IndexError, ZeroDivisionError) as e:
        raise file.complain("does not fit a LlamaGen: its weights are misshaped") from e
    except ValueError as e:
        raise file.complain(f"cannot be used: {e}") from e
    c = config
    if min(c.dim, c.depth, c.hidden, c.vocab, c.condition_size) < 1:
        raise file.complain("does not fit a LlamaGen: a part of it is missing or empty")
    if math.isqrt(c.regions) ** 2 != c.regions:
        raise file.complain(
            f"holds {c.special} transition tokens, but a PAR has one less than a square number (3, 8, 15, ...)"
        )
    return config


def _grid(file: ck.Checkpoint, config: GPTConfig, wanted: int | None) -> int:
    """Tokens along one side of the picture.

    Raises:
        UserError: see :func:`load_llamagen`.
    """
    own, name = _grid_within(file, config), file.path.name
    named = {int(size) // _OFFICIAL_STRIDE for size in _SIZES.findall(file.path.stem)}
    if not named and config.special and _PAR_NAME.search(file.path.stem):
        named = {_PAR_GRID}
    if wanted is not None:
        if not 2 <= wanted <= LARGEST_GRID:
            raise UserError(f"grid: {wanted} tokens a side is outside 2 to {LARGEST_GRID}; 16, 24 and 32 are usual")
        if own not in (None, wanted):
            raise UserError(f"grid: {name} is for {own}x{own} tokens, not {wanted}x{wanted}; choose auto")
        if own is None and named and wanted not in named:
            told = " or ".join(f"{side}x{side}" for side in sorted(named))
            raise UserError(
                f"grid: {name} is for {told} tokens by its name, not {wanted}x{wanted}; choose auto, or rename the file "
                "if its name is wrong"
            )
    side = wanted or own or (named.pop() if len(named) == 1 else None)
    if side is None:
        why = "names more than one picture size" if named else "does not say how large its pictures are"
        raise UserError(f"grid: {name} {why}; choose 16 (256 pixels), 24 (384) or 32 (512), as it was trained")
    across = math.isqrt(config.regions)
    if side % across:
        raise UserError(
            f"grid: {side}x{side} tokens cannot be parted into the {across}x{across} regions of the PAR {name}; choose the "
            "grid it was trained with"
        )
    return side


def _grid_within(file: ck.Checkpoint, config: GPTConfig) -> int | None:
    """What the file itself says: its metadata, else the length of a stored rotation table."""
    stated = ck.metadata_number(file, "grid", None, 2, LARGEST_GRID, int)
    if stated is not None or _TABLE not in file.state:
        return stated
    rows, prefix = file.state[_TABLE].shape[:1], config.text_rows or 1
    side = math.isqrt(max(0, rows[0] - prefix - config.special)) if rows else 0
    return side if side >= 2 and rows[0] == side**2 + prefix + config.special else None
