"""Loader of Harmon and UniPic."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from . import checkpoint as ck
from .families import expect
from .folders import read_json, weight_files
from .mar import FP32_WEIGHTS, latent_metadata
from .networks.hybrid import MAR_PREFIX, TABLES, Hybrid, HybridConfig, resize_table
from .networks.ops import quantize
from .networks.prompts import HybridModel
from .tar import json_entry
from .tokenizer import Tokenizer, has_tokenizer, load_tokenizer

# Weights that no picture needs: the tied output matrix, the image reader, the VAE (a decoder of its own is loaded), class labels,
# RoPE frequencies, and what training scripts leave behind.
_UNREAD = ("llm.lm_head.", "siglip2.", "vae.", "mar.class_emb.")
_LEFT = ("siglip2_proj.", "mar.label_drop", "mar.mask_ratio", "mar.diffusion_batch_mul", "mar.diffloss.diffusion_batch")
_READER = "siglip2_proj."
# UniPic: rows of its stored table, and the largest beta of its diffusion, which no file states.
_UNIPIC_TOKENS, UNIPIC_MAX_BETA, MAX_BETA = 1024, 0.2, 0.999
# The official models draw pictures of twice the side of their stored tables.
_TRAINED = 2
SMALLEST_GRID, LARGEST_GRID = 2, 128
_WHAT = "Harmon or UniPic"


def precision(dtype: str, device: str | torch.device) -> torch.dtype:
    """Compute dtype: "auto" is bf16 on GPUs that compute it at full speed, else fp32.

    Raises:
        UserError: unknown name, or fp16, in which activations of Qwen2.5 overflow.
    """
    return ck.without_fp16(dtype, device, "the language model of Harmon and UniPic")


def load_hybrid(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    tokenizer_dir: Path | None = None,
) -> HybridModel:
    """Load a Harmon or UniPic of any size with the official parameter names, and its tokenizer.

    The shape is derived from the weights. Head counts are those of the official model of the same width, unless the configuration
    states ``llm.num_attention_heads`` and ``mar.encoder_num_heads``. Weights that no picture needs are ignored, most of them
    without being read. Position tables are resized to the sampled grid in fp32.

    Metadata entries of a single safetensors file: ``config`` and ``tokenizer`` (contents of the JSON files), ``grid`` (tokens per side of
    the pictures it was trained for; officially twice that of the stored tables), ``max_beta`` (largest beta of the diffusion; 0.2 for
    UniPic, else 0.999), ``latent_scale`` (0.2325), ``t_max`` (999), ``patch`` (1), ``label_set`` and ``name``.

    Args:
        path: a Hugging Face model folder, one of its shards, or a weight file.
        dtype: see :func:`precision`. The last layer of the diffusion head is always fp32.
        device: device of the weights.
        grid: tokens per side, 2 to 128; None for the size it was trained for.
        tokenizer_dir: folder of a Qwen2.5 tokenizer, for models that come without one; None for none.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: a file is missing, damaged or of another network; the weights do not fit; invalid metadata.
    """
    compute, path = precision(dtype, device), Path(path)
    files = weight_files(path, "checkpoint", _WHAT)
    folder, single = files[0].parent, files == [path]
    file = ck.read_all(files, path if single else folder, "checkpoint", lambda name: name.startswith(_UNREAD))
    expect(file, "hybrid")
    settings = json_entry(file, "config") or ({} if single else read_json(folder / "config.json", "checkpoint"))
    reader = any(name.startswith(_READER) for name in file.state)
    config = config_of(file, settings)
    stated = latent_metadata(file, config.mar.channels)
    trained = file.number("grid", min(_TRAINED * config.mar.grid, LARGEST_GRID), SMALLEST_GRID, LARGEST_GRID, int)
    side = trained if grid is None else grid
    if not SMALLEST_GRID <= side <= LARGEST_GRID:
        raise UserError(f"grid: {side} tokens per side are outside {SMALLEST_GRID} to {LARGEST_GRID}.")
    unipic = reader or config.mar.tokens == _UNIPIC_TOKENS
    usual = file.setting(_part(settings, "diffusion"), "max_beta", UNIPIC_MAX_BETA if unipic else MAX_BETA, 1e-4, 1.0)
    max_beta = file.number("max_beta", usual, 1e-4, 1.0, float)
    stem = path.stem if single else ""
    if tokenizer_dir is None or has_tokenizer(folder, stem, file.metadata):
        tokenizer_dir = folder
    tokenizer = load_tokenizer(tokenizer_dir, stem, file.metadata)
    net = load_network(file, config, side, side, compute, device)
    if dtype == ck.INT8:
        quantize(net)
    return HybridModel(
        net=net.mar,
        name=file.text("name", stem or folder.name),
        **stated,
        label_set=file.text("label_set", ""),
        max_beta=max_beta,
        hybrid=net,
        tokenize=tokenizer.encode,
        turn=_chat_tokens(file, tokenizer, config),
        trained=trained,
    )


def load_network(
    file: ck.Checkpoint,
    config: HybridConfig,
    height: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Hybrid:
    """The network of a file, with position tables of another grid.

    Args:
        file: the weights; those that no picture needs are ignored.
        config: their shape.
        height, width: tokens of the grid.
        dtype, device: of the loaded weights.

    Raises:
        UserError: the weights do not fit.
    """
    state = {n: t for n, t in file.state.items() if not n.startswith(_UNREAD + _LEFT) and not n.endswith(".inv_freq")}
    with ck.shape_errors(file, _WHAT):
        for table in TABLES:
            stored = state[MAR_PREFIX + table]
            state[MAR_PREFIX + table] = resize_table(stored.float(), config.mar.grid, height, width)
    net = ck.build(file, _WHAT, lambda: Hybrid(replace(config, mar=replace(config.mar, tokens=height * width))))
    fp32 = [MAR_PREFIX + prefix for prefix in FP32_WEIGHTS]
    return ck.load_strictly(net, replace(file, state=state), _WHAT, dtype=dtype, fp32=fp32, device=device)


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """An inner dictionary of the configuration; {} if there is none."""
    return settings[name] if isinstance(settings.get(name), dict) else {}


def config_of(file: ck.Checkpoint, settings: dict[str, Any]) -> HybridConfig:
    """The shape of the stored weights.

    Args:
        file: the weights.
        settings: the configuration, {} for an official size.

    Raises:
        UserError: the weights or the configuration do not fit.
    """
    llm, mar = _part(settings, "llm"), _part(settings, "mar")
    with ck.shape_errors(file, _WHAT):
        config = HybridConfig.from_state_dict(
            file.state,
            heads=file.setting(llm, "num_attention_heads", None, 1, 4096),
            mar_heads=file.setting(mar, "encoder_num_heads", None, 1, 1024),
            positions=file.setting(llm, "max_position_embeddings", 32768, 1, 1 << 24),
            theta=file.setting(llm, "rope_theta", 1e6, 1.0, 1e12),
            eps=file.setting(llm, "rms_norm_eps", 1e-6, 0.0, 1.0),
        )
    sizes = [*astuple(replace(config.mar, classes=1)), config.llm.dim, config.llm.depth, config.llm.hidden]
    if min(sizes) < 1:
        raise file.error(f"does not fit {_WHAT}: a part of it is missing or empty")
    return config


def _chat_tokens(file: ck.Checkpoint, tokenizer: Tokenizer, config: HybridConfig) -> tuple[int, int]:
    """Ids of the special tokens of a chat turn.

    Raises:
        UserError: they are unknown, or outside the embedding.
    """
    ids = tokenizer.chat_tokens()
    if ids is None or not 0 <= min(ids) <= max(ids) < config.llm.vocab:
        raise file.error(
            f"has {config.llm.vocab} rows of embeddings, and its tokenizer has no <|im_start|> and <|im_end|> among them",
            "put the tokenizer of the same model there",
        )
    return ids
