"""Official sizes of the published models, and models of these sizes with random weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import torch

from ..assembly import Ready
from ..errors import UserError
from ..model_loaders.families import EIGHT_BITS, choose_dtype
from ..model_loaders.networks.hybrid import Hybrid, HybridConfig, HybridModel
from ..model_loaders.networks.janus import Janus, JanusConfig
from ..model_loaders.networks.llama import Llama, LlamaConfig, TokenModel, qwen_config
from ..model_loaders.networks.mar import MAR, MARConfig, MARModel
from ..model_loaders.networks.ops import quantize
from ..samplers.registry import HYBRID, LLAMAGEN, Entry
from ..samplers.registry import MAR as MAR_FAMILY
from .initialise import initialise_hybrid, initialise_llama, initialise_mar

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
# Qwen2.5, the language model of Tar: width, depth, heads, key heads, inner width, and whether the embedding is also the
# output layer.
TAR_SIZES = {"Tar-1.5B": (1536, 28, 12, 2, 8960, True), "Tar-7B": (3584, 28, 28, 4, 18_944, False)}
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
# Qwen2's vocabulary: rows of its table, how many ids are text, and the ids around a turn of a conversation.
_VOCAB = 151_936
_TEXT = 151_643
_TURN = (151_644, 151_645)
# Tar's: the words of Qwen2.5, marks of an image and of its scales, and the codes.
_TAR_VOCAB = 151_665 + 5 + 65_536
# Width of a row of LlamaGen's texts (Flan-T5-XL) and of Tar's features, and rows of a text.
_TEXT_WIDTH = 2048
_TEXT_ROWS = 120
_FEATURE_WIDTH = 1152
ALL_SIZES = (*SIZES, *TOKEN_SIZES, *HYBRID_SIZES)
# Transition tokens of a random PAR: PAR-4x.
PAR_SPECIAL = 3


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
    return llama_config(dim, depth, heads, condition="class", condition_size=1000, special=special)


def random_gpt(config: LlamaConfig) -> Llama:
    """A token model with random weights.

    The output layer, zero at the start of a training, would make all tokens equally likely.
    """
    net = initialise_llama(Llama(config)).eval().requires_grad_(False)
    net.output.weight.normal_(std=0.02)
    return net


def official_text_gpt() -> LlamaConfig:
    """Configuration of LlamaGen's text-to-image models, both of size XL."""
    dim, depth, heads, _ = TOKEN_SIZES["LlamaGen-XL"]
    return llama_config(dim, depth, heads, condition="text", condition_size=_TEXT_WIDTH, text_rows=_TEXT_ROWS)


def dtok_config(size: str) -> LlamaConfig:
    """Configuration of an official size of Tar's de-tokenizers."""
    dim, depth, heads = DTOK_SIZES[size]
    return llama_config(dim, depth, heads, condition="features", condition_size=_FEATURE_WIDTH)


def language_config(size: str) -> LlamaConfig:
    """Configuration of an official size of Tar's language model."""
    dim, depth, heads, keys, hidden, tied = TAR_SIZES[size]
    return qwen_config(dim, depth, heads, keys, dim // heads, hidden, _TAR_VOCAB, tied=tied)


def janus_config(size: str) -> JanusConfig:
    """Configuration of an official size of Janus-Pro."""
    dim, depth, heads, hidden = JANUS_SIZES[size]
    shape = qwen_config(dim, depth, heads, heads, dim // heads, hidden, 16384, bias=False, tied=False, positions=16384)
    about = vars(shape) | {"theta": 1e4, "words": 102_400, "narrow": 8, "projected": dim}
    return JanusConfig(**about)


def random_janus(size: str) -> Janus:
    """A Janus with random weights, before its table of image tokens is folded."""
    net = Janus(janus_config(size))
    initialise_llama(net)
    return net.eval().requires_grad_(False)


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
        vocab=_VOCAB,
        tied=True,
        positions=32768,
    )
    return HybridConfig(mar, llm)


def _words(text: str) -> list[int]:
    """Arbitrary ids, one a word: as many as a tokenizer makes of common words."""
    return [zlib.crc32(word.encode()) % _TEXT for word in text.split()]


def random_hybrid(size: str, dtype: torch.dtype, device: str | torch.device) -> HybridModel:
    """A model of an official size at the size of its images, with random weights.

    The weights come from the global random state; on "meta" there are none. Prompts are read as arbitrary ids.
    """
    _, _, _, side, max_beta, _ = HYBRID_SIZES[size]
    is_meta = str(device) == "meta"

    with torch.device("meta" if is_meta else "cpu"):
        net = Hybrid(official_hybrid(size, side)).eval().requires_grad_(False)
    if not is_meta:
        initialise_hybrid(net)

    # The last layer of the head stays in fp32.
    last = net.head.final_layer.linear
    net.to(device, dtype)
    last.float()

    return HybridModel(
        net.mar, f"{size}, random weights", max_beta=max_beta, hybrid=net, tokenize=_words, turn=_TURN, trained=side
    )


def random_model(size: str, dtype: str, device: torch.device, special: int = 0) -> Ready:
    """A model of an official size with random weights from a fixed seed. The global random state is not changed."""
    family = _family(size)
    compute = choose_dtype(dtype, device, family)

    made = _random_model(size, family, compute, device, special)
    if dtype in EIGHT_BITS:
        quantize(made.model.hybrid if isinstance(made.model, HybridModel) else made.model.net, dtype)
    return made


def _random_model(size: str, family: str, compute: torch.dtype, device: torch.device, special: int) -> Ready:
    """See :func:`random_model`; all weights in the dtype of the computation."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)

        if family == HYBRID:
            return Ready(HYBRID, random_hybrid(size, compute, device))

        if family == LLAMAGEN:
            name = f"{size.replace('LlamaGen', 'PAR')}-4x" if special else size
            net = random_gpt(official_gpt(size, special)).to(device, compute)
            grid = TOKEN_SIZES[size][3]
            return Ready(LLAMAGEN, TokenModel(net, f"{name}, random weights", grid))

        made = initialise_mar(MAR(official(size))).eval().requires_grad_(False)

    # The last layer of the head stays in fp32.
    last = made.head.final_layer.linear
    made = made.to(device, compute)
    last.float()

    return Ready(MAR_FAMILY, MARModel(made, f"{size}, random weights", t_max=950))


def _family(size: str) -> str:
    """The family of an official size."""
    if size in TOKEN_SIZES:
        return LLAMAGEN
    return HYBRID if size in HYBRID_SIZES else MAR_FAMILY


def random_models(size: str, entries: Iterable[Entry], dtype: str, device: torch.device) -> dict[str, Ready]:
    """Random models by sampler name; PAR gets a PAR of that size."""
    if size not in ALL_SIZES:
        raise UserError(f"random: {size} is not one of {', '.join(ALL_SIZES)}.")

    family = _family(size)
    made: dict[int, Ready] = {}
    out = {}
    for entry in entries:
        if family not in entry.families:
            raise UserError(f"samplers: {entry.name} samples {entry.models}, but {size} is not one; leave it out.")

        special = PAR_SPECIAL if entry.name == "par" else 0
        if special not in made:
            made[special] = random_model(size, dtype, device, special)
        out[entry.name] = made[special]

    return out
