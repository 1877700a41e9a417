"""Tokenizers of language models and of T5: Hugging Face's ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``.

Added tokens are removed from the tokenizer, so that "<|im_end|>" in a prompt is encoded as ten characters and cannot end the prompt.
Callers insert special tokens by id. Janus' added tokens are kept, because some are letters of its vocabulary; those of several characters
are encoded as characters too. The package ``tokenizers`` is imported when a tokenizer is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from .checkpoint import parse_json, read_json, read_text

# Pre-tokenization pattern of Qwen2, applied before byte-pair merges.
_QWEN = {
    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
}
# sha256 of the patterns of T5, Qwen2 and DeepSeek-LLM.
_PATTERNS = """
    dfa66c1644748ec479d682d866becfcd8cbcacae0af58d60f824b6ca88f54547
    1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e
    5cada29124805d8e0454dc5b67225bbf87075cffd53418e9c56f674708220e2c
    38fd0b5eb7e66ecf05e5e89dd0272208b64a6d60fa009c4ea1be70e7b7e739d5
    ae6bc1cffa8363b9fcbc8425375b51beb4782b93c6bcc35129ad95e41974f239
    16f72e393af534b9e1af2f1521e289e7426a51f3a48f9ec1c1e8f8ddef318006
    a9e31f463e1bd653c3d89fb26abc9a610b23eb0447b1bfcac71c7949e72583e4
""".split()
# Qwen2.5: tokens of its vocabulary, and ids of the special tokens of a chat turn.
_QWEN_SIZE, _QWEN_CHAT = 151_643, (151_644, 151_645)
_LONGEST_CHARSMAP = 500_000  # T5's has 320,000; it may map one character to as much
_MOST_PARTS = 8  # of a sequence of components
_MOST_KEPT, _FLAGS = 4096, ("single_word", "lstrip", "rstrip", "normalized")  # added tokens, and their flags
_PROBE = "A small red boat, 2 cats & 1 moon: caf\u00e9 \u6708 \U0001f319.\n"
# Components of the tokenizers of Qwen2, DeepSeek and T5 and of simpler ones, and the values of their arguments besides None, booleans
# and "" (... accepts every value). Others can turn a short prompt into gigabytes, run for minutes, or abort the process.
_COMPONENTS: dict[str, tuple[str | None, ...]] = {
    "model": ("BPE", "WordLevel", "Unigram"),
    "normalizer": (None, "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Precompiled", "Strip", "Replace"),
    "pre_tokenizer": (None, "Whitespace", "WhitespaceSplit", "ByteLevel", "Split", "Digits", "Metaspace"),
}
_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("type", "vocab", "merges", "unk_token", "unk_id", "precompiled_charsmap", "pattern"), ...),
    "content": ("\u2581", " "),
    "behavior": ("Isolated",),
    "replacement": ("\u2581",),
    "str_rep": ("\u2581",),
    "prepend_scheme": ("always", "first", "never"),
}


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer for text."""

    encode: Callable[[str], list[int]]  # text to token ids, without special tokens
    special_tokens: Mapping[str, int]  # names of added tokens to ids
    size: int  # vocabulary size without added tokens

    def chat_tokens(self) -> tuple[int, int] | None:
        """Ids of the tokens that begin and end a chat turn, Qwen2.5's if the files list no added tokens; None if unknown."""
        begin, end = (self.special_tokens.get(f"<|im_{name}|>") for name in ("start", "end"))
        if begin is not None and end is not None:
            return begin, end
        return _QWEN_CHAT if self.size == _QWEN_SIZE else None


def _source(folder: Path, stem: str) -> str | None:
    """Name of the file in a folder that holds the tokenizer of ``<stem>.safetensors``; None if there is none."""
    for names in ([f"{stem}.tokenizer.json"], ["tokenizer.json"], ["vocab.json", "merges.txt"]):
        if all((folder / name).is_file() for name in names):
            return names[0]
    return None


def has_tokenizer(folder: Path, stem: str, metadata: Mapping[str, str]) -> bool:
    """Whether :func:`load_tokenizer` finds a tokenizer."""
    return "tokenizer" in metadata or _source(folder, stem) is not None


