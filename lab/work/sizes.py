"""Models of the official sizes with random weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ...errors import UserError
from ...model_loaders.catalogue.official import (
    BITDANCES,
    HYBRID_SIZES,
    JANUS_SIZES,
    SIZES,
    TOKEN_SIZES,
    official,
    official_bitdance,
    official_gpt,
    official_hybrid,
    official_janus,
    official_nextstep,
)
from ...model_loaders.kinds import choose_dtype
from ...networks.bitdance import BitDanceText, BlockModel, Marks
from ...networks.hybrid import Hybrid, HybridModel
from ...networks.janus import Janus, JanusModel, Template
from ...networks.llama import Llama, LlamaConfig, TokenModel
from ...networks.mar import MAR, MARModel
from ...networks.nextstep import SIDE, NextStep, NextStepModel
from ...networks.nextstep import Marks as ImageMarks
from ...networks.ops import quantize
from ...networks.quantized import QUANTISED
from ...runs.loading import Ready
from ...runs.registry import BITDANCE, HYBRID, JANUS, LLAMAGEN, NEXTSTEP, Entry
from ...runs.registry import MAR as MAR_FAMILY
from ..training.initialise import (
    initialise_bitdance,
    initialise_hybrid,
    initialise_llama,
    initialise_mar,
    initialise_nextstep,
)

# Qwen2's vocabulary: how many ids are text, and the ids around a turn of a conversation.
_TEXT = 151_643
_TURN = (151_644, 151_645)
# The only size of NextStep; the ids of its special tokens, behind those of Qwen2; and pixels along a side of a token.
NEXTSTEP_SIZE = "NextStep-14B"
_NEXTSTEP_MARKS = ImageMarks(area=151_666, begin=151_667, end=151_668, place=151_669)
_NEXTSTEP_STRIDE = 16
ALL_SIZES = (*SIZES, *TOKEN_SIZES, *HYBRID_SIZES, *JANUS_SIZES, *BITDANCES, NEXTSTEP_SIZE)
# Ids around a prompt of a random Janus, which has fewer words than Qwen2, and tokens per side of its images.
AROUND = Template(begin=100_000, image=100_001)
_JANUS_TEXT = 100_000
JANUS_GRID = 24
# Pixels along one side of a token of BitDance, and the most tokens along a side that a token of its prompts can say.
_BITDANCE_STRIDE = 16
_BITDANCE_SIDES = 256
# Transition tokens of a random PAR: PAR-4x.
PAR_SPECIAL = 3

N = TypeVar("N", bound=nn.Module)


def _blank(make: Callable[[], N], dtype: torch.dtype, device: str | torch.device) -> N:
    """A network whose norms have the weight 1 and whose other parameters are 0, without gradients.

    Its parameters are made where and as they stay, so that a large network is never in memory in fp32.
    """
    with torch.device("meta"):
        net = make()

    net = net.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    for name, parameter in net.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.fill_(1.0 if is_norm else 0.0)

    return net


@torch.no_grad()
def random_gpt(config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Llama:
    """A token model with random weights.

    The output layer, zero at the start of a training, would make all tokens equally likely.
    """
    net = initialise_llama(_blank(lambda: Llama(config), dtype, device))
    net.output.weight.normal_(std=0.02)
    return net


@torch.no_grad()
def random_janus(size: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Janus:
    """A Janus with random weights, before its table of image tokens is folded."""
    net = _blank(lambda: Janus(official_janus(size)), dtype, device)
    initialise_llama(net)
    return net


def random_words(text: str, count: int = _TEXT) -> list[int]:
    """Arbitrary ids below ``count``, one a word: as many as a tokenizer makes of common words."""
    return [zlib.crc32(word.encode()) % count for word in text.split()]


def random_hybrid(size: str, dtype: torch.dtype, device: str | torch.device) -> HybridModel:
    """A model of an official size at the size of its images, with random weights.

    The weights come from the global random state; on "meta" there are none. Prompts are read as arbitrary ids.
    """
    _, _, _, side, max_beta, _ = HYBRID_SIZES[size]
    net = initialise_hybrid(_blank(lambda: Hybrid(official_hybrid(size, side)), dtype, device))
    net.head.final_layer.linear.float()  # the last layer of the head stays in fp32

    return HybridModel(
        net.mar,
        f"{size}, random weights",
        max_beta=max_beta,
        hybrid=net,
        tokenize=random_words,
        turn=_TURN,
        trained=side,
    )


def random_bitdance(size: str, dtype: torch.dtype, device: torch.device) -> BlockModel:
    """A BitDance with random weights. Prompts are read as arbitrary ids."""
    net = initialise_bitdance(_blank(lambda: official_bitdance(size), dtype, device))
    name = f"{size}, random weights"
    if not isinstance(net, BitDanceText):
        return BlockModel(net, name, _BITDANCE_STRIDE)

    # The ids of image sizes and queries are the last ones of the vocabulary.
    first = net.config.vocab - _BITDANCE_SIDES - (net.block - 1)
    queries = range(net.config.vocab - (net.block - 1), net.config.vocab)
    marks = Marks(
        begin=_TURN[0],
        end=_TURN[1],
        image=first - 1,
        sizes={side: first + side - 1 for side in range(1, _BITDANCE_SIDES + 1)},
        queries=tuple(queries),
    )
    return BlockModel(net, name, _BITDANCE_STRIDE, tokenize=random_words, marks=marks)


def random_nextstep(dtype: torch.dtype, device: torch.device) -> NextStepModel:
    """A NextStep with random weights. Prompts are read as arbitrary ids."""
    net = initialise_nextstep(_blank(lambda: NextStep(official_nextstep()), dtype, device))
    net.head.final_layer.linear.float()  # the last layer of the head stays in fp32
    name = f"{NEXTSTEP_SIZE}, random weights"
    return NextStepModel(net, name, _NEXTSTEP_STRIDE, tokenize=random_words, marks=_NEXTSTEP_MARKS, side=SIDE)


def random_model(size: str, dtype: str, device: torch.device, special: int = 0) -> Ready:
    """A model of an official size with random weights from a fixed seed. The global random state is not changed."""
    family = family_of(size)
    compute = choose_dtype(dtype, device, family)

    made = _random_model(size, family, compute, device, special)
    if dtype in QUANTISED:
        quantize(made.kind.network(made.model), dtype)
    return made


def _random_model(size: str, family: str, compute: torch.dtype, device: torch.device, special: int) -> Ready:
    """See :func:`random_model`; all weights in the dtype of the computation."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)

        if family == HYBRID:
            return Ready(HYBRID, random_hybrid(size, compute, device))

        if family == LLAMAGEN:
            name = f"{size.replace('LlamaGen', 'PAR')}-4x" if special else size
            net = random_gpt(official_gpt(size, special), compute, device)
            grid = TOKEN_SIZES[size][3]
            return Ready(LLAMAGEN, TokenModel(net, f"{name}, random weights", grid))

        if family == BITDANCE:
            return Ready(BITDANCE, random_bitdance(size, compute, device))

        if family == NEXTSTEP:
            return Ready(NEXTSTEP, random_nextstep(compute, device))

        if family == JANUS:
            janus = random_janus(size, compute, device).fold()
            words = partial(random_words, count=_JANUS_TEXT)
            name = f"{size}, random weights"
            return Ready(JANUS, JanusModel(janus, name, JANUS_GRID, tokenize=words, template=AROUND))

        made = initialise_mar(_blank(lambda: MAR(official(size)), compute, device))
        made.head.final_layer.linear.float()  # the last layer of the head stays in fp32
        return Ready(MAR_FAMILY, MARModel(made, f"{size}, random weights", t_max=950))


def family_of(size: str) -> str:
    """The family of an official size; MAR's for an unknown one."""
    if size in TOKEN_SIZES:
        return LLAMAGEN
    if size in JANUS_SIZES:
        return JANUS
    if size in BITDANCES:
        return BITDANCE
    if size == NEXTSTEP_SIZE:
        return NEXTSTEP
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
            raise UserError(
                f"samplers: {entry.name} works with {entry.models}, but not with {size}; leave this sampler out."
            )

        special = PAR_SPECIAL if entry.name == "par" else 0
        if special not in made:
            made[special] = random_model(size, dtype, device, special)
        out[entry.name] = made[special]

    return out
