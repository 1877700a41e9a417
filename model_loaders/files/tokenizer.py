"""Tokenizers of language models and of T5: Hugging Face's ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``.

Added tokens are removed from the tokenizer, so that "<|im_end|>" in a prompt is encoded as ten characters and cannot
end the prompt. Callers insert special tokens by id. Janus' added tokens are kept, because some are letters of its
vocabulary; those of several characters are encoded as characters too. The package ``tokenizers`` is imported when a
tokenizer is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from .checkpoint import parse_json, read_json, read_text

# Pre-tokenization pattern of Qwen2, applied before byte-pair merges.
_QWEN = {
    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
}
# Qwen2.5: tokens of its vocabulary, and ids of the special tokens of a chat turn.
_QWEN_SIZE = 151_643
_QWEN_CHAT = (151_644, 151_645)
# The first version of the package tokenizers that reads the files of today's transformers, whose merges are pairs.
# Versions before it also take special tokens in a prompt for themselves.
_OLDEST = (0, 20)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer for text."""

    encode: Callable[[str], list[int]]  # text to token ids, without special tokens
    special_tokens: Mapping[str, int]  # names of added tokens to ids
    size: int  # vocabulary size without added tokens
    decode: Callable[[Sequence[int]], str]  # token ids to text, without special tokens

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
        raise UserError(
            f"{field}: {folder} has no tokenizer (tokenizer.json); put the tokenizer of this model into the folder"
        )

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
        added = spec.get("added_tokens") or []
        special_tokens = {str(entry["content"]): _id(entry["id"]) for entry in added}
        plain = _without_added(spec, special_tokens)

        plain_words = {str(entry["content"]) for entry in added if words and entry.get("special") is False}
        kept = _kept(special_tokens, letters, plain_words) if letters or words else []
        library = Library.from_str(json.dumps({**plain, "added_tokens": kept}))
        library.encode_special_tokens = True
        if any(library.token_to_id(entry["content"]) != entry["id"] for entry in kept):
            raise ValueError("its added tokens are not numbered in order")  # the library numbers them itself

    @lru_cache(maxsize=64)  # a run estimates its memory and samples with the same prompts
    def ids(text: str) -> tuple[int, ...]:
        # The library rejects lone surrogates.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with library_errors(f"{field}: {where} cannot encode the prompt"):
            return tuple(library.encode(text, add_special_tokens=False).ids)

    return Tokenizer(
        encode=lambda text: list(ids(text)),
        special_tokens=special_tokens,
        size=len(plain["model"]["vocab"]),
        decode=lambda tokens: library.decode(list(tokens), skip_special_tokens=True),
    )


def _without_added(spec: Mapping[str, Any], special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """What a ``tokenizer.json`` says of text, without its added tokens."""
    model = dict(spec["model"])
    model.pop("dropout", None)  # of merges, for training
    if model.get("type") == "WordLevel":  # its vocabulary also contains the added tokens
        unknown = model.get("unk_token")
        words = model["vocab"].items()
        model["vocab"] = {word: _id(n) for word, n in words if word == unknown or word not in special_tokens}

    return {
        "version": "1.0",
        "model": model,
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": spec.get("pre_tokenizer"),
        "decoder": spec.get("decoder"),
    }


def _kept(special_tokens: Mapping[str, int], letters: bool, words: Collection[str]) -> list[dict[str, Any]]:
    """Added tokens as the library reads them.

    Those of one character with ``letters``, and the ``words``, are encoded as themselves in a text, others are not.
    """
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
            f"{field}: reading a prompt needs the Python package tokenizers {oldest} or newer, but {version} is "
            "installed; update it with: pip install --upgrade tokenizers transformers"
        )


def _id(value: Any) -> int:
    """A token id; a ValueError if it is no integer from 0 to 2^31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError(f"{str(value)[:20]} is not a token id")

    return value


@contextmanager
def library_errors(found: str) -> Iterator[None]:
    """Raise a UserError in place of every error of the package ``tokenizers``, whose panics are no ``Exception``."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UserError):
        raise
    except BaseException as e:
        raise UserError(f"{found} ({first_line(e)}); download the official tokenizer") from e


def import_error(package: str, field: str, error: BaseException) -> UserError:
    """The error for a package that encoding a prompt requires and that cannot be imported."""
    needs = f"{field}: reading a prompt needs the Python package {package}"
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return UserError(
            f"{needs}, which comes with ComfyUI but is not installed here; install it with: pip install {package}"
        )

    return UserError(
        f"{needs}. This package is installed but cannot be imported ({first_line(error)}); "
        f"install it again with: pip install --upgrade --force-reinstall {package}"
    )
