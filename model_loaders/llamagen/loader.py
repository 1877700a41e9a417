"""Loader of LlamaGen and PAR checkpoints, and the checks it shares with Tar's de-tokenizers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.llama import CLASS, OFFICIAL_HEADS, Llama, LlamaConfig, TokenModel
from ...networks.ops import FAST, Operations
from ...networks.torch_state import in_own_state
from ..catalogue.hub import entry_of
from ..files import checkpoint as ck
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_bits, choose_dtype, read

LARGEST_GRID = 128
# Pixels a token has along one side in every released model (VQ-16), and image sizes that file names state.
_PIXELS = 16
_SIZES = re.compile(r"(?<!\d)(256|384|512|1024)(?![\dk])", re.IGNORECASE)
# Words that say that the number behind them in a file name is no image size (epoch-256, step_512, bs1024), or the
# number before them (256epochs, 512-steps, 1024bs).
_COUNTED = "steps?|epochs?|ep|its?|iters?|iterations?|bs|batch(?:[-_ ]?size)?|seed|rank|dim|width|vocab|codes"
_COUNT_BEFORE = re.compile(rf"(?:^|[^a-z\d])(?:{_COUNTED}|ckpt|checkpoint)[-_ =]*$", re.IGNORECASE)
_COUNT_BEHIND = re.compile(rf"(?:{_COUNTED})(?![a-z\d])|[-_ ](?:{_COUNTED})(?![a-z]|[-_ =]*\d)", re.IGNORECASE)
# Official PAR file names give the speed-up instead of the image size, which is 384 pixels.
_PAR_NAME = re.compile(r"par-(xl|xxl|1b|3b)-\d+x", re.IGNORECASE)
_PAR_GRID = 24
# Of some files: the table of RoPE, which is recomputed from the grid, and other buffers that inference makes for
# itself.
_ROPE_TABLE = "freqs_cis"
_BUFFERS = re.compile(r"freqs_cis|causal_mask|layers\.\d+\.attention\.kv_cache\.\w+")
_CLASSES = "cls_embedding.embedding_table.weight"
# Names of a training's arguments that state a number of attention heads, and the classes of ImageNet.
HEADS = ("heads", "n_head", "num_heads", "num_attention_heads")
IMAGENET = 1000


@in_own_state
def load_llamagen(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    grid: int | None = None,
    heads: int | None = None,
    classes: int | None = None,
    weights: str = AUTO,
    operations: Operations = FAST,
) -> TokenModel:
    """Load a LlamaGen (class- or text-conditional) or a PAR of any size.

    Shared arguments and errors: see :mod:`.checkpoint`.

    A PAR is identified by its transition tokens. The dtype "auto" prefers bf16, as upstream. What is not given here is
    taken from the file's metadata, else from the arguments of its training (``args``), else from its weights, else it
    is that of the official model, and at last a guess from the file's name, which ``note`` of the model and its reports
    state.

    Args:
        path: the file.
        dtype: see :func:`.kinds.choose_dtype`.
        device: of the weights.
        grid: tokens per side (16, 24, 32 for 256, 384, 512 pixels), 2 to 128. Stated by ``grid``, or
            ``args.image_size``, or measured from a stored RoPE table.
        heads: attention heads. Stated by ``heads``, or ``args.n_head``; by default those
            of the official model of that width.
        classes: number of classes. Stated by ``num_classes``, or ``args.class_dropout_prob``; by
            default the last row is the null class.
        weights: "ema" for averaged weights, "trained" for the others, "auto" for
            averaged ones where a file holds both.
        operations: of which the network is built, see :class:`.ops.Operations`.

    Other metadata entries: ``label_set`` ("imagenet-1k" for 1000 classes) and ``name``.

    Raises:
        UserError: also if the grid is unknown or is not divisible into PAR's regions, or
            the classes contradict the weights.
    """
    compute = choose_dtype(dtype, device, "llamagen")
    file = read(path, "llamagen", weights=weights)
    heads = heads or file.stated("heads", 1, 1024, HEADS)
    config = gpt_config(file, heads, _has_null_class(file, classes))
    side = _grid(file, config, grid)

    labels = config.condition_size if config.condition == CLASS else 0
    note_defaults(file, "llamagen", heads, config.heads, labels)

    plain = file.filter(lambda name: _BUFFERS.fullmatch(name) is None)
    net = ck.load_strictly(
        plain,
        partial(Llama, config),
        operations=operations,
        dtype=compute,
        device=device,
        bits=choose_bits(dtype, device),
    )
    return TokenModel(
        net=net,
        name=file.name,
        grid=side,
        label_set=file.text("label_set", "imagenet-1k" if labels == IMAGENET else ""),
        note=file.note,
    )


def _grid(file: ck.Checkpoint, config: LlamaConfig, requested: int | None) -> int:
    """Tokens per side of a LlamaGen's or PAR's images, see :func:`find_grid`; a PAR's regions must divide it."""
    across = math.isqrt(config.regions)
    if across**2 != config.regions:
        raise file.error(
            f"holds {config.special} transition tokens, but a PAR model has one less than a square number (3, 8, 15, "
            "...)"
        )

    try:
        stated = file.stated("grid", 2, LARGEST_GRID) or _stated_size(file)
    except UserError:
        if requested is None:
            raise
        stated = None  # the user states the size, and a statement that cannot be read is no contradiction

    is_official_par = config.special and _PAR_NAME.search(file.stem)
    side = find_grid(
        file,
        requested,
        stated=stated,
        measured=_table_side(file, config),
        usual=_PAR_GRID if is_official_par else None,
        published=bool(entry_of(file.path, "llamagen")),
    )
    if side % across:
        raise UserError(
            f"grid: {side}x{side} tokens cannot be divided into the {across}x{across} regions of the PAR model "
            f"{file.path.name}; choose the grid with which the model was trained"
        )

    return side


