"""Loaders of Tar: the language model, the semantic tokenizer TA-Tok, and the AR de-tokenizers (AR-DTok).

Any language model works with any de-tokenizer trained with the same TA-Tok. The image decoder is LlamaGen's VQ
tokenizer. The dtype "auto" prefers bf16, as upstream. Source: Han et al. 2025 (Tar, arXiv 2506.18898).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.llama import EMBEDDING, HEAD, Llama, LlamaConfig, TokenModel
from ...networks.ops import FAST, TORCH, Operations
from ...networks.ta_tok import ENCODING, TATok, TATokConfig, TATokModel, unused
from ...networks.tar import SpecialTokens, TarModel
from ...networks.torch_state import in_own_state
from ..catalogue.hub import entry_of
from ..files import checkpoint as ck
from ..files.configs import REMEDY, expect_fixed, expect_language, expect_stated, language_numbers, language_part
from ..files.tokenizer import load_tokenizer
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_bits, choose_dtype, read
from ..llamagen.loader import LARGEST_GRID, find_grid, gpt_config, square_root

SCALES = 3
_INNER = "model.language_model."
# Rows of two matrices that are compared at once.
_ROWS = 4096
# Side of the finest grid of semantic codes; an AR-DTok has one condition row per code.
OFFICIAL_SIDE = 27
# Token ids of the official Tar: of the mark of an image, of its scales and of its codes.
_OFFICIAL_IDS = {
    "image_start_tag_id": 151_665,
    "scale_start_token_id": 151_667,
    "scale_end_token_id": 151_669,
    "image_start_token_id": 151_670,
    "image_end_token_id": 217_205,
}


@in_own_state
def load_tar(
    path: str | Path, dtype: str | Precision = "auto", device: str | torch.device = "cpu", operations: Operations = FAST
) -> TarModel:
    """Load Tar's language model, of any size, with its tokenizer. Shared arguments and errors: see :mod:`.checkpoint`.

    Head count, norm epsilon, RoPE base and ids of special tokens come from ``config.json``, else they are the official
    ones; see :mod:`.configs` for what it may state. FastAR's addition to the configuration: ``semantic_side``, the side
    of the finest grid of codes (27).

    ``path`` is a Hugging Face model folder, one of its shards, or a weight file; its JSON files are read from the same
    folder. The metadata of a single safetensors file may contain ``config``, ``generation_config``, ``tokenizer``
    (contents of the JSON files) and ``name``.
    """
    compute = choose_dtype(dtype, device, "tar")
    file = read(path, "tar")
    file = replace(file, state={_name(name): tensor for name, tensor in file.state.items()})

    settings = file.settings("config", beside=True)
    fields = language_part(file, settings)
    config = _language_config(file, settings, fields)
    settings = {**fields, **settings}

    tokenizer = load_tokenizer(file.folder, file.stem, file.metadata)
    special, scales = _special_tokens(file, settings, tokenizer.chat_tokens(), config.vocab)

    side = file.number("semantic_side", OFFICIAL_SIDE, scales, LARGEST_GRID, settings)
    penalty = file.number("repetition_penalty", 1.0, 1e-3, 2.0, file.settings("generation_config", beside=True))

    # A tied output matrix is the embedding; older files contain RoPE frequencies, which are recomputed.
    weights = file.filter(lambda name: not (name == HEAD and config.tied) and not name.endswith(".inv_freq"))
    net = ck.load_strictly(
        weights,
        partial(Llama, config),
        operations=operations,
        dtype=compute,
        device=device,
        bits=choose_bits(dtype, device),
    )
    return TarModel(
        net=net,
        name=file.name,
        tokenize=tokenizer.encode,
        special=special,
        sides=tuple(side // (scale + 1) for scale in range(scales)),
        repetition_penalty=penalty,
    )


def _name(name: str) -> str:
    """The name of a parameter in the file of a language model alone, without the part for an image reader."""
    return name.replace(_INNER, "model.", 1) if name.startswith(_INNER) else name


def _language_config(file: ck.Checkpoint, settings: Mapping[str, Any], fields: Mapping[str, Any]) -> LlamaConfig:
    """The shape of the weights, which the configuration must not contradict."""
    tied = _tied(file, settings.get("tie_word_embeddings", fields.get("tie_word_embeddings")))
    numbers = language_numbers(file, fields, file.state)
    with ck.misfits(file):
        config = LlamaConfig.of_qwen(file.state, tied=tied, **numbers)

    expect_language(file, fields, config, config.vocab)
    return config


def _tied(file: ck.Checkpoint, stated: Any) -> bool:
    """Whether the embedding is also the output matrix.

    A stored output matrix that differs from it is used, as in transformers 5, whatever the configuration states.
    """
    if stated not in (None, True, False):
        raise file.error(
            f"states tie_word_embeddings = {ck.shown(stated)} in its configuration, not true or false", REMEDY
        )

    head = file.state.get(HEAD)
    embedding = file.state.get(EMBEDDING)
    if head is None:
        if stated is False:
            raise file.error(f"does not fit {file.what}: {HEAD} is missing")
        return True

    return bool(stated) and embedding is not None and _same(head, embedding)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices are equal, compared in parts to save memory."""
    if a.shape != b.shape or not a.ndim:
        return False

    return all(torch.equal(x.float(), y.float()) for x, y in zip(a.split(_ROWS), b.split(_ROWS), strict=True))