def load_tokenizer(
    folder: Path, stem: str, metadata: Mapping[str, str], field: str = "checkpoint", letters: bool = False
) -> Tokenizer:
    """Load the tokenizer of a model, whose folder, stem ("" for a folder) and metadata are given.

    The first source found is used: the metadata entry ``tokenizer`` (the content of a ``tokenizer.json``), then the files
    ``<stem>.tokenizer.json``, ``tokenizer.json``, ``vocab.json`` with ``merges.txt``. ``letters``: an added token of one character is
    encoded as itself, rather than as its bytes. A UserError if there is none, it is damaged, or ``tokenizers`` is missing.
    """
    if "tokenizer" in metadata:
        where = "the tokenizer within the file"
        return _build(parse_json(metadata["tokenizer"], where, field), where, field, letters)
    name = _source(folder, stem)
    if name is None:
        raise UserError(f"{field}: {folder} has no tokenizer (tokenizer.json); put the one of the same model there")
    spec = read_json(folder / name, field)
    if name == "vocab.json":  # the tokenizer.json that Qwen2's files stand for
        merges = read_text(folder / "merges.txt", field).split("\n")
        added = read_json(folder / "added_tokens.json", field)
        parts = [
            {"type": "Split", "pattern": _QWEN, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ]
        merges = [line for line in merges if line.strip() and not line.startswith("#version")]
        spec = {
            "added_tokens": [{"content": name, "id": number} for name, number in added.items()],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
            "model": {"type": "BPE", "vocab": spec, "merges": merges},
        }
    return _build(spec, f"{name} in {folder}", field, letters)


def _build(spec: dict[str, Any], where: str, field: str, letters: bool) -> Tokenizer:
    """Construct a tokenizer from the content of a ``tokenizer.json``; a UserError if it is invalid."""
    try:
        from tokenizers import Tokenizer as Library
    except (ImportError, RuntimeError) as e:
        raise import_error("tokenizers", field, e) from e
    with library_errors(f"{field}: {where} is no tokenizer"):
        special_tokens = {str(entry["content"]): _id(entry["id"]) for entry in spec.get("added_tokens") or []}
        model = dict(spec["model"])
        if model.get("type") == "WordLevel":  # its vocabulary also contains the added tokens
            unknown, words = model.get("unk_token"), model["vocab"].items()
            model["vocab"] = {word: _id(n) for word, n in words if word == unknown or word not in special_tokens}
        spec = {"version": "1.0", "model": model} | {k: spec.get(k) for k in ("normalizer", "pre_tokenizer")}
        check_components(spec, where, field)
        kept: list[dict[str, Any]] = [
            {"id": n, "content": name, "special": len(name) > 1, **dict.fromkeys(_FLAGS, False)}
            for name, n in (special_tokens.items() if letters else ())
        ]
        if len(kept) > _MOST_KEPT:
            raise ValueError(f"it has {len(kept)} added tokens")
        library = Library.from_str(json.dumps({**spec, "added_tokens": kept}))
        library.encode_special_tokens = True
        if any(library.token_to_id(entry["content"]) != entry["id"] for entry in kept):
            raise ValueError("its added tokens are not numbered in order")  # the library numbers them itself
        library.encode(_PROBE, add_special_tokens=False)

    @lru_cache(maxsize=64)  # a run estimates its memory and samples with the same prompts
    def ids(text: str) -> tuple[int, ...]:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # the library rejects lone surrogates
        with library_errors(f"{field}: {where} cannot encode the prompt"):
            return tuple(library.encode(text, add_special_tokens=False).ids)

    return Tokenizer(lambda text: list(ids(text)), special_tokens, len(model["vocab"]))


def _id(value: Any) -> int:
    """A token id; a ValueError if it is no integer from 0 to 2^31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"{str(value)[:20]} is no token id")
    return value


def check_components(spec: Mapping[str, Any], where: str, field: str) -> None:
    """Raise a UserError if a ``tokenizer.json`` has other components or arguments than the official tokenizers."""
    for place, types in _COMPONENTS.items():
        part: Any = spec.get(place)
        parts = [part]
        if isinstance(part, dict) and part.get("type") == "Sequence":
            parts = part.get("normalizers") or part.get("pretokenizers") or []
        elif place == "model" and isinstance(part, dict) and "type" not in part:  # as the library reads old files
            parts = [{**part, "type": "Unigram" if isinstance(part.get("vocab"), list) else "BPE"}]
        if not isinstance(parts, list) or len(parts) > _MOST_PARTS or not all(_accepted(p, types) for p in parts):
            raise UserError(f"{field}: {where} has a {place} that no official tokenizer has; get the official file")


def _accepted(part: Any, types: tuple[str | None, ...]) -> bool:
    """Whether a component is of one of the types and has no other arguments than :data:`_ARGUMENTS`."""
    if not isinstance(part, dict):
        return part is None and None in types
    if part.get("type") not in types or len(str(part.get("precompiled_charsmap", ""))) > _LONGEST_CHARSMAP:
        return False
    if "pattern" in part and not _is_official(part["pattern"]):
        return False
    values = {name: _ARGUMENTS.get(name, ()) for name in part}
    return all(values[name] is ... or value in (None, False, True, "", *values[name]) for name, value in part.items())


def _is_official(pattern: Any) -> bool:
    if not isinstance(pattern, dict) or list(pattern) != ["Regex"] or not isinstance(pattern["Regex"], str):
        return False
    return hashlib.sha256(pattern["Regex"].encode("utf-8", "surrogatepass")).hexdigest() in _PATTERNS


@contextmanager
def library_errors(found: str) -> Iterator[None]:
    """Raise a UserError in place of every error of the package ``tokenizers``, whose panics are no ``Exception``."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UserError):
        raise
    except BaseException as e:
        raise UserError(f"{found} ({first_line(e)}); get the official file") from e


def import_error(package: str, field: str, error: BaseException) -> UserError:
    """The error for a package that encoding a prompt requires and that cannot be imported."""
    found = f"which ComfyUI brings, and here it cannot be imported ({first_line(error)})"
    needs = f"reading a prompt needs the Python package {package}"
    return UserError(f"{field}: {needs}, {found}; install it with: pip install {package}")
