"""Translations: nothing is missing, nothing is stale, and what is typed or chosen keeps its name."""

import json
import re

import pytest
from fastar_nodes.lab.docs.translate import (
    LANGUAGES,
    NUMBERED,
    ROOT,
    SYMBOL,
    Translator,
    node_texts,
    other_texts,
    table_of,
    texts,
)
from test_schemas import CLASSES, NODES

LETTERS = {"zh": "[\u4e00-\u9fff]", "ja": "[\u3040-\u30ff\u4e00-\u9fff]"}
# Labels that are the same in every language: signs of the papers, and names.
INTERNATIONAL = {"cfg", "vae", "tar", "ta_tok", "top_k", "top_p", "latent"}


def test_texts_without_a_translation_are_left_out():
    table = {
        "texts": {"Steps.": "S", "image_{n} and more": "I {n} M"},
        "names": {"steps": "N"},
        "symbol": " [{symbol}]",
    }
    translator = Translator(table)
    given = {"a": "Steps.", "b": "Other.", "c": {"name": "steps", "d": "Steps. (k in the paper)"}, "e": {"f": "Other."}}
    assert translator.all(given) == {"a": "S", "c": {"name": "N", "d": "S [k]"}}
    assert translator.missing == {"Other."}


def test_numbers_of_inputs_are_kept():
    translator = Translator({"texts": {"For image_{n}.": "F {n}"}, "names": {"image_{n}": "I {n}"}, "symbol": ""})
    assert translator.text("For image_3.") == "F 3"
    assert translator.text("image_8", "names") == "I 8"


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_that_a_node_shows_stays_english(language):
    text, missing = node_texts(language)
    assert not missing, "translate them in lab/docs/translations, then run lab translate"

    english = texts(list(CLASSES.values()))
    translated = json.loads(text)
    assert translated.keys() == english.keys()
    for node, about in english.items():
        assert translated[node].keys() == about.keys()
        for side in ("inputs", "outputs"):
            assert {name: part.keys() for name, part in translated[node][side].items()} == {
                name: part.keys() for name, part in about[side].items()
            }


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_files_are_what_the_tables_make(language):
    folder = ROOT / "locales" / language
    assert (folder / "nodeDefs.json").read_text(encoding="utf-8") == node_texts(language)[0], "run lab translate"
    assert (folder / "main.json").read_text(encoding="utf-8") == other_texts(language), "run lab translate"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_table_holds_no_stale_texts(language):
    shown: set[str] = set()
    names: set[str] = set()
    for about in NODES.values():
        shown |= {about.display_name, about.description}
        for part in [*about.inputs, *about.outputs]:
            shown.add(NUMBERED.sub("{n}", SYMBOL.sub("", part.about["tooltip"])))
        names |= {NUMBERED.sub("{n}", part.id) for part in about.inputs}
        names |= {part.about["display_name"] for part in about.outputs}

    assert table_of(language)["texts"].keys() == shown
    assert table_of(language)["names"].keys() == names


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


def categories() -> set[str]:
    """The groups of the node menu within FastAR."""
    return {part for about in NODES.values() for part in about.category.split("/")[1:]}


def messages() -> set[str]:
    """What the scripts of the editor say."""
    said: set[str] = set()
    for script in (ROOT / "web" / "js").glob("*.js"):
        text = script.read_text(encoding="utf-8")
        said |= set(re.findall(r'\bsay\("([^"]+)"', text))
        for name in re.findall(r"\bsay\(([A-Z]+)\)", text):
            said |= set(re.findall(rf'const {name} = "([^"]+)"', text))
    return said


@pytest.mark.parametrize("language", LANGUAGES)
def test_groups_of_the_menu_and_messages_are_translated(language):
    table = table_of(language)
    assert table["categories"].keys() == categories()

    assert "last run" in messages()
    assert table["messages"].keys() == messages()
