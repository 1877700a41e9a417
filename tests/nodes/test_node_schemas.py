"""Schemas of the nodes. Saved graphs depend on them: widgets by position, sockets by name."""

from __future__ import annotations

import re
from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest
from fastar_nodes.nodes import (
    advice,
    comparison,
    conditioning,
    hybrid,
    layout,
    loaders,
    mar_samplers,
    previous,
    schema,
    sharing,
    sweep_cells,
    sweeps,
    token_samplers,
)
from fastar_nodes.samplers.mar.settings import CacheSettings
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import Knob, knob, knobs
from fastar_nodes.samplers.tokens.settings import TarPromptSettings
from graphs import WIDGETS

MODULES = (
    loaders,
    conditioning,
    hybrid,
    mar_samplers,
    token_samplers,
    comparison,
    sweeps,
    sweep_cells,
    sharing,
    advice,
    previous,
)
CLASSES = [node for module in MODULES for node in module.NODES]
NODES = {about.node_id: about for about in (node.define_schema() for node in CLASSES)}
SETTINGS = {
    "FastARMARSampler": SAMPLERS["mar"].settings,
    "FastARFastHybrid": SAMPLERS["fasthybrid"].settings,
    "FastARLazyMAR": SAMPLERS["lazymar"].settings,
    "FastARLazyMARCache": CacheSettings,
    "FastARCSpD": SAMPLERS["cspd"].settings,
    "FastARLlamaGenSampler": SAMPLERS["llamagen"].settings,
    "FastARPAR": SAMPLERS["par"].settings,
    "FastARZipAR": SAMPLERS["zipar"].settings,
    "FastARTarPrompt": TarPromptSettings,
    "FastARMuLoSD": SAMPLERS["mulosd"].settings,
    "FastARFastHybridSampler": SAMPLERS["fasthybrid"].settings,
    "FastARLazyMARSampler": SAMPLERS["lazymar"].settings,
    "FastARLazyMARFeatureCache": CacheSettings,
    "FastARCSpDSampler": SAMPLERS["cspd"].settings,
    "FastARZipARSampler": SAMPLERS["zipar"].settings,
    "FastARMuLoSDSampler": SAMPLERS["mulosd"].settings,
}
PREVIOUS = {node.define_schema().node_id for node in previous.NODES}
# Every class that contributes fields to the settings of a node.
BASES = {cls for settings in SETTINGS.values() for cls in settings.__mro__ if "__dataclass_fields__" in vars(cls)}


def socket_names(about) -> list[str]:
    return [i.id for i in about.inputs if i.kind not in WIDGETS]


def widget_names(about) -> list[str]:
    return [i.id for i in about.inputs if i.kind in WIDGETS]


@pytest.mark.parametrize("node", NODES)
def test_every_widget_is_in_the_table(node):
    assert node in layout.WIDGETS, f"add a row {node} with {', '.join(widget_names(NODES[node]))} to nodes/layout.py"
    missing = [name for name in widget_names(NODES[node]) if name not in layout.WIDGETS[node]]
    assert not missing, f"append {', '.join(missing)} to the row {node} of nodes/layout.py, at its end"
    assert tuple(widget_names(NODES[node])) == layout.WIDGETS[node], "the table names a widget that the node lacks"


