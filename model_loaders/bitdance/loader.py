"""Loaders of BitDance: the ImageNet models, the text models of several files, and the binary autoencoder.

A text model is a folder in the authors' layout (config.json, shards, vision_head.safetensors, projector.safetensors,
ae.safetensors and the tokenizer), or in that of diffusers (text_encoder, diffusion_head, projector, autoencoder,
tokenizer). The parameters have the same names in both. The language model's output layer is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...networks.binary import BinaryAutoencoder, BinaryConfig, BinaryModel
from ...networks.bitdance import (
    CLASS_HEAD_DIM,
    OFFICIAL_HEADS,
    TEXT_HEAD_DIM,
    BitDanceClass,
    BitDanceConfig,
    BitDanceText,
    BlockModel,
    HeadConfig,
    Marks,
)
from ...networks.enlarging import PREFIX, said
from ...networks.llama import LlamaConfig
from ...networks.ops import FAST, TORCH, Operations
from ...networks.structure import MOST_LEVELS, depth
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.configs import REMEDY, expect_language, expect_stated, inner, language_numbers, language_part
from ..files.tokenizer import load_tokenizer
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_bits, choose_dtype, read
from ..llamagen.loader import HEADS, IMAGENET, expect_heads, note_defaults

# Pixels along one side of a token in every released model.
_STRIDE = 16
# Parts of a text model beside its language model: the file and its configuration, the authors' and diffusers'.
_DIFFUSERS = "diffusion_pytorch_model.safetensors"
_PARTS = {
    "vision_head": ("vision_head_config.json", f"diffusion_head/{_DIFFUSERS}"),
    "projector": ("", f"projector/{_DIFFUSERS}"),
    "ae": ("ae_config.json", f"autoencoder/{_DIFFUSERS}"),
}
_VAE = "vae."
_UNUSED = re.compile(r"(?:\w+\.)?lm_head\.")
_SIZE = re.compile(r"<\|res_(\d{1,4})\|>")
_QUERY = re.compile(r"<\|query_(\d{1,4})\|>")


@in_own_state
def load_bitdance(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    heads: int | None = None,
    weights: str = AUTO,
    operations: Operations = FAST,
) -> BlockModel:
    """Load a BitDance of any size with the official parameter names. Shared arguments and errors: :mod:`.checkpoint`.

    The dtype "auto" prefers bf16, in which the models were trained.

    Args:
        path: an ImageNet model's file; or a model folder, one of its shards, or their index.
        dtype: see :func:`.kinds.choose_dtype`.
        device: of the weights.
        heads: attention heads of an ImageNet model; None takes the metadata's, or those of the training's arguments,
            else those of the official model of that width.
        weights: "ema" for averaged weights, "trained" for the others, "auto" for averaged ones where a file holds
            both.
        operations: of which the network is built, see :class:`.ops.Operations`.

    Metadata entries of an ImageNet model: ``heads``; ``stride`` (pixels along one side of a token, that of the
    autoencoder inside, else 16); ``time_shift`` (1); ``bounded`` (1 if a tanh bounds the head's prediction, 0);
    ``label_set`` ("imagenet-1k" for 1000 classes); ``name``.

    Raises:
        UserError: also if a part of a text model is missing or belongs to another model.
    """
    compute = choose_dtype(dtype, device, "bitdance")
    file = read(path, "bitdance", lambda name: _UNUSED.match(name) is not None, weights)
    about = {"operations": operations, "dtype": compute, "device": device, "bits": choose_bits(dtype, device)}
    if any(name.startswith("head.net.") for name in file.state):
        return _load_class(file, heads, about)

    return _load_text(file, about)


# ------------------------------------------------------------------------------------------------ ImageNet


def _load_class(file: ck.Checkpoint, heads: int | None, about: dict[str, Any]) -> BlockModel:
    """An ImageNet model."""
    with ck.misfits(file):
        levels = depth(file.state, f"{_VAE}encoder.down.", MOST_LEVELS)
    file = file.filter(lambda name: not name.startswith(_VAE))

    heads = heads or file.stated("heads", 1, 1024, HEADS)
    expect_heads(file, heads, file.state.get("pos_for_diff.weight"), OFFICIAL_HEADS)
    bounded = bool(file.number("bounded", 0, 0, 1))
    with ck.misfits(file):
        config = BitDanceConfig.of_bitdance(file.state, heads)
        head = HeadConfig.from_state_dict(_within(file, "head."), CLASS_HEAD_DIM, bounded)
        if (head.heads > 0) != (config.block > 1):
            raise ValueError(f"its head is not made for blocks of {config.block} tokens")
    note_defaults(file, "bitdance", heads, config.heads, config.condition_size)

    net = ck.load_strictly(file, partial(BitDanceClass, config, head), **about)
    return BlockModel(
        net=net,
        name=file.name,
        stride=file.number("stride", 2 ** (levels - 1) if levels else _STRIDE, 1, 64),
        time_shift=file.number("time_shift", 1.0, 1e-3, 1e3),
        label_set=file.text("label_set", "imagenet-1k" if config.condition_size == IMAGENET else ""),
        note=file.note,
    )


def _within(file: ck.Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """The weights of a part, without its prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in file.state.items() if name.startswith(prefix)}


