"""Schemas of the nodes. Saved graphs depend on them: widgets by position, sockets by name."""

from __future__ import annotations

import re
from dataclasses import fields, make_dataclass

import pytest
from fastar_nodes.nodes import comparison, conditioning, layout, loaders, mar_samplers, schema, token_samplers
from fastar_nodes.samplers.mar.settings import CacheSettings
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import Knob, knob, knobs
from fastar_nodes.samplers.tokens.settings import TarPromptSettings

CLASSES = [
    node for module in (loaders, conditioning, mar_samplers, token_samplers, comparison) for node in module.NODES
]
NODES = {about.node_id: about for about in (node.define_schema() for node in CLASSES)}
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
MAR_MAIN, MAR_MORE = ["seed", "ar_steps", "diffusion_steps", "cfg"], ["cfg_schedule", "temperature", "order", "t_max"]
LAZY_MAIN = ["refresh_period", "start_step", "computed_ratio"]
LAZY_MORE = ["strategy", "condition_cache", "token_cache", "head_cache", "encoder_cache", "block", "head_period"]
TOKENS_MAIN, TOKENS_MORE = ["seed", "cfg", "temperature", "top_k"], ["top_p", "cfg_interval"]
# The order in which graphs were saved; independent of nodes/layout.py. Append only.
ORDER = {
    "FastARLoadMAR": ["checkpoint", "decoder", "dtype"],
    "FastARLoadLlamaGen": ["checkpoint", "decoder", "grid", "dtype"],
    "FastARLoadTar": ["checkpoint", "dtype"],
    "FastARLoadTarDetokenizer": ["checkpoint", "ta_tok", "decoder", "dtype", "grid"],
    "FastARTarPrompt": ["text", "seed", "detail", "images", "temperature", "top_p", "top_k", "repetition_penalty"],
    "FastARImageToCodes": ["ta_tok", "detail", "images", "dtype"],
    "FastARTextPrompt": ["text", "encoder", "images", "dtype"],
    "FastARClassLabel": ["labels", "label_set", "images_per_label", "add_label"],
    "FastARMARSampler": [*MAR_MAIN, *MAR_MORE, "diffusion_steps_end", "diffusion_steps_curve", "speculation"],
    "FastARFastHybrid": [
        *MAR_MAIN,
        "lookahead",
        "threshold",
        "guided_steps",
        *MAR_MORE,
        "guidance_schedule",
        "guidance_space",
        "similarity",
        "accepted",
        "verify",
        "preset",
    ],
    "FastARLazyMAR": [*MAR_MAIN, *LAZY_MAIN, *MAR_MORE, *LAZY_MORE, "preset"],
    "FastARLazyMARCache": [*LAZY_MAIN, *LAZY_MORE, "preset", "preset_for"],
    "FastARCSpD": [
        *MAR_MAIN,
        "draft_length",
        "prefill_ratio",
        "mode",
        *MAR_MORE,
        "inner_temperature",
        "alignment",
        "speculation",
        "preset",
    ],
    "FastARLlamaGenSampler": [*TOKENS_MAIN, *TOKENS_MORE],
    "FastARPAR": [*TOKENS_MAIN, "grouping", *TOKENS_MORE, "sequential_start", "group"],
    "FastARZipAR": [*TOKENS_MAIN, "window", *TOKENS_MORE, "mask_undecoded", "preset"],
    "FastARMuLoSD": [
        *TOKENS_MAIN,
        "tau",
        "expansion",
        *TOKENS_MORE,
        "acceptance_target",
        "neighbours",
        "draft_rows",
        "draft_window",
        "resample_window",
        "resample_order",
        "up_sampler",
        "repair",
        "preset",
    ],
    "FastARCompare": ["labels", "columns", "baseline"],
    "FastARTokenMap": ["what", "opacity"],
    "FastARReport": ["format"],
}
EDIT = ["latent", "mask"]
SAMPLED = ["latent", "report"]
SOCKETS = {
    "FastARLoadMAR": ([], ["model", "vae"]),
    "FastARLoadLlamaGen": ([], ["model", "vae"]),
    "FastARLoadTar": ([], ["tar"]),
    "FastARLoadTarDetokenizer": ([], ["model", "vae"]),
    "FastARTarPrompt": (["tar"], ["condition"]),
    "FastARImageToCodes": (["image"], ["condition"]),
    "FastARTextPrompt": ([], ["condition"]),
    "FastARClassLabel": ([], ["condition"]),
    "FastARMARSampler": (["model", "condition", "cache", *EDIT], SAMPLED),
    "FastARFastHybrid": (["model", "condition", "cache", *EDIT], SAMPLED),
    "FastARLazyMAR": (["model", "condition", *EDIT], SAMPLED),
    "FastARLazyMARCache": ([], ["cache"]),
    "FastARCSpD": (["draft", "target", "condition", "cache", *EDIT], SAMPLED),
    "FastARLlamaGenSampler": (["model", "condition"], SAMPLED),
    "FastARPAR": (["model", "condition"], SAMPLED),
    "FastARZipAR": (["model", "condition"], SAMPLED),
    "FastARMuLoSD": (["target", "draft", "condition", "upscale_model"], SAMPLED),
    "FastARCompare": ([f"{kind}_{i}" for i in range(1, 9) for kind in ("image", "report")], ["image", "table"]),
    "FastARTokenMap": (["report", "image"], ["image"]),
    "FastARReport": (["report"], ["text"]),
}
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
}
# Every class that contributes fields to the settings of a node.
BASES = {cls for settings in SETTINGS.values() for cls in settings.__mro__ if "__dataclass_fields__" in vars(cls)}
# What a graph may leave unconnected.
OPTIONAL = (
    {("FastARCompare", name) for name in SOCKETS["FastARCompare"][0] if name != "image_1"}
    | {(node, name) for node in SOCKETS for name in ("cache", *EDIT, "upscale_model")}
    | {("FastARTokenMap", "image")}
)