@pytest.mark.parametrize("base", sorted(BASES, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_a_setting_appended_to_a_class_moves_no_widget(base, monkeypatch):
    """The field is inserted behind those of its class, which inheritance places in front of the fields of derived classes."""
    last = [f.name for f in fields(base)][-1]

    def extended(settings):
        out = {}
        for name, about in knobs(settings).items():
            out[name] = about
            if name == last and issubclass(settings, base):
                out["added"] = (1, Knob("A new setting.", 0, 2, 1))
        return out

    monkeypatch.setattr(schema, "knobs", extended)
    changed = set()
    for node, about in {about.node_id: about for about in (node.define_schema() for node in CLASSES)}.items():
        names = widget_names(about)
        if "added" in names:
            changed.add(node)
            assert names.pop() == "added", f"{node}: a new widget is the last one"
        assert names == widget_names(NODES[node])
        assert socket_names(about) == socket_names(NODES[node])
    listed = {node for node, settings in SETTINGS.items() if issubclass(settings, base)}
    assert changed == listed, "SETTINGS in this file names every node with settings, and the class of its settings"


def test_widgets_follow_the_table_and_then_the_settings():
    kind = make_dataclass("Extended", [("added", int, knob(1, "A new setting."))], bases=(CacheSettings,), frozen=True)
    names = [widget.id for widget in layout.ordered("FastARLazyMARCache", schema.widgets(kind)[::-1])]
    table = [name for name in layout.WIDGETS["FastARLazyMARCache"] if name in names]
    assert names == [*table, "added"]


@pytest.mark.parametrize("node", NODES)
def test_everything_has_a_tooltip_and_a_help_page(root, node):
    for part in [*NODES[node].inputs, *NODES[node].outputs]:
        assert part.about.get("tooltip"), f"{node}.{part.id}"
    page, title = root / "web" / "docs" / f"{node}.md", f"# {NODES[node].display_name}"
    assert page.is_file(), f"add the help page web/docs/{node}.md"
    assert page.read_text(encoding="utf-8").startswith(f"{title}\n"), f"{page.name}: the first line is '{title}'"


@pytest.mark.parametrize("node", [node for node in NODES if node not in PREVIOUS])
def test_every_node_is_found_by_other_words(node):
    """What users of other packs type; the name itself is searched anyway."""
    aliases = NODES[node].search_aliases
    assert len(aliases) >= 3 and len(set(aliases)) == len(aliases)
    assert all(a == a.lower() and a != NODES[node].display_name.lower() for a in aliases)


@pytest.mark.parametrize("node", NODES)
def test_help_pages_explain_every_input(root, node):
    page = (root / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    for part in NODES[node].inputs:
        name = re.sub(r"_[1-8]$", "", part.id) if node == "FastARCompare" else part.id
        assert f"**{name}" in page, f"web/docs/{node}.md does not explain {part.id}: '- **{name}**: ...'"


@pytest.mark.parametrize("node", SETTINGS)
def test_widgets_agree_with_the_settings(node):
    inputs = {i.id: i for i in NODES[node].inputs}
    for name, (default, about) in knobs(SETTINGS[node]).items():
        widget = inputs[name]
        if node not in PREVIOUS and name in schema.automatic_names(SETTINGS[node]):
            is_automatic(widget, default, about)
            continue
        assert widget.about["default"] == default and widget.about["tooltip"] == about.tooltip
        assert bool(widget.about["advanced"]) == about.advanced
        if about.choices:
            assert widget.kind == "COMBO" and widget.about["options"] == list(about.choices)
        elif isinstance(default, bool):
            assert widget.kind == "BOOLEAN"
        else:
            assert widget.kind == ("INT" if isinstance(default, int) else "FLOAT")
            assert (widget.about["min"], widget.about["max"], widget.about["step"]) == (
                about.low,
                about.high,
                about.step,
            )


def is_automatic(widget, default, about: Knob) -> None:
    """A widget with the value auto: -1 or "auto", which is its default, and then the settings' own range or choices."""
    assert (
        widget.about["tooltip"].startswith(about.tooltip) and "auto: the value of the preset" in widget.about["tooltip"]
    )
    if about.choices or isinstance(default, bool):
        assert widget.kind == "COMBO" and widget.about["default"] == "auto"
        assert widget.about["options"] == ["auto", *(about.choices or ("on", "off"))]
    else:
        assert widget.kind == ("INT" if isinstance(default, int) else "FLOAT")
        assert (widget.about["default"], widget.about["min"], widget.about["max"]) == (-1, -1, about.high)


def test_an_older_comfyui_gets_no_argument_it_does_not_know(monkeypatch):
    from dataclasses import dataclass

    from fastar_nodes.nodes import schema

    @dataclass
    class Older:
        node_id: str

    monkeypatch.setattr(schema.io, "Schema", Older)
    assert schema.schema(node_id="x", search_aliases=["y"]) == Older("x")


def test_the_editor_and_the_server_agree_on_the_pairs_of_compare():
    script = (Path(__file__).parents[2] / "web" / "js" / "compare.js").read_text(encoding="utf-8")
    sockets = {i.id: i.kind for i in NODES["FastARCompare"].inputs if i.kind not in WIDGETS}
    assert int(re.search(r"const PAIRS = (\d+)", script)[1]) * 2 == len(sockets)
    kinds = re.findall(r'\["(\w+)", "([A-Z_]+)"\]', script)
    assert len(kinds) == 2
    for kind, type_ in kinds:
        assert {t for name, t in sockets.items() if name.startswith(f"{kind}_")} == {type_}


def test_the_script_that_sorts_templates_finds_them():
    root = Path(__file__).parents[2]
    script = (root / "web" / "js" / "templates.js").read_text(encoding="utf-8")
    assert (root / "workflows" / (re.search(r'const OWN = "(.+)"', script)[1] + ".json")).is_file()
