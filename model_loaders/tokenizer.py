"""Tokenizers of language models: Hugging Face's ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``.

Added tokens are removed from the tokenizer, so that "<|im_end|>" in a prompt is encoded as ten characters and cannot end the
prompt. Callers insert special tokens by id. This also avoids searching every prompt for 65,536 image codes.

The package ``tokenizers`` is imported when a tokenizer is read; it is installed with transformers, a requirement of ComfyUI.
A tokenizer that only splits and looks up words, such as the demo's, does not need it.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from .folders import MAX_JSON_BYTES, member, parse_json, read_json

# Pre-tokenization pattern of Qwen2, applied before byte-pair merges.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LONGEST_CHARSMAP = 500_000  # T5's has 320,000; it may map one character to as much
_PROBE = "A small red boat, 2 cats & 1 moon: caf\u00e9 \u6708 \U0001f319.\n"
# Components of Qwen2's tokenizer and of simpler ones.
_TAR_COMPONENTS: dict[str, dict[str | None, dict[str, Any]]] = {
    "model": {
        "BPE": {"vocab": ..., "merges": ..., "unk_token": ..., "byte_fallback": (True,), "ignore_merges": (True,)},
        "WordLevel": {"vocab": ..., "unk_token": ...},
    },
    "normalizer": {None: {}, "NFC": {}, "NFD": {}, "NFKC": {}, "NFKD": {}, "Lowercase": {}},
    "pre_tokenizer": {
        None: {},
        "Whitespace": {},
        "WhitespaceSplit": {},
        "ByteLevel": {"add_prefix_space": (True,), "trim_offsets": (True,), "use_regex": (True,)},
        "Split": {"pattern": ({"Regex": _QWEN},), "behavior": ("Isolated",)},
    },
}


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer for text.

    Attributes:
        encode: text to token ids, without added tokens.
        marks: names of added tokens to ids.
        size: vocabulary size without added tokens.
    """

    encode: Callable[[str], list[int]]
    marks: Mapping[str, int]
    size: int


def has_tokenizer(folder: Path, stem: str, metadata: Mapping[str, str]) -> bool:
    """Whether :func:`load_tokenizer` finds a tokenizer."""
    names = [f"{stem}.tokenizer.json"] if stem else []
    whole = any((folder / name).is_file() for name in [*names, "tokenizer.json"])
    return "tokenizer" in metadata or whole or all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))


def load_tokenizer(folder: Path, stem: str, metadata: Mapping[str, str], field: str = "checkpoint") -> Tokenizer:
    """Load the tokenizer of a model.

    The first source found is used: the metadata entry ``tokenizer`` (the content of a ``tokenizer.json``), then the files
    ``<stem>.tokenizer.json``, ``tokenizer.json``, ``vocab.json`` with ``merges.txt``.

    Args:
        folder: the model's folder.
        stem: stem of the weight file, or "".
        metadata: metadata of the weight file.
        field: name of the input, for messages.

    Raises:
        UserError: there is no tokenizer, it is damaged, or ``tokenizers`` is missing.
    """
    if "tokenizer" in metadata:
        try:
            return _build(parse_json(metadata["tokenizer"]), "the tokenizer within the file", field)
        except (ValueError, RecursionError) as e:
            raise UserError(
                f"{field}: the tokenizer within the file is no JSON ({first_line(e)}); get the file again"
            ) from e
    for name in ([f"{stem}.tokenizer.json"] if stem else []) + ["tokenizer.json"]:
        if (folder / name).is_file():
            return _build(read_json(folder / name, field), f"{name} in {folder}", field)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _build(_from_vocabulary(folder, field), f"vocab.json in {folder}", field)
    raise UserError(
        f"{field}: {folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); put the one of the same model there"
    )


def _from_vocabulary(folder: Path, field: str) -> dict[str, Any]:
    """The ``tokenizer.json`` equivalent of Qwen2's ``vocab.json``, ``merges.txt`` and ``added_tokens.json``."""
    member(folder / "merges.txt", field)
    try:
        if (folder / "merges.txt").stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as e:
        raise UserError(f"{field}: merges.txt in {folder} cannot be read ({first_line(e)}); get the file again") from e
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


def _build(spec: dict[str, Any], where: str, field: str) -> Tokenizer:
    """Construct a tokenizer from the content of a ``tokenizer.json``.

    Raises:
        UserError: the content is invalid.
    """
    try:
        marks = {str(entry["content"]): _id(entry["id"]) for entry in spec.get("added_tokens") or []}
        model = dict(spec["model"])
        if isinstance(model.get("vocab"), dict) and not model.get("merges"):
            # A word-level vocabulary also contains the added tokens.
            unknown = model.get("unk_token")
            model["vocab"] = {
                word: _id(n) for word, n in model["vocab"].items() if word == unknown or word not in marks
            }
        spec = {
            **spec,
            "model": model,
            "added_tokens": [],
            "post_processor": None,
            "decoder": None,
            "truncation": None,
            "padding": None,
        }
        size = len(model.get("vocab", ()))
        encode = _word_level(spec) if _is_word_level(spec) else None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{field}: {where} is no tokenizer ({type(e).__name__}: {first_line(e)}); get it again") from e
    if encode is None:
        check_components(spec, _TAR_COMPONENTS, where, field)
        encode = _library(spec, where, field)
    return Tokenizer(encode, marks, size)