def _special_tokens(
    file: ck.Checkpoint, settings: Mapping[str, Any], chat: tuple[int, int] | None, rows: int
) -> tuple[SpecialTokens, int]:
    """Ids of the special tokens and the number of scales: the configuration's, else the official ones.

    ``chat`` are the ids of the start and end of a chat turn; ``rows`` is the number of token ids.
    """
    ids = {key: file.number(key, official, 0, rows - 1, settings) for key, official in _OFFICIAL_IDS.items()}
    unstated = [key for key in ids if settings.get(key) is None]
    if unstated and rows <= max(_OFFICIAL_IDS.values()):
        raise file.error(
            f"has {rows} tokens, but config.json does not state which of them are image codes ({unstated[0]})",
            "choose a Tar, not a plain language model" if len(unstated) == len(ids) else REMEDY,
        )

    image, scale, last_scale, code, last_code = ids.values()
    scales = last_scale - scale + 1
    marks = range(scale, last_scale + 1)
    overlap = image in marks or any(code <= token <= last_code for token in (image, *marks))
    beyond = chat is not None and max(chat) >= rows
    if last_code < code or not 1 <= scales <= SCALES or overlap or beyond:
        raise file.error(
            f"has {rows} token ids, but the ids of its special tokens do not fit this number or one another: {image} "
            f"for the start of an image, {scale} to {last_scale} for scales, {code} to {last_code} for image codes"
            + (f", {chat[0]} and {chat[1]} for a chat" if chat is not None else ""),
            "choose a Tar with its own config.json and tokenizer",
        )

    special = SpecialTokens(image=image, scale=scale, code=code, codes=last_code - code + 1, chat=chat)
    return special, scales


@in_own_state
def load_ta_tok(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    encoder: bool = True,
    operations: Operations = TORCH,
) -> TATokModel:
    """Load a TA-Tok of any size with the official parameter names. Shared arguments and errors: see :mod:`.checkpoint`.

    Unused weights of the official file are ignored. Metadata entries: ``encoder_heads`` (16 officially),
    ``decoder_heads`` (12), ``input_size`` in pixels (384; also read from the arguments in the official file) and
    ``name``. ``encoder`` False omits the image encoder, three quarters of the memory.
    """
    compute = choose_dtype(dtype, device, "ta-tok")
    file = read(path, "ta-tok")
    if not encoder:
        file = file.filter(lambda name: not name.startswith(ENCODING))

    heads = file.number("decoder_heads", None, 1, 4096)
    encoder_heads = file.number("encoder_heads", None, 1, 4096)
    trained_size = file.number("input_size", None, 1, 1 << 14, file.settings("args"))
    size = file.number("input_size", trained_size, 1, 1 << 14)
    with ck.misfits(file):
        config = TATokConfig.from_state_dict(file.state, heads, encoder_heads, size)

    idle = unused(file.state)
    weights = file.filter(lambda name: name not in idle)
    if not config.encoder_depth:
        weights = weights.filter(lambda name: not name.startswith(ENCODING))

    net = ck.load_strictly(weights, partial(TATok, config), operations=operations, dtype=compute, device=device)
    return TATokModel(net, file.name)


