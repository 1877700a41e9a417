"""Loader of Janus-Pro and Janus 1.3B: the network that draws, its tokenizer, and from the same file the VQ tokenizer
and what reads images.

The authors' parameter names and those of transformers are accepted. What answers questions about images,
the output layer for words, is loaded apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...networks.autoencoder import VQModel
from ...networks.janus import TRUNK, Janus, JanusConfig, JanusModel, Template, WordHead
from ...networks.janus_vision import LEAST_SIDE, ImageReader, JanusVision, VisionConfig
from ...networks.ops import FAST, TORCH, Operations
from ...networks.torch_state import in_own_state
from ..autoencoders.loader import build_vq
from ..files import checkpoint as ck
from ..files.configs import expect_fixed, expect_language, expect_stated, inner, language_numbers, language_part
from ..files.shards import weight_files
from ..files.tokenizer import Tokenizer, load_tokenizer
from ..files.wrappers import AUTO
from ..kinds import KINDS, Precision, choose_bits, choose_dtype, read
from ..llamagen.loader import LARGEST_GRID

# Tokens along one side of the image, of 16 pixels each, in all official models.
_GRID = 24
# Parts of transformers' names, which begin with "model.", and the authors'. The order matters.
_RENAMED = {
    "model.language_model.": "language_model.model.",
    "model.generation_embeddings.": "gen_embed.",
    "model.generation_aligner.fc1.": "gen_aligner.layers.0.",
    "model.generation_aligner.hidden_layers.0.": "gen_aligner.layers.2.",
    "model.generation_head.proj_out.": "gen_head.output_mlp_projector.",
    "model.generation_head.": "gen_head.",
    "model.vqmodel.": "gen_vision_model.",
    ".encoder.down.": ".encoder.conv_blocks.",
    ".decoder.up.": ".decoder.conv_blocks.",
    ".block.": ".res.",
    ".mid.block_1.": ".mid.0.",
    ".mid.attn_1.": ".mid.1.",
    ".mid.block_2.": ".mid.2.",
}
VQ_PREFIX = "gen_vision_model."
# What drawing from a prompt does not need: the part that reads images, the output layer for words, recomputed RoPE
# frequencies.
UNUSED = ("vision_model.", "model.vision_model.", "aligner.", "model.aligner.", "language_model.lm_head.", "lm_head.")
# What reads images: the tower and the aligner, without the tower's pooled output, which nothing uses.
VISION_PREFIXES = ("vision_model.", "model.vision_model.", "aligner.", "model.aligner.")
POOL_PREFIX = "vision_model.vision_tower.attn_pool."
# Parts of the authors' names of it and of transformers', and ours. The order matters.
_VISION_NAMES = {
    "vision_model.vision_tower.": "tower.",
    "model.vision_model.": "tower.",
    "tower.patch_embed.proj.": "tower.embeddings.patch_embedding.",
    "tower.pos_embed": "tower.embeddings.position_embedding.weight",
    "tower.blocks.": "tower.encoder.layers.",
    "tower.norm.": "tower.post_layernorm.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.proj.": ".self_attn.out_proj.",
    ".self_attn.projection_layer.": ".self_attn.out_proj.",
    "model.aligner.": "aligner.",
    "aligner.layers.0.": "aligner.fc1.",
    "aligner.layers.2.": "aligner.fc2.",
    "aligner.hidden_layers.0.": "aligner.fc2.",
}
_JOINT = ".attn.qkv."
# The output layer for words, in either layout.
WORD_HEADS = ("language_model.lm_head.weight", "lm_head.weight")
# Besides the language model's, what a configuration states about the image tokens, in the authors' layout and in that
# of transformers: how many codes there are, and the two MLPs. Their shapes are those of the weights.
_CODES = {
    ("gen_vision_config", "params"): "image_token_size",
    ("gen_head_config", "params"): "image_token_size",
    ("vq_config",): "num_embeddings",
}
_FIXED: dict[tuple[str, ...], dict[str, tuple[Any, ...]]] = {
    ("gen_aligner_config", "params"): {"projector_type": ("mlp_gelu",), "depth": (2,)},
    ("vq_config",): {"hidden_act": ("gelu",), "num_hidden_layers": (2,), "double_latent": (False,)},
}
# Special tokens by their names in the tokenizer. Janus 1.3B was trained with the roles as words.
_BEGIN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
_PAD = "<\uff5c\u2581pad\u2581\uff5c>"
_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_IMAGE = "<begin_of_image>"
_IMAGE_END = "<end_of_image>"
_PLACE = "<image_placeholder>"
_USER = "<|User|>"
_ASSISTANT = "<|Assistant|>"
_FIRST_GENERATION = re.compile(r"(?<!\d)1[._]3b", re.IGNORECASE)


@in_own_state
def load_janus(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    weights: str = AUTO,
    operations: Operations = FAST,
) -> JanusModel:
    """Load a Janus-Pro of any size, or Janus 1.3B, with its tokenizer.

    Shared arguments and errors: see :mod:`.checkpoint`.

    ``config.json`` may state the head count (else heads of width 128), norm epsilon, RoPE base and grid
    (``vq_config.num_patches``), and is checked, see :mod:`.configs`. Ids of special tokens come from the tokenizer.
    Roles are words, as Janus 1.3B has them, if the tokenizer has no tokens for them or the name contains "1.3b".
    Metadata entries of a safetensors file: ``config`` and ``tokenizer`` (contents of the JSON files), ``name``, and
    ``grid`` (24).

    ``path`` is a model folder, one of its shards, or a weight file, in the authors' or in transformers' layout; the
    dtype "auto" prefers bf16, as upstream. The network is built of ``operations``, see :class:`.ops.Operations`.

    Raises:
        UserError: also if the tokenizer lacks a special token, or ``grid`` is another than the one that the model
            draws.
    """

    has_vision = False

    def is_unused(name: str) -> bool:
        nonlocal has_vision
        has_vision |= name.startswith(VISION_PREFIXES)
        return authors_name(name).startswith((*UNUSED, VQ_PREFIX)) or name.endswith(".inv_freq")

    compute = choose_dtype(dtype, device, "janus")
    file = _renamed(read(path, "janus", is_unused, weights))
    settings = file.settings("config", beside=True)
    tokenizer = load_tokenizer(file.folder, file.stem, file.metadata, letters=True)

    has_roles_as_words = _FIRST_GENERATION.search(f"{file.name} {file.path.name}") is not None
    template, pad = _template(file, tokenizer, has_roles_as_words)
    config = _config(file, settings, pad)

    side = file.number("num_patches", _GRID, 2, LARGEST_GRID, inner(file, settings, "vq_config"))
    side = file.number("grid", side, 2, LARGEST_GRID)
    if grid not in (None, side):
        raise UserError(
            f"grid: Janus generates only {side}x{side} tokens; choose auto, and enlarge the image afterwards"
        )

    net = ck.load_strictly(
        file,
        partial(Janus, config),
        operations=operations,
        dtype=compute,
        device=device,
        bits=choose_bits(dtype, device),
    )
    return JanusModel(
        net=net.fold(),
        name=file.name,
        grid=side,
        tokenize=tokenizer.encode,
        detokenize=tokenizer.decode,
        template=template,
        vision_file=Path(path) if has_vision else None,
        note=file.note,
    )


@in_own_state
def load_janus_vq(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", operations: Operations = TORCH
) -> VQModel:
    """Load the VQ tokenizer of a Janus.

    Arguments and errors as :func:`.autoencoders.load_vq`, the path as :func:`load_janus`.
    """
    compute = choose_dtype(dtype, device, "vq")
    path = Path(path)
    shards = weight_files(path, "decoder", KINDS["janus"].noun)
    whole = path if shards == [path] else shards[0].parent

    file = _renamed(ck.read(whole, "decoder", lambda name: not authors_name(name).startswith(VQ_PREFIX), shards))
    first = file.state.get(f"{VQ_PREFIX}decoder.conv_in.weight")
    if first is not None and first.shape[2:] != (3, 3):
        raise file.error("stores convolutions in the order of MLX", "choose the file for PyTorch")

    state = {name.removeprefix(VQ_PREFIX): tensor for name, tensor in file.state.items()}
    return build_vq(replace(file, state=state, what="a VQ autoencoder"), compute, device, operations)


@in_own_state
def load_janus_head(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    operations: Operations = FAST,
) -> WordHead:
    """Load the output layer for words of a Janus; arguments and errors as :func:`load_janus`.

    Raises:
        UserError: also if the file holds none.
    """
    compute = choose_dtype(dtype, device, "janus")
    file = _part(path, lambda name: name not in WORD_HEADS)
    if not file.state:
        raise file.error("lacks the output layer for words", "choose a file with all weights of the model")

    with ck.misfits(file):
        (weight,) = file.state.values()
        words, width = weight.shape
        file = replace(file, state={"lm_head.weight": weight}, what="the output layer of a Janus")

    make = partial(WordHead, width, words)
    return ck.load_strictly(file, make, operations=operations, dtype=compute, device=device)


def _part(path: str | Path, is_unused: Callable[[str], bool]) -> ck.Checkpoint:
    """Some of the weights of a file or model folder, under the names there."""
    path = Path(path)
    shards = weight_files(path, "checkpoint", KINDS["janus"].noun)
    whole = path if shards == [path] else shards[0].parent
    return ck.read(whole, "checkpoint", is_unused, shards)


@in_own_state
def load_janus_vision(
    path: str | Path,
    vq: VQModel,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    heads: int | None = None,
    operations: Operations = TORCH,
) -> ImageReader:
    """Load what reads images for a Janus; ``vq`` is :func:`load_janus_vq` of the same file.

    Arguments and errors as :func:`load_janus`. ``heads`` None: what the configuration states as
    ``vision_config.num_attention_heads``, else SigLIP's by width. ``preprocessor_config.json`` may state the least side
    of a scaled image, ``min_size`` (else 14).

    Raises:
        UserError: also if the file holds no such part.
    """
    compute = choose_dtype(dtype, device, "janus")
    file = _part(path, lambda name: not name.startswith(VISION_PREFIXES) or name.startswith(POOL_PREFIX))
    if not file.state:
        raise file.error("lacks the part that reads images", "choose a file with all weights of the model")

    about = inner(file, file.settings("config", beside=True), "vision_config")
    heads = heads or file.number("num_attention_heads", None, 1, 4096, about)
    least = file.number("min_size", LEAST_SIDE, 1, 384, file.settings("preprocessor_config", beside=True))
    with ck.misfits(file):
        file = replace(file, state=vision_state(file.state), what="the part of a Janus that reads images")
        config = VisionConfig.from_state_dict(file.state, heads)

    net = ck.load_strictly(file, partial(JanusVision, config), operations=operations, dtype=compute, device=device)
    return ImageReader(net, vq, file.name, least)


def vision_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of what reads images under the names of :class:`JanusVision`."""
    out: dict[str, Any] = {}
    for name, tensor in state.items():
        for theirs, ours in _VISION_NAMES.items():
            name = name.replace(theirs, ours, 1)

        if _JOINT in name:  # queries, keys and values one after another
            for part, own in zip("qkv", tensor.chunk(3), strict=True):
                out[name.replace(_JOINT, f".self_attn.{part}_proj.")] = own
        elif name.endswith("position_embedding.weight"):
            out[name] = tensor.reshape(tensor.shape[-2:])
        else:
            out[name] = tensor

    return out