def gpt_config(file: ck.Checkpoint, heads: int | None, null: bool = True) -> LlamaConfig:
    """Derive a GPT's shape from its weights.

    Args:
        file: the weights.
        heads: number of attention heads; None takes that of the official model of the same width.
        null: whether the last class row is the null class.
    """
    expect_heads(file, heads, file.state.get("tok_embeddings.weight"), OFFICIAL_HEADS)

    with ck.misfits(file):
        config = LlamaConfig.of_llamagen(file.state, heads, null)
    if min(config.dim, config.depth, config.hidden, config.vocab, config.condition_size) < 1:
        raise file.error(f"does not fit {file.what}: a part of the model is missing or empty")

    return config


def expect_heads(file: ck.Checkpoint, heads: int | None, rows: Tensor | None, official: Mapping[int, int]) -> None:
    """Raise a UserError if nothing states the number of heads and no official model has the width of ``rows``."""
    if heads is not None or rows is None or rows.shape[-1] in official:
        return

    raise file.error(
        f"has the width {rows.shape[-1]}, which no official model has, and does not state its number of attention "
        "heads",
        "state this number in the file, as the entry 'heads' of the metadata (.safetensors) or of the dictionary "
        "'args' (torch.save)",
    )


def note_defaults(file: ck.Checkpoint, family: str, stated: int | None, heads: int, classes: int) -> None:
    """Remark what is taken from the official models of a family, unless the file is one of them.

    Args:
        file: the file.
        family: a key of :data:`.kinds.KINDS`.
        stated: number of attention heads that user or file state, or None.
        heads: number of attention heads.
        classes: number of classes.
    """
    if entry_of(file.path, family):
        return

    if stated is None:
        file.assume(f"FastAR assumes {heads} attention heads, as in the official model of the same width")
    if classes == IMAGENET and "label_set" not in file.metadata:
        file.assume(f"FastAR assumes that the {IMAGENET} classes are the classes of ImageNet")


def _has_null_class(file: ck.Checkpoint, classes: int | None) -> bool:
    """Whether the last class row is the null class of guidance: given, stated by the file, or assumed."""
    table = file.state.get(_CLASSES)
    if table is None or table.ndim != 2:
        return True

    rows = len(table)
    field = "classes"
    if classes is None:
        field = file.field
        classes = file.stated("num_classes", 1, 1 << 24, ("num_classes",))
    if classes is not None:
        if classes not in (rows, rows - 1):
            raise UserError(
                f"{field}: {file.path.name} has {rows} class embeddings, which do not fit the stated number of "
                f"{classes} classes; {'set classes' if field == 'classes' else 'in the file, set num_classes'} to "
                f"{rows - 1} if the last embedding is the null class, otherwise to {rows}"
            )
        return classes == rows - 1

    dropout = file.stated("class_dropout_prob", 0.0, 1.0, ("class_dropout_prob",))
    if dropout is not None:
        return dropout > 0

    null = rows != IMAGENET
    if rows != IMAGENET + 1 and not entry_of(file.path, "llamagen"):
        if null:
            meaning = f"{rows - 1} classes and the null class of guidance"
        else:
            meaning = f"{rows} classes, without a null class"
        file.assume(
            f"FastAR assumes that the {rows} class embeddings are {meaning}, because the file does not state it"
        )

    return null