# ------------------------------------------------------------------------------------------------ text


def _load_text(file: ck.Checkpoint, about: dict[str, Any]) -> BlockModel:
    """A text model; ``file`` is its language model."""
    root = _root(file.folder)
    head_file, stated = _part(root, "vision_head", file)
    projector, _ = _part(root, "projector", file)

    fields = language_part(file, file.settings("config", beside=True))
    numbers = language_numbers(file, fields, file.state)
    with ck.misfits(file):
        config = LlamaConfig.of_qwen(file.state, tied=True, **numbers)
    expect_language(file, fields, config, config.vocab)

    with ck.misfits(head_file):
        head = HeadConfig.from_state_dict(head_file.state, TEXT_HEAD_DIM, bounded=True)
    _expect_head(head_file, stated, head)
    if head.condition != config.dim:
        raise head_file.error(
            f"reads conditions of {head.condition} numbers, but the language model in {file.path.name} computes "
            f"{config.dim} numbers",
            "choose the files of one model",
        )

    marks, tokenize = _tokens(file, root, stated, config.vocab)
    block = len(marks.queries) + 1

    # One network of three files, each part under the name that it has in the network.
    state = dict(file.state)
    state.update({f"head.{name}": tensor for name, tensor in head_file.state.items()})
    state.update({f"projector.{name}": tensor for name, tensor in projector.state.items()})
    whole = replace(file, state=state)
    net = ck.load_strictly(whole, partial(BitDanceText, config, head, block), **about)
    return BlockModel(
        net=net,
        name=file.text("name", root.name) if file.path.is_dir() else file.name,
        stride=_stride(root, file),
        time_shift=head_file.number("time_shift", 1.0, 1e-3, 1e3, stated),
        note=file.note,
        tokenize=tokenize,
        marks=marks,
    )


def _root(folder: Path) -> Path:
    """The folder of the whole model; its language model is in ``folder``."""
    in_pipeline = folder.name == "text_encoder" and (folder.parent / "diffusion_head").is_dir()
    return folder.parent if in_pipeline else folder


def _part_path(root: Path, part: str) -> Path | None:
    """The file of a part; None if it is not there."""
    for name in (f"{part}.safetensors", _PARTS[part][1]):
        if (root / name).is_file():
            return root / name

    return None


def _part(root: Path, part: str, file: ck.Checkpoint) -> tuple[ck.Checkpoint, dict[str, Any]]:
    """A part of a text model beside its language model ``file``, and its configuration."""
    path = _part_path(root, part)
    if path is None:
        raise file.error(
            f"holds only a language model, and the folder {root.name} has no {part}.safetensors ({_PARTS[part][1]} in "
            "diffusers' layout)",
            "choose a folder that has all parts of a BitDance. If you have the three fp8 files for ComfyUI, choose "
            "bitdance-14b-64x with dtype fp8",
        )

    found = replace(ck.read(ck.member(path, file.field), file.field), what=f"the {part} of a BitDance")
    return found, _configuration(root, part, file.field)


def _configuration(root: Path, part: str, field: str) -> dict[str, Any]:
    """The configuration of a part; {} if there is none."""
    name, theirs = _PARTS[part]
    beside = root / Path(theirs).parent / "config.json"
    return (ck.read_json(root / name, field) if name else {}) or ck.read_json(beside, field)


def _expect_head(file: ck.Checkpoint, stated: Mapping[str, Any], head: HeadConfig) -> None:
    """Raise a UserError if the configuration of a diffusion head states another network than its weights."""
    proved = {
        "ch_target": head.channels,
        "ch_cond": head.condition,
        "ch_latent": head.width,
        "depth_latent": head.depth,
        "depth_adanln": head.modulations,
    }
    expect_stated(file, stated, proved)


