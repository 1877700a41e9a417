"""Translations: what has none stays English, and tables keep names that are typed."""

import json
import re

import pytest
from fastar_nodes.tools.translate import LANGUAGES, ROOT, TABLES, Translator, generated
from test_schemas import NODES


def test_texts_without_a_translation_are_left_out():
    translator = Translator({"Steps.": "S"}, {"k"})
    given = {"a": "Steps.", "b": "Other.", "c": {"d": "k: Steps."}, "e": {"f": "Other."}}
    assert translator.all(given) == {"a": "S", "c": {"d": "k: S"}}
    assert translator.missing == {"Other."}


@pytest.mark.parametrize(("language", "letters"), [("zh", "[\u4e00-\u9fff]"), ("ja", "[\u3040-\u30ff\u4e00-\u9fff]")])
def test_translations_are_in_their_language_and_keep_names(language, letters):
    table = json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))
    for english, other in table.items():
        assert re.search(letters, other), f"{other!r} is not in {language}"
        for name in re.findall(r"\b[a-z]+_[a-z_]+\b|models/\w+|\.safetensors|config\.json|\{n\}", english):
            assert name in other, f"{other!r} lost {name}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_comfyui_can_read_the_files_and_they_name_widgets_that_exist(language):
    saved = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert saved["FastARMARSampler"]["inputs"]["cfg"]["tooltip"]
    for found in (saved, json.loads(generated(language)[0])):
        for node, about in found.items():
            assert {*about.get("inputs", {})} <= {i.id for i in NODES[node].inputs}, "run tools.translate"