def _stated_size(file: ck.Checkpoint) -> int | None:
    """Tokens per side by the arguments of LlamaGen's training; None if they do not state it."""
    pixels = file.number("image_size", None, 2, 1 << 14, file.arguments)
    stride = file.number("downsample_size", _PIXELS, 1, 64, file.arguments)
    if pixels is None or pixels % stride or not 2 <= pixels // stride <= LARGEST_GRID:
        return None

    return pixels // stride


def _table_side(file: ck.Checkpoint, config: LlamaConfig) -> int | None:
    """Tokens per side by the rows of a stored RoPE table: those of the condition, PAR's tokens and the grid."""
    if _ROPE_TABLE not in file.state:
        return None

    with ck.misfits(file):
        rows = len(file.state[_ROPE_TABLE])
    condition = file.number("cls_token_num", config.text_rows or 1, 1, 1 << 20, file.arguments)
    rest = rows - condition - config.special

    side = square_root(rest)
    if side is None and rest >= 4:  # a condition of more rows
        side = math.isqrt(rest)
        file.assume(
            f"FastAR assumes that the RoPE table of {rows} rows is for {side}x{side} tokens after "
            f"{rows - side**2} other rows"
        )

    return side


def square_root(tokens: int) -> int | None:
    """Side of a square grid of this many tokens; None if it is no grid of 2x2 or more."""
    side = math.isqrt(max(0, tokens))
    return side if side >= 2 and side**2 == tokens else None


def find_grid(
    file: ck.Checkpoint,
    requested: int | None,
    stated: int | None,
    measured: int | None = None,
    usual: int | None = None,
    published: bool = False,
) -> int:
    """Tokens per side of the image.

    What the user requests goes before what the file states, then what its tables show, then the sizes of a kind of
    model, and then the file's name. ``file`` notes a contradiction, and a size that only its name gives.

    Args:
        file: the file.
        requested: by the user.
        stated: in the file.
        measured: from a table of positions in the file.
        usual: of all models of its kind.
        published: whether the name is that of a published file, which needs no note.
    """
    if requested is not None:
        for side, where in ((stated, "states"), (measured, "has a table of positions for")):
            if side not in (None, requested):
                file.assume(
                    f"FastAR uses {requested}x{requested} tokens as requested, but the file {where} {side}x{side}"
                )
        if not 2 <= requested <= LARGEST_GRID:
            raise UserError(f"grid: {requested} tokens per side are not possible; choose 2 to {LARGEST_GRID}, or auto")
        return requested

    if stated is not None:
        if measured not in (None, stated):
            file.assume(
                f"FastAR uses {stated}x{stated} tokens as the file states, but its table of positions is for "
                f"{measured}x{measured}"
            )
        return stated

    if measured is not None:
        return measured

    named = _named_sides(file.stem)
    if not named and usual:
        named = {usual}
    if len(named) != 1:
        found = "has several image sizes in its name" if named else "does not state the size of its images"
        raise UserError(
            f"grid: {file.path.name} {found}; choose the grid with which the model was trained: 16 for images of 256 x "
            "256 pixels, 24 for 384 x 384, 32 for 512 x 512, or 64 for 1024 x 1024"
        )

    (side,) = named
    if not published:
        file.assume(f"FastAR assumes {side}x{side} tokens, a guess from the file's name")

    return side


def _named_sides(stem: str) -> set[int]:
    """Tokens per side of the image sizes in a file name; numbers of steps, batches and the like are left out."""
    sides = set()
    for match in _SIZES.finditer(stem):
        is_count = _COUNT_BEFORE.search(stem[: match.start()]) or _COUNT_BEHIND.match(stem, match.end())
        if not is_count:
            sides.add(int(match[0]) // _PIXELS)

    return sides
