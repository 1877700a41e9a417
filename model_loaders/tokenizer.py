"""Prompt text to token ids: Hugging Face's ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``, read as plain text.

The names of added tokens mean nothing in what a person types: "<|im_end|>" within a prompt is ten characters, not the end of
it. So the tokens a checkpoint added are taken out of the tokenizer, and told apart by id. That also spares looking for
65,536 image codes in every prompt.

The package ``tokenizers`` is imported when such a file is read, never before; ComfyUI brings it with transformers. A tokenizer
that only splits words and looks them up, as the demo's, is read without it.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import UserError
from .folders import parse_json, read_json

# How Qwen2 parts a text before its pairs of bytes are merged; the vocabulary was counted on these pieces.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer for text.

    Attributes:
        encode: text to token ids, none of them an added token's.
        marks: added tokens' names to ids.
        size: tokens it knows without the added ones.
    """

    encode: Callable[[str], list[int]]
    marks: Mapping[str, int]
    size: int


def load_tokenizer(folder: Path, stem: str, metadata: Mapping[str, str], field: str = "checkpoint") -> Tokenizer:
    """The tokenizer of a model.

    Args:
        folder: where the model is.
        stem: name of the model's file without its ending, or "".
        metadata: of the weight file; an entry ``tokenizer`` is the content of a ``tokenizer.json`` and goes first, then come
            the files ``<stem>.tokenizer.json``, ``tokenizer.json``, ``vocab.json`` with ``merges.txt``.
        field: what messages begin with.

    Raises:
        UserError: there is none, it is damaged, or ``tokenizers`` is missing.
    """
    if "tokenizer" in metadata:
        try:
            return _build(parse_json(metadata["tokenizer"]), "the tokenizer within the file", field)
        except (ValueError, RecursionError) as e:
            raise UserError(
                f"{field}: the tokenizer within the file is no JSON ({_first_line(e)}); get the file again"
            ) from e
    for name in ([f"{stem}.tokenizer.json"] if stem else []) + ["tokenizer.json"]:
        if (folder / name).is_file():
            return _build(read_json(folder / name, field), f"{name} in {folder}", field)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _build(_from_pairs(folder, field), f"vocab.json in {folder}", field)
    raise UserError(
        f"{field}: {folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); put the one of the same model there"
    )


def _from_pairs(folder: Path, field: str) -> dict[str, Any]:
    """What ``tokenizer.json`` would say of a Qwen2 tokenizer's older files."""
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as e:
        raise UserError(f"{field}: merges.txt in {folder} cannot be read ({_first_line(e)}); get the file again") from e
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    added = read_json(folder / "added_tokens.json", field)
    split = {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [{"content": name, "id": number} for name, number in added.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split,
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "model": {"type": "BPE", "vocab": read_json(folder / "vocab.json", field), "merges": merges},
    }


def _build(about: dict[str, Any], where: str, field: str) -> Tokenizer:
    try:
        marks = {str(entry["content"]): int(entry["id"]) for entry in about.get("added_tokens") or []}
        model = dict(about["model"])
        if isinstance(model.get("vocab"), dict) and not model.get("merges"):
            # Where words are looked up, a mark that is a word too would be found.
            kept = model.get("unk_token")
            model["vocab"] = {word: int(n) for word, n in model["vocab"].items() if word == kept or word not in marks}
        about = {
            **about,
            "model": model,
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        size = len(model.get("vocab", ()))
        encode = _lookup(about) if _plain(about) else None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{field}: {where} is no tokenizer ({type(e).__name__}: {_first_line(e)}); get it again") from e
    return Tokenizer(encode or _library(about, where, field), marks, size)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _plain(about: Mapping[str, Any]) -> bool:
    """Whether it does no more than :func:`_lookup`."""
    words = _kind(about["model"]) == "WordLevel" and about["model"].get("unk_token") in about["model"]["vocab"]
    return (
        words
        and _kind(about.get("normalizer")) in (None, "Lowercase")
        and _kind(about.get("pre_tokenizer")) == "Whitespace"
    )


def _lookup(about: Mapping[str, Any]) -> Callable[[str], list[int]]:
    vocabulary: dict[str, int] = about["model"]["vocab"]
    unknown, lower = vocabulary[about["model"]["unk_token"]], _kind(about.get("normalizer")) == "Lowercase"

    def encode(text: str) -> list[int]:
        pieces = groupby(text.lower() if lower else text, _sort)
        return [vocabulary.get("".join(signs), unknown) for sort, signs in pieces if sort]

    return encode


def _sort(sign: str) -> int:
    """0: blank, 1: of a word, 2: another sign. As the library has it, what combines and what joins is of a word."""
    if sign.isspace():
        return 0
    kind = unicodedata.category(sign)
    return 1 if kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or sign in "\u200c\u200d" else 2


def _library(about: Mapping[str, Any], where: str, field: str) -> Callable[[str], list[int]]:
    try:
        from tokenizers import Tokenizer as Library
    except (ImportError, RuntimeError) as e:
        raise UserError(
            f"{field}: reading a prompt needs the Python package tokenizers, which ComfyUI brings, and here it cannot be imported "
            f"({_first_line(e)}); install it with: pip install tokenizers"
        ) from e
    try:
        made = Library.from_str(json.dumps(about))
    except Exception as e:  # a damaged tokenizer can fail in any way
        raise UserError(f"{field}: {where} is no tokenizer ({_first_line(e)}); get it again") from e

    def encode(text: str) -> list[int]:
        return list(made.encode(text, add_special_tokens=False).ids)

    return encode


def clean(text: str) -> str:
    """A text whose lone surrogates, which no tokenizer takes, are replaced by the sign for what cannot be read."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
