"""Tokenizers of language models and of T5: Hugging Face's ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``.

Added tokens are removed from the tokenizer, so that "<|im_end|>" in a prompt is encoded as ten characters and cannot
end the prompt. Callers insert special tokens by id. Janus' added tokens are kept, because some are letters of its
vocabulary; those of several characters are encoded as characters too. The package ``tokenizers`` is imported when a
tokenizer is read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from .checkpoint import parse_json, read_json, read_text
from .networks.chat import MOST_TEXT

# Pre-tokenization pattern of Qwen2, applied before byte-pair merges.
_QWEN = {
    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
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
_QWEN_SIZE = 151_643
_QWEN_CHAT = (151_644, 151_645)
# The first version of the package tokenizers that reads the files of today's transformers, whose merges are pairs.
# Versions before it also take special tokens in a prompt for themselves.
_OLDEST = (0, 20)
_LONGEST_CHARSMAP = 500_000  # characters; T5's has 320,000
_MOST_PARTS = 8  # of a sequence of components
# Characters that one character may become: T5's table and NFKC make 18 of U+FDFA, and Metaspace and ByteLevel add to
# them.
_MOST_GROWTH = 100
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "Metaspace": 2, "ByteLevel": 4}
# Characters of a text behind the normalizer. A template is longer than its prompt.
_LONGEST_TEXT = 2 * MOST_TEXT
# Characters of a piece of the vocabulary. The time that Unigram takes for a character grows with its longest piece;
# SentencePiece makes none of more than 16.
_LONGEST_PIECE = {"Unigram": 64, "BPE": 1024, "WordLevel": 1024}
_MOST_KEPT = 4096  # added tokens
_LONGEST_KEPT = 256  # characters of an added token
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token
_PROBE = "A small red boat, 2 cats & 1 moon: caf\u00e9 \u6708 \U0001f319.\n"
# Components of the tokenizers of Qwen2, DeepSeek and T5 and of simpler ones, and the values of their arguments besides
# None, booleans and "" (... accepts every value). Others can turn a short prompt into gigabytes, run for minutes, or
# abort the process.
_COMPONENTS: dict[str, tuple[str | None, ...]] = {
    "model": ("BPE", "WordLevel", "Unigram"),
    "normalizer": (None, "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Precompiled", "Strip", "Replace"),
    "pre_tokenizer": (None, "Whitespace", "WhitespaceSplit", "ByteLevel", "Split", "Digits", "Metaspace"),
}
_ARGUMENTS: dict[str, Any] = {
    "type": ...,
    "vocab": ...,
    "merges": ...,
    "unk_token": ...,
    "unk_id": ...,
    "precompiled_charsmap": ...,
    "pattern": ...,
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
        """Ids of the tokens that begin and end a chat turn.

        Those of Qwen2.5 if its files list no added tokens; None if unknown.
        """
        begin = self.special_tokens.get("<|im_start|>")
        end = self.special_tokens.get("<|im_end|>")
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
    folder: Path,
    stem: str,
    metadata: Mapping[str, str],
    field: str = "checkpoint",
    letters: bool = False,
    words: bool = False,
) -> Tokenizer:
    """Load the tokenizer of a model, whose folder, stem ("" for a folder) and metadata are given.

    The first source found is used: the metadata entry ``tokenizer`` (the content of a ``tokenizer.json``), then the
    files ``<stem>.tokenizer.json``, ``tokenizer.json``, ``vocab.json`` with ``merges.txt``. ``letters``: an added token
    of one character is encoded as itself, rather than as its bytes. ``words``: so is one that the file does not call
    special, such as "<think>".

    Raises:
        UserError: if there is no tokenizer, it is damaged, or ``tokenizers`` is missing.
    """
    if "tokenizer" in metadata:
        where = "the tokenizer within the file"
        return _build(parse_json(metadata["tokenizer"], where, field), where, field, letters, words)

    name = _source(folder, stem)
    if name is None:
        raise UserError(f"{field}: {folder} has no tokenizer (tokenizer.json); put the one of the same model there")

    spec = read_json(folder / name, field)
    if name == "vocab.json":
        merges = read_text(folder / "merges.txt", field)
        spec = _qwen(spec, merges, read_json(folder / "added_tokens.json", field))

    return _build(spec, f"{name} in {folder}", field, letters, words)


def _qwen(vocabulary: Mapping[str, Any], merges: str, added: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer.json`` that ``vocab.json``, ``merges.txt`` and ``added_tokens.json`` of Qwen2 stand for."""
    lines = [line for line in merges.split("\n") if line.strip() and not line.startswith("#version")]
    parts = [
        {"type": "Split", "pattern": _QWEN, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    return {
        "added_tokens": [{"content": name, "id": number} for name, number in added.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": lines},
    }


def _build(spec: dict[str, Any], where: str, field: str, letters: bool, words: bool) -> Tokenizer:
    """Construct a tokenizer from the content of a ``tokenizer.json``; a UserError if it is invalid."""
    try:
        import tokenizers
        from tokenizers import Tokenizer as Library
    except (ImportError, RuntimeError) as e:
        raise import_error("tokenizers", field, e) from e
    _expect_version(tokenizers.__version__, field)

    with library_errors(f"{field}: {where} is not a tokenizer"):
        special_tokens = {str(entry["content"]): _id(entry["id"]) for entry in spec.get("added_tokens") or []}
        plain = _without_added(spec, special_tokens)
        check_components(plain, where, field)
        _check_pieces(plain["model"])

        plain_words = set()
        for entry in (spec.get("added_tokens") or []) if words else []:
            if entry.get("special") is False:
                plain_words.add(str(entry["content"]))

        kept = _kept(special_tokens, letters, plain_words) if letters or words else []
        library = Library.from_str(json.dumps({**plain, "added_tokens": kept}))
        library.encode_special_tokens = True
        if any(library.token_to_id(entry["content"]) != entry["id"] for entry in kept):
            raise ValueError("its added tokens are not numbered in order")  # the library numbers them itself
        library.encode(_PROBE, add_special_tokens=False)

    @lru_cache(maxsize=64)  # a run estimates its memory and samples with the same prompts
    def ids(text: str) -> tuple[int, ...]:
        _expect_length(text)
        # The library rejects lone surrogates.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with library_errors(f"{field}: {where} cannot encode the prompt"):
            if library.normalizer is not None:
                _expect_length(library.normalizer.normalize_str(text))
            return tuple(library.encode(text, add_special_tokens=False).ids)

    return Tokenizer(
        encode=lambda text: list(ids(text)),
        special_tokens=special_tokens,
        size=len(plain["model"]["vocab"]),
    )


def _without_added(spec: Mapping[str, Any], special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """What a ``tokenizer.json`` says of text, without its added tokens."""
    model = dict(spec["model"])
    if model.get("type") == "WordLevel":  # its vocabulary also contains the added tokens
        unknown = model.get("unk_token")
        words = model["vocab"].items()
        model["vocab"] = {word: _id(n) for word, n in words if word == unknown or word not in special_tokens}

    return {
        "version": "1.0",
        "model": model,
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": spec.get("pre_tokenizer"),
    }


def _kept(special_tokens: Mapping[str, int], letters: bool, words: Collection[str]) -> list[dict[str, Any]]:
    """Added tokens as the library reads them; a ValueError if there are too many, or one is too long.

    Those of one character with ``letters``, and the ``words``, are encoded as themselves in a text, others are not.
    """
    if len(special_tokens) > _MOST_KEPT:
        raise ValueError(f"it has {len(special_tokens)} added tokens")
    if any(len(name) > _LONGEST_KEPT for name in special_tokens):
        raise ValueError(f"it has an added token of more than {_LONGEST_KEPT} characters")

    flags = dict.fromkeys(_FLAGS, False)
    kept: list[dict[str, Any]] = []
    for name, number in special_tokens.items():
        is_plain = letters and len(name) == 1 or name in words
        kept.append({"id": number, "content": name, "special": not is_plain, **flags})

    return kept


def _expect_version(version: str, field: str) -> None:
    """Raise a UserError if the package ``tokenizers`` is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UserError(
            f"{field}: reading a prompt needs the Python package tokenizers {oldest} or newer, "
            f"and {version} is installed; update it with: pip install --upgrade tokenizers transformers"
        )


def _expect_length(text: str) -> None:
    """Raise a UserError for a text that would take too long to encode."""
    if len(text) > _LONGEST_TEXT:
        raise UserError(
            f"text: the prompt becomes {len(text)} characters, more than the limit of {_LONGEST_TEXT}; shorten it."
        )


def _check_pieces(model: Mapping[str, Any]) -> None:
    """A ValueError if the vocabulary has a piece that is too long."""
    pieces = model["vocab"]
    is_list = isinstance(pieces, list)  # of pieces and their scores
    if is_list:
        pieces = [piece for piece, _ in pieces]

    kind = model.get("type") or ("Unigram" if is_list else "BPE")
    longest = max(map(len, pieces), default=0)
    if longest > _LONGEST_PIECE[kind]:
        raise ValueError(f"it has a piece of {longest} characters, more than the limit of {_LONGEST_PIECE[kind]}")


def _id(value: Any) -> int:
    """A token id; a ValueError if it is no integer from 0 to 2^31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"{str(value)[:20]} is not a token id")

    return value


def check_components(spec: Mapping[str, Any], where: str, field: str) -> None:
    """Raise a UserError if a ``tokenizer.json`` has components or arguments that no official tokenizer has.

    The same if its components lengthen a text by more.
    """
    growth = 1
    for place, types in _COMPONENTS.items():
        parts = _parts(place, spec.get(place))
        if not isinstance(parts, list) or len(parts) > _MOST_PARTS or not all(_accepted(p, types) for p in parts):
            raise UserError(f"{field}: {where} has a {place} that no official tokenizer has; get the official file")

        for part in parts:
            growth *= _growth(part)
        if growth > _MOST_GROWTH:
            raise UserError(
                f"{field}: {where} has a {place} that makes up to {growth} characters of one, "
                "which no official tokenizer does; get the official file"
            )


def _parts(place: str, part: Any) -> Any:
    """The components of a sequence, or a list of the component alone."""
    if not isinstance(part, dict):
        return [part]
    if part.get("type") == "Sequence":
        return part.get("normalizers") or part.get("pretokenizers") or []
    if place == "model" and "type" not in part:  # as the library reads old files
        return [{**part, "type": "Unigram" if isinstance(part.get("vocab"), list) else "BPE"}]

    return [part]


def _accepted(part: Any, types: tuple[str | None, ...]) -> bool:
    """Whether a component is of one of the types and has no other arguments than :data:`_ARGUMENTS`."""
    if not isinstance(part, dict):
        return part is None and None in types
    if part.get("type") not in types or len(str(part.get("precompiled_charsmap", ""))) > _LONGEST_CHARSMAP:
        return False

    if "pattern" in part and not _is_official(part["pattern"]):
        return False
    if part["type"] == "Precompiled" and _charsmap(part) is None:
        return False

    return all(_accepted_argument(value, _ARGUMENTS.get(name, ())) for name, value in part.items())


def _accepted_argument(value: Any, accepted: Any) -> bool:
    """Whether an argument has one of the accepted values; 1 is not True."""
    if accepted is ... or value is None or isinstance(value, bool):
        return True

    return isinstance(value, str) and value in ("", *accepted)


def _growth(part: Any) -> int:
    """The largest number of characters that a component makes of one."""
    if part is None:
        return 1
    if part["type"] == "Precompiled":
        return max(1, _charsmap(part) or 0)

    return _GROWTH.get(part["type"], 1)


def _charsmap(part: Mapping[str, Any]) -> int | None:
    """Characters of the longest text in SentencePiece's table of a component; None if it is no such table.

    The table is the length of a trie in bytes (four bytes, the lowest first), the trie, and texts that end with a zero
    byte. The library allocates memory for the stated length before it reads the trie.
    """
    try:
        table = base64.b64decode(part["precompiled_charsmap"], validate=True)
        length = int.from_bytes(table[:4], "little")
        if len(table) < 4 + length or length < 4 or length % 4:
            return None

        return max(map(len, table[4 + length :].decode("utf-8").split("\0")))
    except (KeyError, TypeError, ValueError):
        return None


def _is_official(pattern: Any) -> bool:
    """Whether a pattern is a regular expression of an official tokenizer."""
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
    needs = f"{field}: reading a prompt needs the Python package {package}"
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return UserError(
            f"{needs}, which ComfyUI brings, and here it is not installed; install it with: pip install {package}"
        )

    return UserError(
        f"{needs}, which is installed but cannot be imported ({first_line(error)}); "
        f"install it again with: pip install --upgrade --force-reinstall {package}"
    )
