"""Tar's files to models: the language model, the semantic tokenizer TA-Tok, and the de-tokenizers AR-DTok.

Each part has its own loader, so that they can be combined and freed one by one: any language model with any de-tokenizer, as
long as both were trained with the same TA-Tok. The picture's decoder is LlamaGen's VQ, see ``autoencoders``. A file may also
hold a de-tokenizer together with its TA-Tok (under ``ta_tok.``) and its decoder (under ``vq.``).
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
from .folders import parse_json, read_json, read_weights, weight_files
from .llamagen import LARGEST_GRID
from .networks.gpt import GPT, GPTConfig, TokenModel
from .networks.qwen import HEAD, Marks, QwenConfig, QwenLM, TarModel
from .networks.ta_tok import ENCODING, TATok, TATokConfig, TATokModel, unused
from .tokenizer import Tokenizer, clean, load_tokenizer

SCALES = 3
# Side of the finest grid of codes, and the tokens it stands for in front of an AR-DTok.
OFFICIAL_SIDE = 27
_OFFICIAL_PREFIX = OFFICIAL_SIDE**2
# Ids of an official Tar, where nothing in its folder says them: Qwen2.5's tokenizer ends at 151,664, then come Tar's tokens.
_TEXT_TOKENS, _IMAGE, _SCALE, _CODE, _CODES = 151_643, 151_665, 151_667, 151_670, 65_536
_TURN, _OPENING, _CLOSING = (151_644, 151_645), "<|im_start|>", "<|im_end|>"
# The prefixes of a file that holds several networks.
_PARTS = {"ta_tok.": "ta-tok", "vq.": "vq"}
_STRIDE, _SIZES = 16, re.compile(r"(?<!\d)(256|512|1024)(?!\d)")


# ------------------------------------------------------------------------------------------------ language model


def load_tar(path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu") -> TarModel:
    """Load Tar's language model, of any size, with its tokenizer.

    The shape follows from the weights; head count, norms and rotations come from ``config.json``. Ids of the marks come from
    there, else from the tokenizer's added tokens, else they are the official ones; in any case they are checked against the
    weights. A single safetensors file may bring all of it in its metadata: ``config`` and ``tokenizer`` (what the JSON files
    would say), ``name``. Of our own in the configuration: ``semantic_side``, the side of the finest grid of codes (27).

    Args:
        path: a folder as Hugging Face lays it out, one of the pieces in it, or a weight file; ``config.json``,
            ``generation_config.json`` and the tokenizer are looked for beside it.
        dtype: "auto", "fp32", "bf16" or "fp16", see :func:`.checkpoint.choose_dtype` (with bf16, as upstream).
        device: where the weights go.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: a file is missing, damaged or of another network; the weights do not fit; its ids make no sense.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    path = Path(path)
    files = weight_files(path, "checkpoint", "Tar's language model")
    folder = files[0].parent
    alone = files == [path]  # a file of its own, and not a folder's
    file = read_weights(path if alone else folder, files, "checkpoint")
    ck.expect(file, "tar language model")
    about = _stated(file, "config") or read_json(folder / "config.json", "checkpoint")
    config = _language_config(file, about)
    tokenizer = load_tokenizer(folder, path.stem if alone else "", file.metadata)
    marks, scales = _marks(file, about, tokenizer, config.vocab)
    side = _number(file, about, "semantic_side", OFFICIAL_SIDE, scales, LARGEST_GRID)
    generation = _stated(file, "generation_config") or (
        {} if _stated(file, "config") else read_json(folder / "generation_config.json", "checkpoint")
    )
    penalty = generation.get("repetition_penalty", 1.0)
    with torch.device("meta"):
        net = QwenLM(config)
    # The embedding's second name; older files hold tables that follow from the configuration.
    state = {k: t for k, t in file.state.items() if not (k == HEAD and config.tied) and not k.endswith(".inv_freq")}
    ck.load_strictly(net, state, file.path, "Tar's language model", dtype=compute, device=device)
    return TarModel(
        net=net.eval().requires_grad_(False),
        name=ck.metadata_text(file, "name", path.stem if alone and path.stem != "model" else folder.name),
        words=lambda text: tokenizer.encode(clean(text)),
        marks=marks,
        sides=tuple(side // (scale + 1) for scale in range(scales)),
        repetition_penalty=float(penalty) if _is_number(penalty) and 0 < penalty <= 2 else 1.0,
    )


def _stated(file: ck.Checkpoint, key: str) -> dict[str, Any]:
    """A JSON object in the metadata; {} if there is none.

    Raises:
        UserError: it is damaged.
    """
    if key not in file.metadata:
        return {}
    try:
        return parse_json(file.metadata[key])
    except (ValueError, RecursionError) as e:
        raise file.complain(f"has a metadata entry {key!r} that cannot be read ({str(e)[:80]})") from e


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(file: ck.Checkpoint, about: Mapping[str, Any], key: str, default: Any, low: float, high: float) -> Any:
    """A number of a configuration, of the default's type; ``default`` where it is absent or null.

    Raises:
        UserError: it is no such number or out of range.
    """
    value = about.get(key)
    if value is None:
        return default
    whole = not isinstance(default, float)
    if not _is_number(value) or whole and value != int(value) or not low <= value <= high:
        noun = "a whole number" if whole else "a number"
        raise file.complain(
            f"has {key} = {str(value)[:40]} in its configuration, which must be {noun} from {low:g} to {high:g}"
        )
    return int(value) if whole else float(value)


def _language_config(file: ck.Checkpoint, about: Mapping[str, Any]) -> QwenConfig:
    rotation = about.get("rope_parameters")  # where newer transformers keep it
    rotation = rotation if isinstance(rotation, dict) else {}
    theta = _number(file, {**rotation, **about}, "rope_theta", 1e6, 1.0, 1e12)
    scaling = about.get("rope_scaling") or rotation
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind not in (None, "default"):
        raise file.complain(
            f"turns positions in a way that is not known here ({str(kind)[:40]})", "choose an official Tar"
        )
    tied = about.get("tie_word_embeddings")
    names = [name for name in file.state if name != HEAD or not tied]
    if tied is False and HEAD not in file.state:
        raise file.complain(f"does not fit Tar's language model: {HEAD} is missing")
    try:
        config = QwenConfig.from_state_dict(
            {name: file.state[name] for name in names},
            heads=_number(file, about, "num_attention_heads", None, 1, 4096),
            positions=_number(file, about, "max_position_embeddings", 32768, 1, 1 << 24),
            theta=theta,
            eps=_number(file, about, "rms_norm_eps", 1e-6, 0.0, 1.0),
        )
    except KeyError as e:
        raise file.complain(f"does not fit Tar's language model: {e.args[0]} is missing") from e
    except (IndexError, ZeroDivisionError) as e:
        raise file.complain("does not fit Tar's language model: its weights are misshaped") from e
    except ValueError as e:
        misshaped = "unpack" in str(e)
        raise file.complain(
            "does not fit Tar's language model: " + ("its weights are misshaped" if misshaped else str(e))
        ) from e
    held = {
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden,
    }
    for key, value in held.items():
        if _number(file, about, key, value, 0, 1 << 30) != value:
            raise file.complain(
                f"has {key} = {about[key]} in its configuration, and weights of {value}",
                "put the configuration of the same model there",
            )
    return config


def _marks(file: ck.Checkpoint, about: Mapping[str, Any], tokenizer: Tokenizer, rows: int) -> tuple[Marks, int]:
    """Ids of the marks, each from the first place that says it, and how many scales there are.

    Raises:
        UserError: they lie outside the embedding or on top of each other, or nothing says them.
    """
    named = tokenizer.marks
    official = rows >= _CODE + _CODES

    def find(key: str, name: str, default: int) -> int:
        if about.get(key) is not None:
            return int(_number(file, about, key, 0, 0, rows - 1))
        if name in named:
            return named[name]
        if not official:
            raise file.complain(
                f"knows {rows} tokens and nothing says which of them are image codes ({key} in config.json, {name} in the tokenizer)",
                "choose a Tar, not a plain language model",
            )
        return default

    code = find("image_start_token_id", "<I0>", _CODE)
    if about.get("image_end_token_id") is not None:
        codes = int(_number(file, about, "image_end_token_id", 0, 0, rows - 1)) - code + 1
    elif "<I0>" in named:
        codes = _run(named, "<I{}>")
    else:
        codes = _CODES
    image, scale = find("image_start_tag_id", "<im_start>", _IMAGE), find("scale_start_token_id", "<S0>", _SCALE)
    if about.get("scale_end_token_id") is not None:
        scales = int(_number(file, about, "scale_end_token_id", 0, 0, rows - 1)) - scale + 1
    else:
        scales = _run(named, "<S{}>") or SCALES
    turn = named.get(_OPENING), named.get(_CLOSING)
    if None in turn:  # a vocabulary without its added tokens
        turn = _TURN if tokenizer.size == _TEXT_TOKENS else (None, None)
    opening, closing = turn
    marks = Marks(
        image, scale, code, codes, (opening, closing) if opening is not None and closing is not None else None
    )
    most = max(code + codes, scale + scales, image + 1, *(n + 1 for n in marks.turn or ()))
    if codes < 1 or min(image, scale, code) < 0 or most > rows:
        raise file.complain(
            f"has {rows} rows of embeddings, and its image codes would be tokens {code} to {code + codes - 1}",
            "choose a Tar with its own config.json and tokenizer",
        )
    if not 1 <= scales <= SCALES:
        raise file.complain(f"speaks of {scales} scales of codes, and a Tar has 1 to {SCALES}")
    if any(code <= n < code + codes for n in (image, *range(scale, scale + scales))) or scale <= image < scale + scales:
        raise file.complain("gives one token two meanings (image codes, scales and the mark of an image overlap)")
    return marks, scales


def _run(named: Mapping[str, int], name: str) -> int:
    """How many tokens of that name there are with numbers and ids from the first on without a gap."""
    first, count = named.get(name.format(0)), 0
    while first is not None and named.get(name.format(count)) == first + count:
        count += 1
    return count


# ------------------------------------------------------------------------------------------------ TA-Tok


def load_ta_tok(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", encoder: bool = True
) -> TATokModel:
    """Load a TA-Tok of any size with the official parameter names.

    The shape follows from the weights. What the official file holds and nothing uses is passed over. Metadata may give
    ``encoder_heads`` (16 officially), ``decoder_heads`` (12), ``input_size`` (384) and ``name``; the arguments within the
    official file, ``input_size``.

    Args:
        path: see :func:`.checkpoint.read`; of a file that holds several networks what stands under ``ta_tok.``.
        dtype: "auto", "fp32", "bf16" or "fp16", see :func:`.checkpoint.choose_dtype` (with bf16, as upstream). Codes are
            compared in fp32 in any case.
        device: where the weights go.
        encoder: False leaves out what only turns pictures into codes, three quarters of the memory.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no TA-Tok, does not fit, or its metadata makes no sense.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    file = ck.part(ck.read(path, "ta_tok"), "ta_tok.")
    ck.expect(file, "ta-tok")
    idle = unused(file.state)
    heads, encoder_heads = (
        ck.metadata_number(file, key, None, 1, 4096, int) for key in ("decoder_heads", "encoder_heads")
    )
    size = ck.metadata_number(file, "input_size", None, 1, 1 << 14, int)
    size = size or _number(file, _stated(file, "args"), "input_size", None, 1, 1 << 14)
    try:
        shapes = {k: t for k, t in file.state.items() if encoder or not k.startswith(ENCODING)}
        config = TATokConfig.from_state_dict(shapes, heads, encoder_heads, size)
    except KeyError as e:
        raise file.complain(f"does not fit a TA-Tok: {e.args[0]} is missing") from e
    except (IndexError, ZeroDivisionError) as e:
        raise file.complain("does not fit a TA-Tok: its weights are misshaped") from e
    except ValueError as e:
        raise file.complain(
            "does not fit a TA-Tok: " + ("its weights are misshaped" if "unpack" in str(e) else str(e))
        ) from e
    if not config.encoder_depth:
        idle |= {name for name in file.state if name.startswith(ENCODING)}
    with torch.device("meta"):
        net = TATok(config)
    state = {name: t for name, t in file.state.items() if name not in idle}
    ck.load_strictly(net, state, file.path, "a TA-Tok", dtype=compute, device=device, field=file.field)
    return TATokModel(net.eval().requires_grad_(False), ck.metadata_text(file, "name", file.path.stem))


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

    The shape follows from the weights, heads of width 64 as in every official size. Arguments within the file, and the
    metadata entries ``heads`` and ``grid``, go first; arguments that contradict the weights are refused. So is a position
    table that does not fit: upstream leaves one out, and draws with random positions. Metadata may also give ``name`` and
    ``label_set``, the data it was trained on ("picture-book" is the demo).

    Args:
        path: see :func:`.checkpoint.read`; of a file that holds several networks what has no prefix.
        dtype: as for :func:`load_ta_tok`.
        device: where the weights go.
        grid: tokens along one side of the picture (16, 32, 64 for 256, 512, 1024 pixels), 2 to 128; None takes it from the
            file, or from its name.
        heads: attention heads, for files that do not say.
        ta_tok: what makes its features of semantic codes, if it is to be given those; it is checked.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        UserError: the file cannot be read, is no de-tokenizer, does not fit, or contradicts itself; the grid is unknown or
            larger than its positions; the TA-Tok makes other features than it reads.
    """
    compute = ck.choose_dtype(dtype, device, bf16=True)
    file = ck.read(path)
    ck.expect(file, "dtok")
    arguments = _stated(file, "args") or _stated(file, "config")
    state = {name: t for name, t in file.state.items() if not name.startswith(tuple(_PARTS))}
    config = _detokenizer_config(file, state, arguments, heads)
    side = _grid(file, config, arguments, grid)
    with torch.device("meta"):
        net = GPT(config)
    ck.load_strictly(net, state, file.path, "a Tar de-tokenizer", dtype=compute, device=device)
    model = TokenModel(
        net=net.eval().requires_grad_(False),
        name=ck.metadata_text(file, "name", file.path.stem),
        grid=side,
        label_set=ck.metadata_text(file, "label_set", ""),
        ta_tok=ta_tok,
    )
    if ta_tok is not None:
        expect_features(ta_tok, model)
    return model


def expect_features(ta_tok: TATokModel, model: TokenModel) -> None:
    """Nothing if a de-tokenizer can draw from a TA-Tok.

    Raises:
        UserError: the features have another width, or it draws from codes without any.
    """
    c, makes = model.net.config, ta_tok.net.config.width
    if c.condition != "features":
        raise UserError(f"ta_tok: {model.name} draws from codes themselves, not from features; leave TA-Tok out.")
    if makes != c.condition_size:
        raise UserError(
            f"ta_tok: {ta_tok.name} makes features of {makes} numbers, {model.name} reads {c.condition_size}; "
            "choose the TA-Tok it was trained with."
        )


def parts_inside(path: str | Path) -> frozenset[str]:
    """Which networks a safetensors file holds besides a de-tokenizer: "ta-tok", "vq" or both. No weights are read."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return frozenset()
    return frozenset(family for prefix, family in _PARTS.items() if any(name.startswith(prefix) for name in names))


def _detokenizer_config(
    file: ck.Checkpoint, state: Mapping[str, torch.Tensor], arguments: Mapping[str, Any], heads: int | None
) -> GPTConfig:
    what = "a Tar de-tokenizer"
    if any("emb" in name and tensor.ndim != 2 for name, tensor in state.items()):
        raise file.complain(f"does not fit {what}: its embeddings are misshaped")
    heads = (
        heads
        or ck.metadata_number(file, "heads", None, 1, 1024, int)
        or _number(file, arguments, "n_head", None, 1, 1024)
    )
    try:
        width = state["tok_embeddings.weight"].shape[1]
        config = GPTConfig.from_state_dict(state, heads or max(1, width // 64))
    except KeyError as e:
        raise file.complain(f"does not fit {what}: {e.args[0]} is missing") from e
    except (IndexError, ZeroDivisionError) as e:
        raise file.complain(f"does not fit {what}: its weights are misshaped") from e
    except ValueError as e:
        raise file.complain("cannot be used: " + ("its weights are misshaped" if "unpack" in str(e) else str(e))) from e
    c = config
    if min(c.dim, c.depth, c.hidden, c.vocab, c.condition_size) < 1:
        raise file.complain(f"does not fit {what}: a part of it is missing or empty")
    if not c.absolute:
        raise file.complain(f"does not fit {what}: abs_pe is missing")
    held = {
        "dim": c.dim,
        "n_layer": c.depth,
        "vocab_size": c.vocab,
        "n_kv_head": c.kv_heads,
        "cond_dim" if c.condition == "features" else "cond_vocab_size": c.condition_size,
    }
    for key, value in held.items():
        if _number(file, arguments, key, value, 0, 1 << 30) != value:
            raise file.complain(f"has weights of {key} = {value}, and arguments of {arguments[key]}")
    return c


def _grid(file: ck.Checkpoint, config: GPTConfig, arguments: Mapping[str, Any], wanted: int | None) -> int:
    """Tokens along one side of the picture.

    Raises:
        UserError: see :func:`load_detokenizer`.
    """
    name, rows = file.path.name, config.absolute
    own = ck.metadata_number(file, "grid", None, 2, LARGEST_GRID, int)
    tokens = _number(file, arguments, "max_seq_len", None, 4, LARGEST_GRID**2)
    prefix = _number(file, arguments, "cls_token_num", None, 1, 1 << 20)
    if tokens is not None:
        side = math.isqrt(tokens)
        if side**2 != tokens or own not in (None, side) or prefix is not None and rows != tokens + prefix - 1:
            raise file.complain(
                f"has {rows} positions, and arguments of {tokens} picture tokens behind {prefix or 'its'} condition rows"
            )
        own = side
    if own is None:
        side = math.isqrt(max(0, rows - _OFFICIAL_PREFIX + 1))
        own = side if side >= 2 and side**2 == rows - _OFFICIAL_PREFIX + 1 else None
    named = {int(size) // _STRIDE for size in _SIZES.findall(file.path.stem)}
    if wanted is not None:
        if not 2 <= wanted <= LARGEST_GRID:
            raise UserError(f"grid: {wanted} tokens a side is outside 2 to {LARGEST_GRID}; 16, 32 and 64 are usual")
        if own not in (None, wanted):
            raise UserError(f"grid: {name} is for {own}x{own} tokens, not {wanted}x{wanted}; choose auto")
    grid = wanted or own or (named.pop() if len(named) == 1 else None)
    if grid is None:
        raise UserError(
            f"grid: {name} does not say how large its pictures are; choose 16 (256 pixels), 32 (512) or 64 (1024)"
        )
    if grid**2 > rows:
        raise UserError(
            f"grid: {grid}x{grid} tokens need at least {grid**2} positions, {name} has {rows}; choose a smaller grid"
        )
    return grid
