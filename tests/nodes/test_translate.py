"""Translations: the files are fresh, a text without one stays English, and what is typed or chosen keeps its name."""

import json
import re

import pytest
from fastar_nodes.lab.docs.translate import (
    LANGUAGES,
    ROOT,
    node_texts,
    other_texts,
    table_of,
    texts,
)
from test_schemas import CLASSES

LETTERS = {"zh": "[\u4e00-\u9fff]", "ja": "[\u3040-\u30ff\u4e00-\u9fff]"}
# Labels that are the same in every language: signs of the papers, and names.
INTERNATIONAL = {"cfg", "vae", "tar", "ta_tok", "top_k", "top_p", "latent"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_translated_stands_where_comfyui_reads_it(language):
    """Under the same keys as the English texts; a text without a translation is left out, and stays English."""
    english = texts(list(CLASSES.values()))
    translated = json.loads(node_texts(language))
    assert translated.keys() <= english.keys() and len(translated) > 30
    for node, about in translated.items():
        assert about.keys() <= english[node].keys()
        for side in ("inputs", "outputs"):
            for name, part in about.get(side, {}).items():
                assert part.keys() <= english[node][side][name].keys()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_files_are_what_the_tables_make(language):
    folder = ROOT / "locales" / language
    assert (folder / "nodeDefs.json").read_text(encoding="utf-8") == node_texts(language), "run lab translate"
    assert (folder / "main.json").read_text(encoding="utf-8") == other_texts(language), "run lab translate"


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_are_in_their_language_and_keep_what_is_typed(language):
    table = table_of(language)
    for part in ("texts", "names", "categories", "messages"):
        for english, other in table[part].items():
            if english not in INTERNATIONAL:
                assert re.search(LETTERS[language], other), f"{other!r} is not in {language}"
            assert not re.search(r"[@|]|\{(?!n\})", other), f"{other!r}: the editor takes these signs for commands"

    for english, other in table["texts"].items():
        for name in re.findall(r"models/\w+|\.safetensors|config\.json|tokenizer\.json|name=value", english):
            assert name in other, f"{other!r} lost {name}"

        # A widget has its label of the language.
        for name in re.findall(r"\b[a-z]+_[a-z_]+\b", english):
            assert table["names"].get(name, name) in other, f"{other!r} lost {name}"

        # Numbers are facts.
        lost = set(re.findall(r"\d+", english)) - set(re.findall(r"\d+", other))
        assert not lost, f"{other!r} lost {lost}"
