"""Loader of Harmon and UniPic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...networks.hybrid import (
    LLM_PREFIX,
    MAR_PREFIX,
    OFFICIAL_HEADS,
    TABLES,
    Hybrid,
    HybridConfig,
    HybridModel,
    resize_table,
)
from ...networks.mar import OFFICIAL_HEADS as MAR_HEADS
from ...networks.ops import FAST, Operations
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.configs import REMEDY, expect_fixed, expect_language, expect_stated, inner, language_numbers, language_part
from ..files.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_bits, choose_dtype, read
from ..mar.loader import FP32_WEIGHTS, latent_metadata

# Weights that no image needs: the tied output matrix, the image reader, the VAE (a decoder of its own is loaded), class
# labels, RoPE frequencies, and what training scripts leave behind.
_UNREAD = ("llm.lm_head.", "siglip2.", "vae.", "mar.class_emb.")
_READER = "siglip2_proj."
_LEFT = (_READER, "mar.label_drop", "mar.mask_ratio", "mar.diffusion_batch_mul", "mar.diffloss.diffusion_batch")
# The largest beta of the diffusion: of UniPic, which no file states, and of Harmon.
UNIPIC_MAX_BETA = 0.2
MAX_BETA = 0.999
# Rows of UniPic's stored position table.
_UNIPIC_TOKENS = 1024
# The official models draw images of twice the side of their stored tables.
_TRAINED = 2
SMALLEST_GRID = 2
LARGEST_GRID = 128
# Fields of the part ``mar`` of a configuration, and the attributes of MARConfig that they must equal.
PROVED = {
    "encoder_embed_dim": "dim",
    "decoder_embed_dim": "dim",
    "encoder_depth": "encoder_depth",
    "decoder_depth": "decoder_depth",
    "decoder_num_heads": "heads",
    "buffer_size": "buffer",
    "diffloss_d": "head_depth",
    "diffloss_w": "head_width",
}


@in_own_state
def load_hybrid(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    find_tokenizer: Callable[[], Path] | None = None,
    weights: str = AUTO,
    operations: Operations = FAST,
) -> HybridModel:
    """Load a Harmon or UniPic of any size, and its tokenizer. Shared arguments and errors: see :mod:`.checkpoint`.

    Head counts are those of the official model of the same width, unless the configuration states
    ``llm.num_attention_heads`` and ``mar.encoder_num_heads``; see :mod:`.configs` for what else it may state. Weights
    that no image needs are ignored. Position tables are resized to the sampled grid in fp32. The last layer of the
    diffusion head is always fp32.

    Args:
        path: a Hugging Face model folder, one of its shards, or a weight file.
        dtype: see :func:`.kinds.choose_dtype`.
        device: of the weights.
        grid: tokens per side, 2 to 128; None for the size it was trained for.
        find_tokenizer: called for the folder of a Qwen2.5 tokenizer if the model comes without one.
        weights: "ema" for averaged weights, "trained" for the others, "auto" for averaged ones where a file holds
            both.
        operations: of which the network is built, see :class:`.ops.Operations`.

    Metadata entries of a single safetensors file: ``config`` and ``tokenizer`` (contents of the JSON files), ``grid``
    (tokens per side of the images it was trained for; officially twice that of the stored tables), ``max_beta``
    (largest beta of the diffusion; 0.2 for UniPic, else 0.999), ``latent_scale`` (else the configuration's
    ``vae_scale``, else 0.2325), ``t_max`` (999), ``patch`` (1), ``label_set`` and ``name``.
    """
    compute = choose_dtype(dtype, device, "hybrid")
    file = read(path, "hybrid", lambda name: name.startswith(_UNREAD), weights)
    settings = file.settings("config", beside=True)
    config = config_of(file, settings)

    stated = latent_metadata(file, config.mar.channels)
    vae_scale = file.number("vae_scale", 0.2325, 1e-4, 1e4, settings)
    stated["latent_scale"] = file.number("latent_scale", vae_scale, 1e-4, 1e4)
    expect_fixed(file, inner(file, settings, "mar"), {"patch_size": (stated["patch"],)})

    trained = file.number("grid", min(_TRAINED * config.mar.grid, LARGEST_GRID), SMALLEST_GRID, LARGEST_GRID)
    side = trained if grid is None else grid
    if not SMALLEST_GRID <= side <= LARGEST_GRID:
        raise UserError(f"grid: {side} tokens per side are not possible; choose {SMALLEST_GRID} to {LARGEST_GRID}.")

    max_beta = _max_beta(file, settings, config)
    tokenizer, chat = _tokenizer(file, config, find_tokenizer)
    net = load_network(
        file, config, side, side, operations=operations, dtype=compute, device=device, bits=choose_bits(dtype, device)
    )
    return HybridModel(
        net=net.mar,
        name=file.name,
        **stated,
        label_set=file.text("label_set", ""),
        max_beta=max_beta,
        hybrid=net,
        tokenize=tokenizer.encode,
        turn=chat,
        trained=trained,
        assumed=file.note,
    )


def _max_beta(file: ck.Checkpoint, settings: dict[str, Any], config: HybridConfig) -> float:
    """The largest beta of the diffusion: of the metadata, else of the configuration, else of the official model."""
    is_unipic = config.mar.tokens == _UNIPIC_TOKENS or any(name.startswith(_READER) for name in file.state)
    official = UNIPIC_MAX_BETA if is_unipic else MAX_BETA

    of_config = file.number("max_beta", official, 1e-4, 1.0, inner(file, settings, "diffusion"))
    return file.number("max_beta", of_config, 1e-4, 1.0)


def _tokenizer(
    file: ck.Checkpoint, config: HybridConfig, find_tokenizer: Callable[[], Path] | None
) -> tuple[Tokenizer, tuple[int, int]]:
    """The tokenizer of a model, and its ids of the start and end of a chat turn."""
    own = has_tokenizer(file.folder, file.stem, file.metadata)
    folder = file.folder if own or find_tokenizer is None else find_tokenizer()
    tokenizer = load_tokenizer(folder, file.stem, file.metadata)

    chat = tokenizer.chat_tokens()
    if chat is None or max(chat) >= config.llm.vocab:
        raise file.error(
            f"has {config.llm.vocab} tokens, but its tokenizer does not have both <|im_start|> and <|im_end|> among "
            f"the ids 0 to {config.llm.vocab - 1}",
            "replace the tokenizer with the one that belongs to this model",
        )

    return tokenizer, chat


def load_network(file: ck.Checkpoint, config: HybridConfig, height: int, width: int, **load: Any) -> Hybrid:
    """The network of a file whose weights have the shape ``config``, for images of ``height`` x ``width`` tokens.

    ``load``: see :func:`.checkpoint.load_strictly`.
    """
    file = file.filter(lambda name: not name.startswith(_UNREAD + _LEFT) and not name.endswith(".inv_freq"))
    with ck.misfits(file):
        for table in TABLES:
            stored = file.state[MAR_PREFIX + table].float()
            file.state[MAR_PREFIX + table] = resize_table(stored, config.mar.grid, height, width)

    resized = replace(config, mar=replace(config.mar, tokens=height * width))
    fp32 = [MAR_PREFIX + prefix for prefix in FP32_WEIGHTS]
    return ck.load_strictly(file, partial(Hybrid, resized), fp32=fp32, **load)


def config_of(file: ck.Checkpoint, settings: dict[str, Any]) -> HybridConfig:
    """The shape of the stored weights; ``settings`` is the configuration, {} for an official size."""
    fields = language_part(file, settings)
    mar = inner(file, settings, "mar")
    trunk = {name.removeprefix(LLM_PREFIX): t for name, t in file.state.items() if name.startswith(LLM_PREFIX)}
    numbers = language_numbers(file, fields, trunk, OFFICIAL_HEADS)

    with ck.misfits(file):
        width = file.state[f"{MAR_PREFIX}fake_latent"].shape[1]
    mar_heads = file.number("encoder_num_heads", MAR_HEADS.get(width), 1, 1024, mar)
    if mar_heads is None:
        raise file.error(
            f"states no mar.encoder_num_heads in its configuration, and no official MAR has the width {width}", REMEDY
        )
    if width % mar_heads:
        raise file.error(
            f"states encoder_num_heads = {mar_heads} in its configuration, but {mar_heads} does not divide the MAR's "
            f"width of {width}",
            REMEDY,
        )

    with ck.misfits(file):
        config = HybridConfig.from_state_dict(file.state, mar_heads=mar_heads, **numbers)
    sizes = [*astuple(replace(config.mar, classes=1)), config.llm.dim, config.llm.depth, config.llm.hidden]
    if min(sizes) < 1:
        raise file.error(f"does not fit {file.what}: a part of the model is missing or empty")

    expect_language(file, fields, config.llm, config.llm.vocab)
    expect_stated(file, mar, {name: getattr(config.mar, attribute) for name, attribute in PROVED.items()})
    return config
