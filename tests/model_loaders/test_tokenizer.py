"""Limits of tokenizers and of prompts, and the package that reads them."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks import chat
from fastar_nodes.model_loaders.tokenizer import check_components, import_error, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
PIECES = [["<unk>", 0.0], ["\u2581", -1.0], ["a", -2.0], ["b", -2.0]]
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": PIECES}
PLAIN = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


def charsmap(*texts: str, stated: int | None = None, trie: bytes = bytes(4)) -> dict[str, Any]:
    """SentencePiece's table of these texts; ``stated`` is the length of the trie that it states,
    None for the true one.
    """
    length = len(trie) if stated is None else stated
    table = length.to_bytes(4, "little") + trie + "".join(f"{text}\0" for text in texts).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def load(folder: Path, **spec: Any):
    (folder / "tokenizer.json").write_text(json.dumps({"model": PLAIN, **spec}))
    return load_tokenizer(folder, "", {})


def refused(folder: Path, words: str, **spec: Any) -> None:
    with pytest.raises(UserError, match=f"^checkpoint: tokenizer.json in .*{words}") as error:
        load(folder, **spec)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 400


@pytest.mark.parametrize(
    "part",
    [
        charsmap("x", stated=(1 << 32) - 4),  # more than the table
        charsmap("x", stated=8),
        charsmap("x", stated=0, trie=b""),
        charsmap("x", trie=bytes(6)),  # not whole numbers of four bytes
        {"type": "Precompiled", "precompiled_charsmap": "AAA"},
        {"type": "Precompiled", "precompiled_charsmap": "!!!!"},
        {"type": "Precompiled", "precompiled_charsmap": 3},
        {"type": "Precompiled"},
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\x04\0\0\0\0\0\0\0\xff").decode()},
    ],
)
def test_tables_that_are_none(tmp_path: Path, part: dict) -> None:
    refused(tmp_path, "has a normalizer that no official tokenizer has", normalizer=part)


def test_how_much_a_text_may_grow() -> None:
    """18 characters is what NFKC makes of U+FDFA, the most of all; 100 is the limit of all components together."""

    def check(normalizer: Any, pre_tokenizer: Any = None) -> None:
        check_components({"model": PLAIN, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}, "x", "encoder")

    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    t5 = sequence(charsmap("x" * 18), {"type": "Strip"}, {"type": "Replace", "pattern": None, "content": "\u2581"})
    t5["normalizers"][2].pop("pattern")
    check(t5, {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]})
    check({"type": "NFKC"}, byte_level)
    check(charsmap("a", "x" * 100, ""))
    for normalizer, pre_tokenizer, place, most in (
        (charsmap("a", "x" * 101), None, "normalizer", 101),
        (sequence(charsmap("x" * 18), charsmap("x" * 18)), None, "normalizer", 324),
        (sequence({"type": "NFKC"}, charsmap("x" * 6)), None, "normalizer", 108),
        (charsmap("x" * 30), byte_level, "pre_tokenizer", 120),
        (None, {"type": "Sequence", "pretokenizers": [byte_level] * 4}, "pre_tokenizer", 256),
    ):
        with pytest.raises(UserError, match=f"^encoder: x has a {place} that makes up to {most} characters of one"):
            check(normalizer, pre_tokenizer)


@pytest.mark.parametrize(("kind", "longest"), [("Unigram", 64), ("BPE", 1024), ("WordLevel", 1024)])
def test_the_longest_piece(tmp_path: Path, kind: str, longest: int) -> None:
    def model(length: int) -> dict[str, Any]:
        if kind == "Unigram":
            return {**UNIGRAM, "vocab": [*PIECES, ["a" * length, -1.0]]}
        more = {"merges": []} if kind == "BPE" else {"unk_token": "a"}
        return {"type": kind, "vocab": {"a": 0, "b" * length: 1}, **more}

    load(tmp_path, model=model(longest))
    refused(tmp_path, f"a piece of {longest + 1} characters, more than", model=model(longest + 1))


def test_the_longest_added_token(tmp_path: Path) -> None:
    def made(length: int) -> None:
        added = [{"id": 3, "content": "x" * length}]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": PLAIN, "added_tokens": added}))
        load_tokenizer(tmp_path, "", {}, letters=True)

    made(256)
    with pytest.raises(UserError, match="an added token of more than 256 characters"):
        made(257)


@pytest.mark.parametrize("value", [0.5, 1.0, 0, 1, "x", [], {}])
def test_numbers_are_no_switches(tmp_path: Path, value: Any) -> None:
    """A dropout of 1.0 is a BPE without merges."""
    refused(tmp_path, "has a model that no official tokenizer has", model={**PLAIN, "dropout": value})


def test_a_text_is_measured_before_and_behind_the_normalizer(tmp_path: Path) -> None:
    plain, growing = load(tmp_path), load(tmp_path, normalizer={"type": "NFKC"})
    half = chat.MOST_TEXT
    assert len(plain.encode("ab" * half)) == half and len(growing.encode("ab" * half)) == half
    for made, text, count in ((plain, "a" * (2 * half + 1), 2 * half + 1), (growing, "\ufdfa" * 5000, 90_000)):
        with pytest.raises(UserError, match=f"^text: the prompt becomes {count} characters, more than .* 40000"):
            made.encode(text)


def test_the_longest_prompt() -> None:
    chat.expect_text("x" * 20_000)
    with pytest.raises(UserError, match="^negative: it has 20001 characters; give at most 20000"):
        chat.expect_text("x" * 20_001, "negative")


@pytest.mark.parametrize("version", ["0.13.3", "0.19.1", "0.9"])
def test_an_old_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "__version__", version)
        with pytest.raises(UserError) as error:
            load(tmp_path)
    assert str(error.value) == (
        f"checkpoint: reading a prompt needs the Python package tokenizers 0.20 or newer, and {version} is installed; "
        "update it with: pip install --upgrade tokenizers transformers"
    )


@pytest.mark.parametrize("version", ["0.20.0", "0.22.2.dev0", "1.0", "unknown"])
def test_a_library_that_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(tokenizers, "__version__", version)
    assert load(tmp_path).encode("abb") == [2, 1]


def test_a_library_that_is_missing_or_broken() -> None:
    missing = import_error("tokenizers", "encoder", ModuleNotFoundError("No module", name="tokenizers"))
    assert str(missing).endswith("here it is not installed; install it with: pip install tokenizers")
    for error in (
        ImportError("tokenizers>=0.21,<0.22 is required"),
        ModuleNotFoundError("No module", name="regex"),
    ):
        broken = str(import_error("transformers", "encoder", error))
        assert f"which is installed but cannot be imported ({error}); install it again" in broken


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"type": "Unigram", "vocab": [["a"]]}},
        {"model": {"type": "Unigram", "vocab": [[3, 0.0]]}},
        {"model": {"type": "Unigram", "vocab": 3}},
        {"model": {"type": "BPE", "vocab": [], "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 10**20}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "x"]]}},
        {"model": []},
        {"added_tokens": 3},
        {"added_tokens": [{"id": 1 << 40, "content": "x"}]},
        {"normalizer": [[[]]]},
        {"pre_tokenizer": json.loads("[" * 300 + "]" * 300)},
        {"model": {**PLAIN, "merges": json.loads("[" * 300 + "]" * 300)}},
    ],
)
def test_content_of_the_wrong_kind(tmp_path: Path, spec: dict) -> None:
    refused(tmp_path, "", **spec)
