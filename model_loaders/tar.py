"""Loaders of Tar: the language model, the semantic tokenizer TA-Tok, and the AR de-tokenizers (AR-DTok).

Each part has its own loader. Any language model works with any de-tokenizer trained with the same TA-Tok. The image decoder
is LlamaGen's VQ tokenizer, see ``autoencoders``. A file may contain a de-tokenizer together with its TA-Tok (prefix
``ta_tok.``) and its decoder (prefix ``vq.``). Source: Han et al. 2025 (Tar, arXiv 2506.18898).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from . import checkpoint as ck
from .families import expect
from .folders import parse_json, read_json, weight_files
from .llamagen import LARGEST_GRID, find_grid, gpt_config, grids_in_name
from .networks.llama import HEAD, Llama, LlamaConfig, TokenModel
from .networks.ops import quantize
from .networks.ta_tok import ENCODING, TATok, TATokConfig, TATokModel, unused
from .networks.tar import SpecialTokens, TarModel
from .tokenizer import Tokenizer, load_tokenizer

SCALES = 3
# Side of the finest grid of semantic codes; an AR-DTok has one condition row per code.
OFFICIAL_SIDE = 27
_OFFICIAL_PREFIX = OFFICIAL_SIDE**2
# Token ids of the official Tar, used if the folder states none.
_IMAGE, _SCALE, _CODE, _CODES = 151_665, 151_667, 151_670, 65_536
# Prefixes of a file with several networks.
_PARTS = {"ta_tok.": "ta-tok", "vq.": "vq"}
_SIZES = re.compile(r"(?<!\d)(256|512|1024)(?!\d)")


# ------------------------------------------------------------------------------------------------ language model


def load_tar(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> TarModel:
    """Load Tar's language model, of any size, with its tokenizer.

    The shape is derived from the weights; head count, norm epsilon and RoPE base come from ``config.json``. Ids of special
    tokens come from ``config.json``, else from the tokenizer's added tokens, else they are the official ones; they are
    checked against the weights. A single safetensors file may contain everything in its metadata: ``config`` and
    ``tokenizer`` (contents of the JSON files), ``name``. FastAR's addition to the configuration: ``semantic_side``, the side
    of the finest grid of codes (27).

    Args:
        path: a Hugging Face model folder, one of its shards, or a weight file; ``config.json``, ``generation_config.json``
            and the tokenizer are read from the same folder.
        dtype: "auto", "fp32", "bf16", "fp16" or "int8", see :func:`.checkpoint.choose_dtype` (with bf16, as upstream).
        device: device of the weights.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: a file is missing, damaged or of another network; the weights do not fit; the token ids are invalid.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    path = Path(path)
    files = weight_files(path, "checkpoint", "Tar's language model")
    folder = files[0].parent
    single = files == [path]  # a single file rather than a model folder
    file = ck.read_all(files, path if single else folder, "checkpoint")
    expect(file, "tar")
    settings = json_entry(file, "config") or read_json(folder / "config.json", "checkpoint")
    config = _language_config(file, settings)
    tokenizer = load_tokenizer(folder, path.stem if single else "", file.metadata)
    special, scales = _special_tokens(file, settings, tokenizer, config.vocab)
    side = file.setting(settings, "semantic_side", OFFICIAL_SIDE, scales, LARGEST_GRID)
    generation = json_entry(file, "generation_config") or (
        {} if json_entry(file, "config") else read_json(folder / "generation_config.json", "checkpoint")
    )
    penalty = file.setting(generation, "repetition_penalty", 1.0, 1e-3, 2.0)
    net = ck.build(file, "Tar's language model", lambda: Llama(config))
    # A tied output matrix is the embedding; older files contain RoPE frequencies, which are recomputed.
    weights = file.filter(lambda name: not (name == HEAD and config.tied) and not name.endswith(".inv_freq"))
    ck.load_strictly(net, weights, "Tar's language model", dtype=compute, device=device)
    return TarModel(
        net=quantize(net) if dtype == ck.INT8 else net,
        name=file.text("name", path.stem if single and path.stem != "model" else folder.name),
        tokenize=tokenizer.encode,
        special=special,
        sides=tuple(side // (scale + 1) for scale in range(scales)),
        repetition_penalty=penalty,
    )


def json_entry(file: ck.Checkpoint, key: str) -> dict[str, Any]:
    """A JSON object from the metadata; {} if the entry is missing.

    Raises:
        UserError: it is not a JSON object.
    """
    text = file.metadata.get(key)
    return {} if text is None else parse_json(text, f"the entry {key} in {file.path.name}", file.field)


def _language_config(file: ck.Checkpoint, settings: Mapping[str, Any]) -> LlamaConfig:
    rope = settings.get("rope_parameters")  # written by newer versions of transformers
    rope = rope if isinstance(rope, dict) else {}
    theta = file.setting({**rope, **settings}, "rope_theta", 1e6, 1.0, 1e12)
    scaling = settings.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind not in (None, "default"):
        raise file.error(f"uses an unsupported RoPE scaling ({str(kind)[:40]})", "choose an official Tar")
    tied = settings.get("tie_word_embeddings")
    names = [name for name in file.state if name != HEAD or not tied]
    if tied is False and HEAD not in file.state:
        raise file.error(f"does not fit Tar's language model: {HEAD} is missing")
    with ck.shape_errors(file, "Tar's language model"):
        config = LlamaConfig.of_qwen(
            {name: file.state[name] for name in names},
            heads=file.setting(settings, "num_attention_heads", None, 1, 4096),
            positions=file.setting(settings, "max_position_embeddings", 32768, 1, 1 << 24),
            theta=theta,
            eps=file.setting(settings, "rms_norm_eps", 1e-6, 0.0, 1.0),
        )
    derived = {
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden,
    }
    for key, value in derived.items():
        if file.setting(settings, key, value, 0, 1 << 30) != value:
            raise file.error(
                f"has {key} = {settings[key]} in its configuration, and weights of {value}",
                "put the configuration of the same model there",
            )
    return config


def _special_tokens(
    file: ck.Checkpoint, settings: Mapping[str, Any], tokenizer: Tokenizer, rows: int
) -> tuple[SpecialTokens, int]:
    """Ids of the special tokens, each from the first source that states it, and the number of scales.

    Raises:
        UserError: ids lie outside the embedding, overlap, or are not stated anywhere.
    """
    named = tokenizer.special_tokens
    official = rows >= _CODE + _CODES

    def find(key: str, name: str, default: int) -> int:
        if settings.get(key) is not None:
            return int(file.setting(settings, key, 0, 0, rows - 1))
        if name in named:
            return named[name]
        if not official:
            raise file.error(
                f"has {rows} tokens and nothing states which of them are image codes ({key} in config.json, {name} in the tokenizer)",
                "choose a Tar, not a plain language model",
            )
        return default

    code = find("image_start_token_id", "<I0>", _CODE)
    if settings.get("image_end_token_id") is not None:
        codes = int(file.setting(settings, "image_end_token_id", 0, 0, rows - 1)) - code + 1
    elif "<I0>" in named:
        codes = _count_run(named, "<I{}>")
    else:
        codes = _CODES
    image, scale = find("image_start_tag_id", "<im_start>", _IMAGE), find("scale_start_token_id", "<S0>", _SCALE)
    if settings.get("scale_end_token_id") is not None:
        scales = int(file.setting(settings, "scale_end_token_id", 0, 0, rows - 1)) - scale + 1
    else:
        scales = _count_run(named, "<S{}>") or SCALES
    special = SpecialTokens(image, scale, code, codes, tokenizer.chat_tokens())
    end = max(code + codes, scale + scales, image + 1, *(n + 1 for n in special.chat or ()))
    if codes < 1 or min(image, scale, code) < 0 or end > rows:
        raise file.error(
            f"has {rows} rows of embeddings, and its image codes would be tokens {code} to {code + codes - 1}",
            "choose a Tar with its own config.json and tokenizer",
        )
    if not 1 <= scales <= SCALES:
        raise file.error(f"states {scales} scales of codes, and a Tar has 1 to {SCALES}")
    if any(code <= n < code + codes for n in (image, *range(scale, scale + scales))) or scale <= image < scale + scales:
        raise file.error("gives one token two meanings (image codes, scales and the mark of an image overlap)")
    return special, scales


def _count_run(named: Mapping[str, int], name: str) -> int:
    """Number of tokens named ``name`` with the numbers 0, 1, 2, ... whose ids are consecutive."""
    first, count = named.get(name.format(0)), 0
    while first is not None and named.get(name.format(count)) == first + count:
        count += 1
    return count


# ------------------------------------------------------------------------------------------------ TA-Tok


def load_ta_tok(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", encoder: bool = True
) -> TATokModel:
    """Load a TA-Tok of any size with the official parameter names.

    The shape is derived from the weights. Unused weights of the official file are ignored. Metadata entries:
    ``encoder_heads`` (16 officially), ``decoder_heads`` (12), ``input_size`` in pixels (384; also read from the arguments in
    the official file) and ``name``.

    Args:
        path: see :func:`.checkpoint.read`; in a file with several networks the weights under ``ta_tok.`` are read.
        dtype: "auto", "fp32", "bf16" or "fp16", see :func:`.checkpoint.choose_dtype` (with bf16, as upstream). Distances to
            codes are always computed in fp32.
        device: device of the weights.
        encoder: False omits the image encoder, three quarters of the memory.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not a TA-Tok, does not fit, or has invalid metadata.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    file = ck.read(path, "ta_tok").section("ta_tok.")
    expect(file, "ta-tok")
    ignored = unused(file.state)
    heads, encoder_heads = (file.number(key, None, 1, 4096, int) for key in ("decoder_heads", "encoder_heads"))
    size = file.number("input_size", None, 1, 1 << 14, int)
    size = size or file.setting(json_entry(file, "args"), "input_size", None, 1, 1 << 14)
    with ck.shape_errors(file, "a TA-Tok"):
        shapes = {k: t for k, t in file.state.items() if encoder or not k.startswith(ENCODING)}
        config = TATokConfig.from_state_dict(shapes, heads, encoder_heads, size)
    if not config.encoder_depth:
        ignored |= {name for name in file.state if name.startswith(ENCODING)}
    net = ck.build(file, "a TA-Tok", lambda: TATok(config))
    weights = file.filter(lambda name: name not in ignored)
    return TATokModel(ck.load_strictly(net, weights, "a TA-Tok", dtype=compute, device=device), file.name)


# ------------------------------------------------------------------------------------------------ AR-DTok


def load_detokenizer(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    heads: int | None = None,
    ta_tok: TATokModel | None = None,
) -> TokenModel:
    """Load an AR-DTok of any size with the official parameter names.

    The shape is derived from the weights. The head width is 64, as in every official size, unless ``heads``, the metadata
    entry ``heads`` or the arguments in the file state a head count. Arguments that contradict the weights are refused, and so
    is a missing or misshaped table of absolute positions (upstream then samples with random positions). Other metadata
    entries: ``grid``, ``name`` and ``label_set``, the training data ("picture-book" for the demo).

    Args:
        path: see :func:`.checkpoint.read`; in a file with several networks the weights without prefix are read.
        dtype: as for :func:`load_tar`.
        device: device of the weights.
        grid: tokens per side (16, 32, 64 for 256, 512, 1024 pixels), 2 to 128; None takes it from the file or its name.
        heads: attention heads.
        ta_tok: the TA-Tok that computes the condition features, if they are computed from semantic codes; it is checked.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is not a de-tokenizer, does not fit, or contradicts itself; the grid is unknown or
            larger than the table of positions; the TA-Tok's features have another width.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    file = ck.read(path)
    expect(file, "dtok")
    arguments = json_entry(file, "args") or json_entry(file, "config")
    weights = file.filter(lambda name: not name.startswith(tuple(_PARTS)))
    config = _detokenizer_config(weights, arguments, heads)
    side = _grid(file, config, arguments, grid)
    net = ck.build(file, "a Tar de-tokenizer", lambda: Llama(config))
    ck.load_strictly(net, weights, "a Tar de-tokenizer", dtype=compute, device=device)
    model = TokenModel(
        net=quantize(net) if dtype == ck.INT8 else net,
        name=file.name,
        grid=side,
        label_set=file.text("label_set", ""),
        ta_tok=ta_tok,
    )
    if ta_tok is not None:
        expect_features(ta_tok, model)
    return model


def expect_features(ta_tok: TATokModel, model: TokenModel) -> None:
    """Check that a de-tokenizer accepts the features of a TA-Tok.

    Raises:
        UserError: the features have another width, or the de-tokenizer is conditioned on codes directly.
    """
    config, width = model.net.config, ta_tok.net.config.width
    if config.condition != "features":
        raise UserError(f"ta_tok: {model.name} draws from codes themselves, not from features; leave TA-Tok out.")
    if width != config.condition_size:
        raise UserError(
            f"ta_tok: {ta_tok.name} has features of width {width}, {model.name} needs {config.condition_size}; "
            "choose the TA-Tok it was trained with."
        )


def parts_inside(path: str | Path) -> frozenset[str]:
    """Networks in a safetensors file besides a de-tokenizer: "ta-tok", "vq" or both. No weights are read."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return frozenset()
    return frozenset(family for prefix, family in _PARTS.items() if any(name.startswith(prefix) for name in names))


def _detokenizer_config(file: ck.Checkpoint, arguments: Mapping[str, Any], heads: int | None) -> LlamaConfig:
    heads = heads or file.number("heads", None, 1, 1024, int) or file.setting(arguments, "n_head", None, 1, 1024)
    width = max(file.state["tok_embeddings.weight"].shape[-1:], default=0)
    c = gpt_config(file, "a Tar de-tokenizer", heads or max(1, width // 64))
    if not c.absolute:
        raise file.error("does not fit a Tar de-tokenizer: abs_pe is missing")
    derived = {
        "dim": c.dim,
        "n_layer": c.depth,
        "vocab_size": c.vocab,
        "n_kv_head": c.kv_heads,
        "cond_dim" if c.condition == "features" else "cond_vocab_size": c.condition_size,
    }
    for key, value in derived.items():
        if file.setting(arguments, key, value, 0, 1 << 30) != value:
            raise file.error(f"has weights of {key} = {value}, and arguments of {arguments[key]}")
    return c


def _grid(file: ck.Checkpoint, config: LlamaConfig, arguments: Mapping[str, Any], requested: int | None) -> int:
    """Tokens per side of the image.

    Raises:
        UserError: see :func:`load_detokenizer`.
    """
    rows = config.absolute
    stated = file.number("grid", None, 2, LARGEST_GRID, int)
    tokens = file.setting(arguments, "max_seq_len", None, 4, LARGEST_GRID**2)
    prefix = file.setting(arguments, "cls_token_num", None, 1, 1 << 20)
    if tokens is not None:
        side = math.isqrt(tokens)
        if side**2 != tokens or stated not in (None, side) or prefix is not None and rows != tokens + prefix - 1:
            raise file.error(
                f"has {rows} positions, and arguments of {tokens} picture tokens behind {prefix or 'its'} condition rows"
            )
        stated = side
    if stated is None:
        side = math.isqrt(max(0, rows - _OFFICIAL_PREFIX + 1))
        stated = side if side >= 2 and side**2 == rows - _OFFICIAL_PREFIX + 1 else None
    named = grids_in_name(file.path.stem, _SIZES)
    grid = find_grid(file, requested, stated, named, "16 (256 pixels), 32 (512) and 64 (1024)")
    if grid**2 > rows:
        raise UserError(
            f"grid: {grid}x{grid} tokens need at least {grid**2} positions, {file.path.name} has {rows}; choose a smaller grid"
        )
    return grid