@in_own_state
def load_detokenizer(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    heads: int | None = None,
    ta_tok: TATokModel | None = None,
    weights: str = AUTO,
    operations: Operations = FAST,
) -> TokenModel:
    """Load an AR-DTok of any size with the official parameter names.

    Shared arguments and errors: see :mod:`.checkpoint`.

    Args:
        path: the file.
        dtype: see :func:`.kinds.choose_dtype`.
        device: of the weights.
        grid: tokens per side (16, 32, 64 for 256, 512, 1024 pixels), 2 to 128; None takes it from the file or its
            name.
        heads: attention heads. Stated by the metadata entry ``heads`` or the arguments in the file; by default the head
            width is 64, as in every official size.
        ta_tok: computes the condition's features from semantic codes.
        weights: "ema" for averaged weights, "trained" for the others, "auto" for averaged ones where a file holds
            both.
        operations: of which the network is built, see :class:`.ops.Operations`.

    Other metadata entries: ``grid``, ``name`` and ``label_set``, the training data ("picture-book" for the demo).

    Raises:
        UserError: also if the arguments in the file contradict the weights, the table of absolute positions is missing
            (upstream then draws random ones), the grid is unknown or larger than the table, or TA-Tok's features do not
            fit.
    """
    compute = choose_dtype(dtype, device, "dtok")
    file = read(path, "dtok", weights=weights)
    arguments = file.settings("args") or file.settings("config")
    config = _detokenizer_config(file, arguments, heads)
    side = _grid(file, config, arguments, grid)

    net = ck.load_strictly(
        file,
        partial(Llama, config),
        operations=operations,
        dtype=compute,
        device=device,
        bits=choose_bits(dtype, device),
    )
    model = TokenModel(
        net=net,
        name=file.name,
        grid=side,
        label_set=file.text("label_set", ""),
        ta_tok=ta_tok,
        note=file.note,
    )
    if ta_tok is not None:
        expect_features(ta_tok, model)

    return model


def expect_features(ta_tok: TATokModel, model: TokenModel) -> None:
    """Raise a UserError if a de-tokenizer does not accept the features of a TA-Tok."""
    width = ta_tok.net.config.width
    expected = model.net.config.condition_size
    if width == expected:
        return

    raise UserError(
        f"ta_tok: {ta_tok.name} has features of width {width}, but {model.name} needs {expected}; choose the TA-Tok "
        "that the model was trained with."
    )


def _detokenizer_config(file: ck.Checkpoint, arguments: Mapping[str, Any], heads: int | None) -> LlamaConfig:
    """The shape of the weights, which the arguments in the file must not contradict."""
    heads = heads or file.number("heads", None, 1, 1024) or file.number("n_head", None, 1, 1024, arguments)
    width = max(file.state["tok_embeddings.weight"].shape[-1:], default=0)
    config = gpt_config(file, heads or max(1, width // 64))
    if not config.absolute:
        raise file.error(f"does not fit {file.what}: abs_pe is missing")

    proved = {
        "dim": config.dim,
        "n_layer": config.depth,
        "n_kv_head": config.kv_heads,
        "vocab_size": config.vocab,
        "cond_dim": config.condition_size,
    }
    expect_stated(file, arguments, proved)
    expect_fixed(file, arguments, {"model_type": ("clip_cond",)})
    return replace(config, eps=file.number("norm_eps", config.eps, 0.0, 1.0, arguments))


def _grid(file: ck.Checkpoint, config: LlamaConfig, arguments: Mapping[str, Any], requested: int | None) -> int:
    """Tokens per side of the image: requested, stated, of the length of the position table, or of the file's name."""
    rows = config.absolute
    stated = file.number("grid", None, 2, LARGEST_GRID)
    tokens = file.number("max_seq_len", None, 4, LARGEST_GRID**2, arguments)
    prefix = file.number("cls_token_num", None, 1, 1 << 20, arguments)

    if tokens is not None:
        side = square_root(tokens)
        if side is None:
            raise file.error(
                f"states max_seq_len = {tokens} image tokens in its arguments, but {tokens} is not a square number"
            )
        if stated not in (None, side):
            raise file.error(
                f"states a grid of {stated} x {stated} tokens, but its arguments state {tokens} image tokens"
            )
        if prefix is not None and rows != tokens + prefix - 1:
            raise file.error(
                f"has {rows} positions, but its arguments state {tokens} image tokens after a condition of {prefix} "
                f"rows, which together need {tokens + prefix - 1} positions"
            )
        stated = side

    grid = find_grid(
        file,
        requested,
        stated,
        measured=square_root(rows - OFFICIAL_SIDE**2 + 1),
        published=bool(entry_of(file.path, "dtok")),
    )
    if grid**2 > rows:
        raise UserError(
            f"grid: {grid}x{grid} tokens need at least {grid**2} positions, but {file.path.name} has {rows}; choose "
            "a smaller grid"
        )

    return grid
