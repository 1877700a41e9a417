"""Official sizes of the published models: the configuration of every network that the catalogue names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from torch import nn

from ...networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from ...networks.binary import BinaryAutoencoder, BinaryConfig
from ...networks.bitdance import (
    CLASS_HEAD_DIM,
    OFFICIAL_HEADS,
    TEXT_HEAD_DIM,
    BitDanceClass,
    BitDanceConfig,
    BitDanceText,
    BlockNetwork,
    HeadConfig,
)
from ...networks.hybrid import Hybrid, HybridConfig
from ...networks.janus import Janus, JanusConfig
from ...networks.janus_vision import JanusVision, VisionConfig
from ...networks.llama import CLASS, FEATURES, TEXT, Llama, LlamaConfig, qwen_config
from ...networks.mar import MAR, MARConfig
from ...networks.nextstep import LatentConfig, NextStep, NextStepAutoencoder, NextStepConfig
from ...networks.ops import PackedLinear, shapes_only
from ...networks.ta_tok import TATok, TATokConfig

# Li et al. 2024, table of models: width, depth of encoder and of decoder, attention heads, head depth and width.
SIZES = {"MAR-B": (768, 12, 12, 6, 1024), "MAR-L": (1024, 16, 16, 8, 1280), "MAR-H": (1280, 20, 16, 12, 1536)}
# LlamaGen and PAR (Sun et al. 2024, table of models): width, depth, heads, and the grid of the official files.
TOKEN_SIZES = {
    "LlamaGen-B": (768, 12, 12, 16),
    "LlamaGen-L": (1024, 24, 16, 16),
    "LlamaGen-XL": (1280, 36, 20, 24),
    "LlamaGen-XXL": (1536, 48, 24, 24),
    "LlamaGen-3B": (3200, 24, 32, 24),
}
# Janus-Pro (Chen et al. 2025): width, depth, heads, inner width.
JANUS_SIZES = {"Janus-Pro-1B": (2048, 24, 16, 5632), "Janus-Pro-7B": (4096, 30, 32, 11008)}
# AR-DTok: width, depth, heads.
DTOK_SIZES = {"AR-DTok-B": (768, 12, 12), "AR-DTok-LP": (1280, 30, 20)}
# Harmon and UniPic: width, depth, heads, key heads, inner width of the language model; width, depth of encoder and of
# decoder, head depth and width of the MAR; tokens per side of the stored tables and of an image; largest beta; AR
# steps.
HYBRID_SIZES = {
    "Harmon-0.5B": ((896, 24, 14, 2, 4864), (768, 12, 6, 1024), 16, 32, 0.999, 64),
    "Harmon-1.5B": ((1536, 28, 12, 2, 8960), (1280, 20, 12, 1536), 16, 32, 0.999, 64),
    "UniPic-1.5B": ((1536, 28, 12, 2, 8960), (1280, 20, 12, 1536), 32, 64, 0.2, 32),
}
# Tar's language models (Han et al. 2025): width, depth, heads, key heads, inner width, whether the output is tied.
TAR_SIZES = {
    "Tar-1.5B": (1536, 28, 12, 2, 8960, True),
    "Tar-7B": (3584, 28, 28, 4, 18944, False),
}
# BitDance of ImageNet: width, depth, blocks of the diffusion head, its modulations.
BITDANCE_SIZES = {"B": (768, 24, 6, 2), "L": (1024, 32, 8, 2), "H": (1280, 40, 12, 3)}
# Published networks of BitDance: size, tokens of a block. The 14B ones read prompts.
BITDANCES = {
    "BitDance-B-1x": ("B", 1),
    "BitDance-B-4x": ("B", 4),
    "BitDance-B-16x": ("B", 16),
    "BitDance-L-1x": ("L", 1),
    "BitDance-H-1x": ("H", 1),
    "BitDance-14B-64x": ("14B", 64),
    "BitDance-14B-16x": ("14B", 16),
}
# Bits of a token of BitDance. Token ids of Qwen3, and those of image sizes, which a 14B adds beside its queries.
_BITS = 32
_QWEN3_WORDS = 151_669
_SIZE_TOKENS = 256
# Rows of the tables of Qwen2.5 and of Tar, which adds its codes.
QWEN_WORDS = 151_936
_TAR_WORDS = 217_206
# Rows of the table of words of NextStep: those of Qwen2.5-14B.
_NEXTSTEP_WORDS = 152_064
# Semantic codes of an image for an AR-DTok, and the width of a feature row of TA-Tok.
_FEATURE_ROWS = 729
_FEATURE_WIDTH = 1152
# Text condition of LlamaGen: rows and width of flan-t5-xl's features.
_TEXT_ROWS = 120
_TEXT_WIDTH = 2048
# The encoder of flan-t5-xl, under the names of transformers' T5Config.
_FLAN_T5_XL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
    "relative_attention_num_buckets": 32,
    "feed_forward_proj": "gated-gelu",
}


def official(size: str) -> MARConfig:
    """Configuration of an official size of MAR."""
    dim, depth, heads, head_depth, head_width = SIZES[size]

    return MARConfig(
        dim=dim,
        encoder_depth=depth,
        decoder_depth=depth,
        heads=heads,
        buffer=64,
        tokens=256,
        channels=16,
        classes=1000,
        head_depth=head_depth,
        head_width=head_width,
    )


def llama_config(dim: int, depth: int, heads: int, **more: object) -> LlamaConfig:
    """Configuration of a token model with the official inner width.

    That is two thirds of four times the width, in steps of 256.
    """
    hidden = math.ceil((8 * dim // 3) / 256) * 256
    about = {"dim": dim, "depth": depth, "heads": heads, "kv_heads": heads, "hidden": hidden, "vocab": 16384}
    return LlamaConfig(**{**about, **more})  # type: ignore[arg-type]


def official_gpt(size: str, special: int = 0) -> LlamaConfig:
    """Configuration of an official size of LlamaGen; with ``special`` transition tokens, of a PAR."""
    dim, depth, heads, _ = TOKEN_SIZES[size]
    return llama_config(dim, depth, heads, condition=CLASS, condition_size=1000, special=special)


def official_dtok(grid: int) -> LlamaConfig:
    """Configuration of the official AR-DTok for images of ``grid`` tokens per side."""
    dim, depth, heads = DTOK_SIZES["AR-DTok-LP"]
    rows = _FEATURE_ROWS + grid**2 - 1
    return llama_config(dim, depth, heads, condition=FEATURES, condition_size=_FEATURE_WIDTH, absolute=rows)


def official_janus(size: str) -> JanusConfig:
    """Configuration of an official size of Janus-Pro."""
    dim, depth, heads, hidden = JANUS_SIZES[size]
    shape = qwen_config(dim, depth, heads, heads, dim // heads, hidden, 16384, bias=False, tied=False, positions=16384)
    about = vars(shape) | {"theta": 1e4, "words": 102_400, "narrow": 8, "projected": dim}

    return JanusConfig(**about)


def official_vision(size: str) -> VisionConfig:
    """Configuration of what reads images for an official size of Janus-Pro: SigLIP-L and an aligner."""
    dim, *_ = JANUS_SIZES[size]
    return VisionConfig(width=1024, depth=24, heads=16, hidden=4096, patch=16, places=24, dim=dim)


def official_hybrid(size: str, grid: int | None = None) -> HybridConfig:
    """Configuration of an official size of Harmon or UniPic.

    Args:
        grid: tokens per side; None for those of the stored position tables.
    """
    (dim, depth, heads, keys, hidden), (width, blocks, head_depth, head_width), stored, _, _, _ = HYBRID_SIZES[size]

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
        vocab=QWEN_WORDS,
        tied=True,
        positions=32768,
    )
    return HybridConfig(mar, llm)


def official_tar(size: str) -> LlamaConfig:
    """Configuration of an official size of Tar's language model."""
    dim, depth, heads, keys, hidden, tied = TAR_SIZES[size]
    return qwen_config(dim, depth, heads, keys, dim // heads, hidden, _TAR_WORDS, tied=tied)


def official_ta_tok() -> TATokConfig:
    """Configuration of the official TA-Tok without its image encoder, which no image of a prompt needs."""
    return TATokConfig(width=_FEATURE_WIDTH, code_width=1536, codes=65536, depth=3, heads=12, hidden=3072, places=16)


def _of_tokens(name: str) -> Llama:
    """A LlamaGen ("LlamaGen-XL", with "-T2I" behind it of texts) or a PAR ("PAR-XL-4x")."""
    if name.startswith("PAR-"):
        _, size, parallel = name.split("-")
        regions = int(parallel.removesuffix("x"))
        return Llama(official_gpt(f"LlamaGen-{size}", regions - 1))

    config = official_gpt(name.removesuffix("-T2I"))
    if name.endswith("-T2I"):
        config = replace(config, condition=TEXT, condition_size=_TEXT_WIDTH, text_rows=_TEXT_ROWS)
    return Llama(config)


def _of_dtok(name: str) -> Llama:
    """An AR-DTok by the pixels of its images, "AR-DTok-LP-512"."""
    pixels = int(name.rpartition("-")[2])
    return Llama(official_dtok(pixels // 16))


def _of_autoencoder(name: str) -> nn.Module:
    """KL-16, VQ-16 or VQ-8."""
    if name == "KL-16":
        return KLAutoencoder(
            KLConfig(
                ch=128,
                ch_mult=(1, 1, 2, 2, 4),
                blocks=2,
                z_channels=16,
                encoder_attention=frozenset({4}),
                decoder_attention=frozenset(),
            )
        )

    ch_mult = (1, 1, 2, 2, 4) if name == "VQ-16" else (1, 2, 2, 4)
    return VQAutoencoder(VQConfig(ch=128, ch_mult=ch_mult, blocks=2, z_channels=256, codes=16384))


def official_binary() -> BinaryConfig:
    """Configuration of BitDance's autoencoder of stride 16 and 32 bits a token, ae_d16c32."""
    return BinaryConfig(widths=(256, 256, 512, 512, 1024), blocks=4, z_channels=32)


def official_bitdance(name: str) -> BlockNetwork:
    """An official BitDance, a key of :data:`BITDANCES`."""
    size, block = BITDANCES[name]
    if size == "14B":
        return _bitdance_of_prompts(block)

    dim, depth, head_depth, modulations = BITDANCE_SIZES[size]
    heads = OFFICIAL_HEADS[dim]
    shape = llama_config(dim, depth, heads, vocab=0, condition=CLASS, condition_size=1000, tied=True, eps=1e-6)
    config = BitDanceConfig(**vars(shape), rows=64, block=block, tokens=256)
    head = HeadConfig(
        channels=_BITS,
        condition=dim,
        width=dim,
        depth=head_depth,
        modulations=modulations,
        heads=dim // CLASS_HEAD_DIM if block > 1 else 0,
    )
    return BitDanceClass(config, head)


def _bitdance_of_prompts(block: int) -> BitDanceText:
    """A 14B: Qwen3-14B with token ids for the sizes and for the queries of a block."""
    dim = 5120
    config = qwen_config(
        dim=dim,
        depth=40,
        heads=40,
        kv_heads=8,
        head_dim=128,
        hidden=17408,
        vocab=_QWEN3_WORDS + _SIZE_TOKENS + block - 1,
        tied=True,
        positions=40960,
        norms=True,
        bias=False,
    )
    head = HeadConfig(
        channels=_BITS,
        condition=dim,
        width=dim,
        depth=6,
        modulations=2,
        heads=dim // TEXT_HEAD_DIM,
        bounded=True,
    )
    return BitDanceText(config, head, block)


def official_nextstep() -> NextStepConfig:
    """Configuration of NextStep-1 and 1.1: Qwen2.5-14B, and a head of 157 million weights."""
    shape = qwen_config(
        dim=5120,
        depth=48,
        heads=40,
        kv_heads=8,
        head_dim=128,
        hidden=13824,
        vocab=_NEXTSTEP_WORDS,
        tied=True,
        positions=131_072,
    )
    return NextStepConfig(**vars(shape), token=64, patch=2, head_width=1536, head_depth=12)


def _of_latents(name: str) -> nn.Module:
    """The autoencoder of NextStep."""
    return NextStepAutoencoder(LatentConfig(ch=128, ch_mult=(1, 2, 4, 4), blocks=2, z_channels=16, norm_patch=1))


def _of_text(name: str) -> nn.Module:
    """The encoder of flan-t5-xl."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_FLAN_T5_XL))


def vision_of(network: str) -> str:
    """Name of the part that reads images for a Janus."""
    return f"{network} vision"


def _of_vision(size: str, name: str) -> nn.Module:
    return JanusVision(official_vision(size))


# What a catalogue entry may name as its network, and parts of such files: how it is built.
NETWORKS: dict[str, Callable[[str], nn.Module]] = {
    **dict.fromkeys(SIZES, lambda name: MAR(official(name))),
    **dict.fromkeys(TOKEN_SIZES, _of_tokens),
    "LlamaGen-XL-T2I": _of_tokens,
    **dict.fromkeys(("PAR-XL-4x", "PAR-XXL-4x", "PAR-3B-4x", "PAR-3B-16x"), _of_tokens),
    **dict.fromkeys(("AR-DTok-LP-256", "AR-DTok-LP-512", "AR-DTok-LP-1024"), _of_dtok),
    **dict.fromkeys(JANUS_SIZES, lambda name: Janus(official_janus(name)).fold()),
    **{vision_of(size): partial(_of_vision, size) for size in JANUS_SIZES},
    **dict.fromkeys(HYBRID_SIZES, lambda name: Hybrid(official_hybrid(name, HYBRID_SIZES[name][3]))),
    **dict.fromkeys(TAR_SIZES, lambda name: Llama(official_tar(name))),
    **dict.fromkeys(("KL-16", "VQ-16", "VQ-8"), _of_autoencoder),
    **dict.fromkeys(BITDANCES, official_bitdance),
    "BitDance-AE": lambda name: BinaryAutoencoder(official_binary()),
    "NextStep-14B": lambda name: NextStep(official_nextstep()),
    "NextStep-AE": _of_latents,
    "TA-Tok": lambda name: TATok(official_ta_tok()),
    "Flan-T5-XL": _of_text,
}


def shapes_of(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights and stored buffers of a network by name; those with two names are listed once.

    Packed weights have the shapes of their numbers.
    """
    packed = {}
    for layer in net.modules():
        if isinstance(layer, PackedLinear):
            packed[id(layer.weight)] = layer.out_features, layer.in_features

    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, packed.get(id(tensor), tuple(tensor.shape))))

    return dict(found.values())


@lru_cache(maxsize=4)
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of an official network by name, as the loaders hold them; ``name``: of :data:`NETWORKS`.

    Nothing is allocated.
    """
    with shapes_only():
        net: Any = NETWORKS[name](name)

    return shapes_of(net)
