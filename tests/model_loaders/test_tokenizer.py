"""Tokenizers and limits of prompts, and the package that reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.files.tokenizer import import_error, load_tokenizer
from fastar_nodes.networks import chat

tokenizers = pytest.importorskip("tokenizers")
PLAIN = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


def load(folder: Path, **spec: Any):
    (folder / "tokenizer.json").write_text(json.dumps({"model": PLAIN, **spec}))
    return load_tokenizer(folder, "", {})


def refused(folder: Path, words: str, **spec: Any) -> None:
    with pytest.raises(UserError, match=f"^checkpoint: tokenizer.json in .*{words}") as error:
        load(folder, **spec)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 400


def test_a_dropout_of_merges_is_for_training(tmp_path: Path) -> None:
    """With it a prompt would have other tokens at every call; at 1.0 a BPE has no merges."""
    assert load(tmp_path, model={**PLAIN, "dropout": 1.0}).encode("abb") == [2, 1]


def test_a_limit_of_the_file_does_not_cut_a_prompt(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert load(tmp_path, truncation=cut).encode("abab") == [2, 2]


def test_the_library_says_what_is_wrong(tmp_path: Path) -> None:
    part = {"type": "NoSuchPart"}
    refused(tmp_path, r"is not a tokenizer \(.*\); download the official tokenizer", normalizer=part)
    # Tables on which the library panics when they are read, and at a prompt; a panic is no Exception.
    refused(tmp_path, "is not a tokenizer", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    made = load(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="})
    with pytest.raises(UserError, match=r"^checkpoint: tokenizer.json in .* cannot encode the prompt \(.*\); download"):
        made.encode("ab")


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
    said = str(error.value)
    assert said.startswith("checkpoint: ") and f"tokenizers 0.20 or newer, but {version}" in said
    assert said.endswith("pip install --upgrade tokenizers transformers")


@pytest.mark.parametrize("version", ["0.20.0", "0.22.2.dev0", "1.0", "unknown"])
def test_a_library_that_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(tokenizers, "__version__", version)
    assert load(tmp_path).encode("abb") == [2, 1]


def test_a_library_that_is_missing_or_broken() -> None:
    missing = import_error("tokenizers", "encoder", ModuleNotFoundError("No module", name="tokenizers"))
    assert str(missing).endswith("install it with: pip install tokenizers")
    for error in (
        ImportError("tokenizers>=0.21,<0.22 is required"),
        ModuleNotFoundError("No module", name="regex"),
    ):
        broken = str(import_error("transformers", "encoder", error))
        assert f"This package is installed but cannot be imported ({error}); install it again" in broken


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
