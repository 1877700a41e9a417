"""Harmon and UniPic on the command line: official sizes, and a check of downloaded weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..model_loaders.networks.hybrid import Hybrid, HybridConfig, initialise
from ..model_loaders.networks.llama import qwen_config
from ..model_loaders.networks.mar import MARConfig
from ..model_loaders.networks.prompts import UNCONDITIONAL, HybridModel

# Official sizes: width, depth, heads, key heads, inner width of the language model; width, depth of encoder and of decoder, head depth and
# width of the MAR; tokens per side of the stored tables and of a picture; largest beta; AR steps.
SIZES = {
    "Harmon-0.5B": ((896, 24, 14, 2, 4864), (768, 12, 6, 1024), 16, 32, 0.999, 64),
    "Harmon-1.5B": ((1536, 28, 12, 2, 8960), (1280, 20, 12, 1536), 16, 32, 0.999, 64),
    "UniPic-1.5B": ((1536, 28, 12, 2, 8960), (1280, 20, 12, 1536), 32, 64, 0.2, 32),
}
_VOCAB, _TEXT, _TURN = 151_936, 151_643, (151_644, 151_645)
# Ids of the Qwen2.5 tokenizer, as recorded; the template is part of them.
RECORDED = {
    "a photo of a pink stop sign.": [264, 6548, 315, 264, 18217, 2936, 1841, 13],
    "a dog on the left and a cat on the right.": [264, 5562, 389, 279, 2115, 323, 264, 8251, 389, 279, 1290, 13],
}
_BEFORE, _AFTER = [151_644, 872, 198, 31115, 458, 2168, 25], [151_645, 198, 151_644, 77091, 198]
_UNCONDITIONAL = [*_BEFORE[:-1], 13, *_AFTER]
# Std of the tokens of a picture, whose latents were scaled to one.
_STD = (0.5, 2.0)


def official(size: str, grid: int | None = None) -> HybridConfig:
    """Configuration of an official size.

    Args:
        size: one of :data:`SIZES`.
        grid: tokens per side; None for those of the stored position tables.
    """
    (dim, depth, heads, keys, hidden), (width, blocks, head_depth, head_width), stored, *_ = SIZES[size]
    mar = MARConfig(
        dim=width,
        encoder_depth=blocks,
        decoder_depth=blocks,
        heads={768: 12, 1280: 16}[width],
        buffer=64,
        tokens=(grid or stored) ** 2,
        channels=16,
        classes=0,
        head_depth=head_depth,
        head_width=head_width,
    )
    llm = qwen_config(
        dim=dim,
        depth=depth,
        heads=heads,
        kv_heads=keys,
        head_dim=dim // heads,
        hidden=hidden,
        vocab=_VOCAB,
        tied=True,
        positions=32768,
    )
    return HybridConfig(mar, llm)


def _words(text: str) -> list[int]:
    """Arbitrary ids, one a word: as many as a tokenizer makes of common words."""
    return [zlib.crc32(word.encode()) % _TEXT for word in text.split()]


def random_hybrid(size: str, dtype: torch.dtype, device: str | torch.device) -> HybridModel:
    """A model of an official size at the size of its pictures, with random weights from the global random state; on "meta" without any.

    Prompts are read as arbitrary ids.
    """
    _, _, _, side, max_beta, _ = SIZES[size]
    with torch.device("meta" if str(device) == "meta" else "cpu"):
        net = Hybrid(official(size, side)).eval().requires_grad_(False)
    if str(device) != "meta":
        initialise(net)
    last = net.head.final_layer.linear
    net.to(device, dtype)
    last.float()
    return HybridModel(
        net.mar,
        f"{size}, random weights",
        max_beta=max_beta,
        hybrid=net,
        tokenize=_words,
        turn=_TURN,
        trained=side,
    )


# ------------------------------------------------------------------------------------------------ check of weights


def check(model: HybridModel) -> Iterator[tuple[str, bool, str]]:
    """Compare a loaded model with what is known of the official ones: (what, whether it agrees, what was found)."""
    found, side = model.hybrid.config, model.net.config.grid
    fits = [size for size in SIZES if official(size, side) == replace(found, llm=replace(found.llm, tied=True))]
    fits = [size for size in fits if SIZES[size][3] == model.trained]
    yield "shapes", bool(fits), fits[0] if fits else "none of " + ", ".join(SIZES)
    if fits:
        beta = SIZES[fits[0]][4]
        yield "largest beta", model.max_beta == beta, f"{model.max_beta:g}, official {beta:g}"
    parameters = list(model.hybrid.named_parameters())
    bad = next((name for name, p in parameters if not bool(p.isfinite().all())), None)
    yield "weights", bad is None, f"{len(parameters)} tensors" if bad is None else f"{bad} is not finite"
    expected = {text: [*_BEFORE, *ids, *_AFTER] for text, ids in RECORDED.items()}
    same = model.instruction(UNCONDITIONAL) == _UNCONDITIONAL
    same = same and all(model.prompt(text) == ids for text, ids in expected.items())
    yield "prompt ids", same, f"{len(expected)} recorded prompts and the unconditional one"


def check_tokens(model: HybridModel, latents: Any) -> tuple[str, bool, str]:
    """As :func:`check`, for latents [B, C, h, w] that were sampled."""
    std = float(model.to_tokens(latents.float()).std())
    return "token std", _STD[0] < std < _STD[1], f"{std:.3f}, expected about 1 ({_STD[0]:g} to {_STD[1]:g})"


def to_line(name: str, good: bool, found: str) -> str:
    """A line of the check."""
    return f"{'ok  ' if good else 'FAIL'} {name}: {found}"