def _id(value: Any) -> int:
    """A token id.

    Raises:
        ValueError: it is no integer from 0 to 2^31 - 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"{str(value)[:20]} is no token id")
    return value


def check_components(spec: Mapping[str, Any], allowed: Mapping[str, Any], where: str, field: str) -> None:
    """Check that a ``tokenizer.json`` has no other components than official ones.

    Other normalizers and patterns can turn a short prompt into gigabytes or run for minutes, and some make the library
    abort the process.

    Args:
        allowed: "model", "normalizer" and "pre_tokenizer" to the accepted types, each with its accepted arguments.

    Raises:
        UserError: it has another component, or one with other arguments.
    """
    for place, types in allowed.items():
        parts: Any = [spec.get(place)]
        if _kind(parts[0]) == "Sequence":
            parts = parts[0].get("normalizers") or parts[0].get("pretokenizers") or []
        if not isinstance(parts, list) or len(parts) > 8:
            raise UserError(
                f"{field}: {where} has a {place} of another form than the official ones; get the official file"
            )
        for part in parts:
            kind = _kind(part)
            if place == "model" and isinstance(part, dict) and "type" not in part:  # as the library reads old files
                kind = "Unigram" if isinstance(part.get("vocab"), list) else "BPE"
            if part is None and None in types:
                continue
            if not isinstance(kind, str) or kind not in types or not _accepted(part, types[kind]):
                named = kind[:40] if isinstance(kind, str) else "part without a type"
                raise UserError(
                    f"{field}: {where} has a {place} that no official tokenizer has ({named!a}); get the official file"
                )


def _accepted(part: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether every argument of a component is unset, false, or accepted (``...`` accepts every value)."""
    for name, value in part.items():
        accepted = arguments.get(name, ())
        if name == "precompiled_charsmap" and isinstance(value, str) and len(value) > _LONGEST_CHARSMAP:
            return False
        if name != "type" and accepted is not ... and value not in (None, False, "", *accepted):
            return False
    return True


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _is_word_level(spec: Mapping[str, Any]) -> bool:
    """Whether :func:`_word_level` implements this tokenizer."""
    words = _kind(spec["model"]) == "WordLevel" and spec["model"].get("unk_token") in spec["model"]["vocab"]
    return (
        words
        and _kind(spec.get("normalizer")) in (None, "Lowercase")
        and _kind(spec.get("pre_tokenizer")) == "Whitespace"
    )


def _word_level(spec: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """An encoder that splits text at whitespace and between words and punctuation, and looks the words up."""
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    unknown, lower = vocabulary[spec["model"]["unk_token"]], _kind(spec.get("normalizer")) == "Lowercase"

    def encode(text: str) -> list[int]:
        words = groupby(text.lower() if lower else text, _character_class)
        return [vocabulary.get("".join(characters), unknown) for kind, characters in words if kind]

    return encode


def _character_class(character: str) -> int:
    """0: whitespace, 1: word character, 2: other. As in the library, combining marks and joiners are word characters."""
    if character.isspace():
        return 0
    category = unicodedata.category(character)
    return 1 if category[0] in "LM" or category in ("Nd", "Nl", "Pc") or character in "\u200c\u200d" else 2


def _library(spec: Mapping[str, Any], where: str, field: str) -> Callable[[str], list[int]]:
    """An encoder of the package ``tokenizers``.

    Raises:
        UserError: the package is missing, or rejects the tokenizer.
    """
    try:
        from tokenizers import Tokenizer as Library
    except (ImportError, RuntimeError) as e:
        raise import_error("tokenizers", field, e) from e
    with library_errors(f"{field}: {where} is no tokenizer"):
        library = Library.from_str(json.dumps(spec))
        library.encode(_PROBE, add_special_tokens=False)

    def encode(text: str) -> list[int]:
        with library_errors(f"{field}: {where} cannot encode the prompt"):
            return list(library.encode(text, add_special_tokens=False).ids)

    return encode


@contextmanager
def library_errors(found: str) -> Iterator[None]:
    """Report errors of the package ``tokenizers``, whose panics are no ``Exception``.

    Raises:
        UserError: in place of every error in the block but interruption and lack of memory.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UserError):
        raise
    except BaseException as e:
        raise UserError(f"{found} ({first_line(e)}); get the official file") from e


def import_error(package: str, field: str, error: BaseException) -> UserError:
    """The error for a package that encoding a prompt requires and that cannot be imported."""
    return UserError(
        f"{field}: reading a prompt needs the Python package {package}, which ComfyUI brings, and here it cannot be imported "
        f"({first_line(error)}); install it with: pip install {package}"
    )


def clean(text: str) -> str:
    """Replace lone surrogates, which tokenizers reject, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
