"""Official sizes of Harmon and UniPic, and models of these sizes with random weights."""

from __future__ import annotations

import zlib

import torch

from ..model_loaders.networks.hybrid import Hybrid, HybridConfig, HybridModel
from ..model_loaders.networks.llama import qwen_config
from ..model_loaders.networks.mar import MARConfig
from .initialise import initialise_hybrid

# Official sizes: width, depth, heads, key heads, inner width of the language model; width, depth of encoder and of decoder, head depth and
# width of the MAR; tokens per side of the stored tables and of a picture; largest beta; AR steps.
SIZES = {
    "Harmon-0.5B": ((896, 24, 14, 2, 4864), (768, 12, 6, 1024), 16, 32, 0.999, 64),
    "Harmon-1.5B": ((1536, 28, 12, 2, 8960), (1280, 20, 12, 1536), 16, 32, 0.999, 64),
    "UniPic-1.5B": ((1536, 28, 12, 2, 8960), (1280, 20, 12, 1536), 32, 64, 0.2, 32),
}
_VOCAB, _TEXT, _TURN = 151_936, 151_643, (151_644, 151_645)


def official(size: str, grid: int | None = None) -> HybridConfig:
    """Configuration of an official size; ``grid``: tokens per side, None for those of the stored position tables."""
    (dim, depth, heads, keys, hidden), (width, blocks, head_depth, head_width), stored, *_ = SIZES[size]
    mar = MARConfig(
        dim=width, encoder_depth=blocks, decoder_depth=blocks, heads={768: 12, 1280: 16}[width], buffer=64,
        tokens=(grid or stored) ** 2, channels=16, classes=0, head_depth=head_depth, head_width=head_width,
    )  # fmt: skip
    llm = qwen_config(
        dim=dim, depth=depth, heads=heads, kv_heads=keys, head_dim=dim // heads, hidden=hidden, vocab=_VOCAB, tied=True,
        positions=32768,
    )  # fmt: skip
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
        initialise_hybrid(net)
    last = net.head.final_layer.linear
    net.to(device, dtype)
    last.float()
    return HybridModel(
        net.mar, f"{size}, random weights", max_beta=max_beta, hybrid=net, tokenize=_words, turn=_TURN, trained=side
    )