def test_every_node_is_listed_here():
    for name, table in (("ORDER", ORDER), ("SOCKETS", SOCKETS)):
        missing, unknown = sorted(set(NODES) - set(table)), sorted(set(table) - set(NODES))
        assert not missing, f"add {', '.join(missing)} to {name} in this file, and a node with settings to SETTINGS"
        assert not unknown, (
            f"{name} in this file lists {', '.join(unknown)}, which is not in NODES of any module of nodes/"
        )


def socket_names(about) -> list[str]:
    return [i.id for i in about.inputs if i.kind not in WIDGETS]


def widget_names(about) -> list[str]:
    return [i.id for i in about.inputs if i.kind in WIDGETS]


@pytest.mark.parametrize("node", ORDER)
def test_widgets_keep_their_places(node):
    assert widget_names(NODES[node])[: len(ORDER[node])] == ORDER[node], (
        "saved graphs keep values by position; nodes/layout.py holds the order"
    )


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


@pytest.mark.parametrize("node", SOCKETS)
def test_sockets_keep_their_places(node):
    inputs, outputs = SOCKETS[node]
    own = [i for i in NODES[node].inputs if i.kind not in WIDGETS]
    assert [i.id for i in own] == inputs
    assert [o.id for o in NODES[node].outputs] == outputs
    assert {i.id for i in own if i.about.get("optional")} == {name for name in inputs if (node, name) in OPTIONAL}


@pytest.mark.parametrize("node", NODES)
def test_everything_has_a_tooltip_and_a_help_page(root, node):
    for part in [*NODES[node].inputs, *NODES[node].outputs]:
        assert part.about.get("tooltip"), f"{node}.{part.id}"
    page, title = root / "web" / "docs" / f"{node}.md", f"# {NODES[node].display_name}"
    assert page.is_file(), f"add the help page web/docs/{node}.md"
    assert page.read_text(encoding="utf-8").startswith(f"{title}\n"), f"{page.name}: the first line is '{title}'"


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


def test_an_older_comfyui_gets_no_argument_it_does_not_know(monkeypatch):
    from dataclasses import dataclass

    from fastar_nodes.nodes import schema

    @dataclass
    class Older:
        node_id: str

    monkeypatch.setattr(schema.io, "Schema", Older)
    assert schema.schema(node_id="x", search_aliases=["y"]) == Older("x")
