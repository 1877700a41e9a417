"""Help pages and docs/settings.md: they are what the tooltips and longer texts make."""

import dataclasses
from types import SimpleNamespace

import pytest
from comfy_api.v0_0_2 import io
from fastar_nodes.lab.docs import help_pages
from fastar_nodes.lab.docs.help_pages import emphasised, item, one_of_each, range_in_words, wrapped
from fastar_nodes.nodes.schema import explained, widget
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.settings import Knob, knobs
from test_schemas import NODES


def test_the_pages_are_what_the_texts_make():
    changed = [path.name for path, text in help_pages.written().items() if path.read_text(encoding="utf-8") != text]
    assert not changed, f"run `make texts`, which writes {', '.join(changed)}"


def test_the_table_has_every_setting_of_every_sampler():
    page = help_pages.settings_page()
    for name, entry in SAMPLERS.items():
        title = entry.title.split(" + ")[0]
        for setting in knobs(entry.settings):
            rows = [line for line in page.splitlines() if line.startswith(f"| *{setting}* |")]
            assert any("+" in name or name == "tar" or title in row for row in rows), (name, setting)


def test_a_longer_text_follows_the_tooltip_and_is_not_sent_to_the_editor():
    part = widget("steps", 3, Knob("Steps of x_max, or auto. Usual: 3.", 1, 9, 1, symbol="S", more="More text."))
    assert "More text." not in str(part.about)
    assert help_pages.more_of(SimpleNamespace(), part) == "More text."
    assert help_pages.more_of(SimpleNamespace(more={"steps": "The node's."}), part) == "More text. The node's."

    found = item("steps", part, "More text.", ["steps", "x_max"])
    assert found == "- **steps** (*S*): Steps of *x_max*, or auto. Usual: 3. More text."
    listed = item("steps", part, "\n  - *a*: one.\n  - *b*: two.", [])
    assert listed.split("\n")[1:] == ["  - *a*: one.", "  - *b*: two."]


def test_a_text_of_many_nodes_stands_once_in_the_code():
    part = explained(io.Int.Input("first_image", tooltip="A number."), "")
    assert "batch_index" in help_pages.more_of(SimpleNamespace(), part)


def test_a_long_text_stands_on_the_page_of_one_node(monkeypatch):
    """The other pages name that node; a short text stands on each."""
    long = "A text of many words. " * 5
    for text, shown in ((long, "More: the help of MAR Sampler."), ("Short.", "Short.")):
        part = explained(io.Int.Input("what", tooltip="A number."), text)
        monkeypatch.setattr(help_pages, "homes", lambda text=text: {("what", text): "MAR Sampler"})
        assert help_pages.more_of(SimpleNamespace(), part, "MAR Sampler") == text
        assert help_pages.more_of(SimpleNamespace(), part, "GtR Sampler") == shown


def test_a_tooltip_does_not_send_a_reader_to_the_page_that_he_reads():
    part = io.Int.Input("what", tooltip="What it shows. The help page explains the others.")
    assert item("what", part, "", []) == "- **what**: What it shows."


def test_names_and_options_in_a_text_are_marked():
    assert emphasised("t_max is auto; torch.auto, autos", ["t_max", "auto"]) == "*t_max* is *auto*; torch.auto, autos"


@pytest.mark.parametrize(("start", "indent"), [("- ", "  "), ("  - ", "    ")])
def test_long_lines_are_wrapped_under_their_text(start, indent):
    first, *others = wrapped(start + "word " * 60).split("\n")
    assert first.startswith(f"{start}word") and others
    assert all(line.startswith(f"{indent}word") for line in others)
    assert all(len(line) <= help_pages.COLUMNS for line in (first, *others))


def test_numbered_inputs_are_one_entry():
    parts = [SimpleNamespace(id=name) for name in ("a", "image_1", "report_1", "image_2", "report_2", "x_values")]
    assert [name for name, _ in one_of_each(parts)] == ["a", "image_1 to image_2", "report_1 to report_2", "x_values"]


def test_ranges_in_words():
    assert range_in_words(3, Knob("", 1, 9, 1)) == "1 to 9"
    assert range_in_words(True, Knob("")) == "on, off"
    assert range_in_words("a", Knob("", choices=("a", "b"))) == "a, b"


def test_no_longer_text_is_of_an_input_that_is_not_there():
    for node in help_pages.node_classes():
        about = node.define_schema()
        assert set(getattr(node, "more", {})) <= {part.id for part in about.inputs}, about.node_id
        assert set(getattr(node, "more_of_outputs", {})) <= {part.id for part in about.outputs}, about.node_id
    for name in help_pages.of_many():
        assert any(name == part.id for about in NODES.values() for part in about.inputs), name


def test_a_longer_text_adds_to_the_tooltip():
    """A sentence that the tooltip has already is not said again."""
    for entry in SAMPLERS.values():
        for field in dataclasses.fields(entry.settings):
            about = field.metadata["knob"]
            said = {sentence.strip() for sentence in about.help.split(". ")}
            assert not said & {sentence.strip() for sentence in about.more.split(". ")} - {""}, field.name
