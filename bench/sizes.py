"""Models of the official sizes with random weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial

import torch

from ..assembly import Ready
from ..errors import UserError
from ..model_loaders.families import EIGHT_BITS, choose_dtype
from ..model_loaders.networks.hybrid import Hybrid, HybridModel
from ..model_loaders.networks.janus import Janus, JanusModel, Template
from ..model_loaders.networks.llama import Llama, LlamaConfig, TokenModel
from ..model_loaders.networks.mar import MAR, MARModel
from ..model_loaders.networks.ops import quantize
from ..model_loaders.official import (
    HYBRID_SIZES,
    JANUS_SIZES,
    SIZES,
    TOKEN_SIZES,
    official,
    official_gpt,
    official_hybrid,
    official_janus,
)
from ..samplers.registry import HYBRID, JANUS, LLAMAGEN, Entry
from ..samplers.registry import MAR as MAR_FAMILY
from .initialise import initialise_hybrid, initialise_llama, initialise_mar

# Qwen2's vocabulary: how many ids are text, and the ids around a turn of a conversation.
_TEXT = 151_643
_TURN = (151_644, 151_645)
ALL_SIZES = (*SIZES, *TOKEN_SIZES, *HYBRID_SIZES, *JANUS_SIZES)
# Ids around a prompt of a random Janus, which has fewer words than Qwen2, and tokens per side of its images.
_AROUND = Template(begin=100_000, image=100_001)
_JANUS_TEXT = 100_000
_JANUS_GRID = 24
# Transition tokens of a random PAR: PAR-4x.
PAR_SPECIAL = 3


def random_gpt(config: LlamaConfig) -> Llama:
    """A token model with random weights.

    The output layer, zero at the start of a training, would make all tokens equally likely.
    """
    net = initialise_llama(Llama(config)).eval().requires_grad_(False)
    net.output.weight.normal_(std=0.02)
    return net


def random_janus(size: str) -> Janus:
    """A Janus with random weights, before its table of image tokens is folded."""
    net = Janus(official_janus(size))
    initialise_llama(net)
    return net.eval().requires_grad_(False)


def _words(text: str, count: int = _TEXT) -> list[int]:
    """Arbitrary ids below ``count``, one a word: as many as a tokenizer makes of common words."""
    return [zlib.crc32(word.encode()) % count for word in text.split()]


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
    family = family_of(size)
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

        if family == JANUS:
            janus = random_janus(size).fold().to(device, compute)
            words = partial(_words, count=_JANUS_TEXT)
            name = f"{size}, random weights"
            return Ready(JANUS, JanusModel(janus, name, _JANUS_GRID, tokenize=words, template=_AROUND))

        made = initialise_mar(MAR(official(size))).eval().requires_grad_(False)

    # The last layer of the head stays in fp32.
    last = made.head.final_layer.linear
    made = made.to(device, compute)
    last.float()

    return Ready(MAR_FAMILY, MARModel(made, f"{size}, random weights", t_max=950))


def family_of(size: str) -> str:
    """The family of an official size; MAR's for an unknown one."""
    if size in TOKEN_SIZES:
        return LLAMAGEN
    if size in JANUS_SIZES:
        return JANUS
    return HYBRID if size in HYBRID_SIZES else MAR_FAMILY


def random_models(size: str, entries: Iterable[Entry], dtype: str, device: torch.device) -> dict[str, Ready]:
    """Random models by sampler name; PAR gets a PAR of that size."""
    if size not in ALL_SIZES:
        raise UserError(f"random: {size} is not one of {', '.join(ALL_SIZES)}.")

    family = family_of(size)
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