def _tokens(file: ck.Checkpoint, root: Path, stated: Mapping[str, Any], rows: int) -> tuple[Marks, Any]:
    """Ids of the special tokens, and what encodes a text.

    ``stated`` is the head's configuration, ``rows`` the number of token ids.
    """
    apart = root / "tokenizer"
    tokenizer = load_tokenizer(apart if apart.is_dir() else file.folder, file.stem, file.metadata, words=True)
    named = tokenizer.special_tokens
    missing = [name for name in ("<|im_start|>", "<|im_end|>", "<|vision_start|>") if name not in named]
    if missing:
        raise file.error(
            f"has a tokenizer that lacks the token {missing[0]}",
            "replace the tokenizer with the one that belongs to this model",
        )

    sizes = {int(match[1]): i for name, i in named.items() if (match := _SIZE.fullmatch(name))}
    queries = {int(match[1]): i for name, i in named.items() if (match := _QUERY.fullmatch(name))}
    last = 0
    while last + 1 in queries:
        last += 1

    block = file.number("parallel_num", last + 1, 1, 1 << 12, stated)
    if math.isqrt(block) ** 2 != block:
        raise file.error(f"states parallel_num = {block} tokens per block, which is not a square number", REMEDY)
    if block > last + 1:
        raise file.error(
            f"states parallel_num = {block}, which requires the tokens <|query_1|> to <|query_{block - 1}|>, but the "
            f"last such token in its tokenizer is number {last}",
            f"replace the tokenizer, which is for blocks of {last + 1} tokens, with the one that belongs to this model",
        )
    if not sizes:
        raise file.error(
            "has a tokenizer that lacks the tokens for image sizes (<|res_1|>, <|res_2|>, ...)",
            "replace the tokenizer with the one that belongs to this model",
        )

    marks = Marks(
        begin=named["<|im_start|>"],
        end=named["<|im_end|>"],
        image=named["<|vision_start|>"],
        sizes=sizes,
        queries=tuple(queries[i] for i in range(1, block)),
    )
    largest = max(marks.begin, marks.end, marks.image, *sizes.values(), *marks.queries)
    if largest >= rows:
        raise file.error(
            f"has {rows} token ids, but its tokenizer has special tokens with ids up to {largest}",
            "replace the tokenizer with the one that belongs to this model",
        )

    return marks, tokenizer.encode


def _stride(root: Path, file: ck.Checkpoint) -> int:
    """Pixels along one side of a token, as the configuration of the autoencoder states."""
    settings = _configuration(root, "ae", file.field)
    levels = inner(file, settings, "ddconfig").get("ch_mult")
    return 2 ** (len(levels) - 1) if isinstance(levels, list) and levels else _STRIDE


# ------------------------------------------------------------------------------------------------ autoencoder


def autoencoder_path(path: str | Path) -> Path | None:
    """The file of the autoencoder that belongs to a BitDance: inside its file, or beside it; None if there is none.

    ``path`` is what :func:`load_bitdance` accepts.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    for root in dict.fromkeys((folder, _root(folder))):
        found = _part_path(root, "ae")
        if found is not None and (path.is_dir() or _part_path(root, "vision_head")):
            return found

    if path.is_dir():
        inside = [name for name in (folder / "transformer" / _DIFFUSERS, folder / _DIFFUSERS) if name.is_file()]
        path = inside[0] if inside else path
    if path.is_file() and _prefix_inside(ck.read(path)) is not None:
        return path

    return None


def _prefix_inside(file: ck.Checkpoint) -> str | None:
    """What stands in front of the names of the autoencoder inside an ImageNet model; None if there is none."""
    for name in file.state:
        prefix, found, _ = name.partition(f"{_VAE}decoder.adaptive.")
        if found and (not prefix or prefix.endswith(".")):
            return prefix + _VAE

    return None


@in_own_state
def load_binary(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    weights: str = AUTO,
    operations: Operations = TORCH,
) -> BinaryModel:
    """Load a binary autoencoder with the official parameter names; see :mod:`.checkpoint`.

    It may lie in the file of an ImageNet model. Of a training's file of ``torch.save`` other networks (a discriminator)
    are ignored, as by the reference. Metadata entries: ``groups`` (GroupNorm groups, 32) and ``name``. The dtype "auto"
    is fp32. Arguments as :func:`.autoencoders.load_kl`.
    """
    compute = choose_dtype(dtype, device, "bitdance-ae")
    file = ck.read(path, "decoder", weights=weights)
    prefix = _prefix_inside(file)
    if prefix is not None:
        file = replace(file, state=_within(file, prefix), what="a binary autoencoder")
    else:
        file = read(path, "bitdance-ae", weights=weights)

    if file.path.suffix != ".safetensors":
        file = file.filter(lambda name: name.startswith(("encoder.", "decoder.", PREFIX)))
    groups = file.number("groups", 32, 1, 1024)
    with ck.misfits(file):
        config = BinaryConfig.from_state_dict(file.state, groups)
    if config.noisy:
        raise file.error(
            "decodes bits together with noise (gan_decoder), but no BitDance in FastAR uses such a decoder",
            "choose ae_d16c32",
        )

    net = ck.load_strictly(
        file, partial(BinaryAutoencoder, config), operations=operations, dtype=compute, device=device
    )
    return BinaryModel(net, said(file.name, net.config))


def expect_bits(decoder: BinaryModel, model: BlockModel) -> None:
    """Raise a UserError if an autoencoder has tokens of other bits or of another size than a model draws."""
    bits = decoder.net.config.z_channels
    stride = decoder.net.config.stride
    channels = model.net.channels
    if (bits, stride) == (channels, model.stride):
        return

    raise UserError(
        f"decoder: {model.name} has tokens of {channels} channels at stride {model.stride}, but {decoder.name} reads "
        f"{bits} channels at stride {stride}; choose auto, or the autoencoder that the model was trained with."
    )