def _renamed(file: ck.Checkpoint) -> ck.Checkpoint:
    """A file under the authors' names."""
    return replace(file, state={authors_name(name): tensor for name, tensor in file.state.items()})


def authors_name(name: str) -> str:
    """The authors' name of a parameter of either layout."""
    if name.startswith("model."):
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours, 1)

    return name


def _config(file: ck.Checkpoint, settings: Mapping[str, Any], pad: int) -> JanusConfig:
    """The shape of the weights, which the configuration must not contradict; ``pad`` is the id of the padding token."""
    fields = language_part(file, settings)
    trunk = {name.removeprefix(TRUNK): tensor for name, tensor in file.state.items() if name.startswith(TRUNK)}
    with ck.misfits(file):
        config = JanusConfig.of_janus(file.state, pad, **language_numbers(file, fields, trunk))

    expect_language(file, fields, config, config.words)
    for path, key in _CODES.items():
        expect_stated(file, inner(file, settings, *path), {key: config.vocab})
    for path, fixed in _FIXED.items():
        expect_fixed(file, inner(file, settings, *path), fixed)

    return config


def _template(file: ck.Checkpoint, tokenizer: Tokenizer, has_roles_as_words: bool) -> tuple[Template, int]:
    """Ids of the special tokens around a prompt, and of the padding token; a UserError if the tokenizer lacks one."""
    named = tokenizer.special_tokens
    missing = [name for name in (_BEGIN, _PAD, _IMAGE) if name not in named]
    if missing:
        raise file.error(
            f"has a tokenizer that lacks the token {missing[0]}",
            "replace the tokenizer with the one that belongs to this model",
        )

    has_roles_as_words |= _USER not in named or _ASSISTANT not in named
    template = Template(
        begin=named[_BEGIN],
        image=named[_IMAGE],
        user=None if has_roles_as_words else named[_USER],
        assistant=None if has_roles_as_words else named[_ASSISTANT],
        image_end=named.get(_IMAGE_END),
        place=named.get(_PLACE),
        end=named.get(_END),
    )
    return template, named[_PAD]
