"""What the nodes declare. Saved graphs depend on it: widgets by position, sockets by name."""

from __future__ import annotations

import pytest
from fastar_nodes.nodes import comparison, conditioning, loaders, mar_samplers
from fastar_nodes.samplers.settings import FastHybridSettings, MARSettings, knobs

NODES = {
    schema.node_id: schema
    for module in (loaders, conditioning, mar_samplers, comparison)
    for schema in (node.define_schema() for node in module.NODES)
}
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
MAR_MAIN, MAR_MORE = ["seed", "ar_steps", "diffusion_steps", "cfg"], ["cfg_schedule", "temperature", "order", "t_max"]
# Append only. A new main setting of a sampler goes behind its advanced ones here and on the node.
ORDER = {
    "FastARLoadMAR": ["checkpoint", "decoder", "dtype"],
    "FastARClassLabel": ["labels", "label_set", "images_per_label", "add_label"],
    "FastARMARSampler": [*MAR_MAIN, *MAR_MORE],
    "FastARFastHybrid": [
        *MAR_MAIN, "lookahead", "threshold", "guided_steps", *MAR_MORE, "guidance_schedule", "guidance_space", "similarity",
        "accepted", "verify",
    ],
    "FastARCompare": ["labels", "columns", "baseline"],
    "FastARTokenMap": ["what", "opacity"],
    "FastARReport": ["format"],
}  # fmt: skip
SOCKETS = {
    "FastARLoadMAR": ([], ["model", "vae"]),
    "FastARClassLabel": ([], ["condition"]),
    "FastARMARSampler": (["model", "condition"], ["latent", "report"]),
    "FastARFastHybrid": (["model", "condition"], ["latent", "report"]),
    "FastARCompare": ([f"{kind}_{i}" for i in range(1, 9) for kind in ("image", "report")], ["image", "table"]),
    "FastARTokenMap": (["report", "image"], ["image"]),
    "FastARReport": (["report"], ["text"]),
}


def test_every_node_is_listed_here():
    assert set(NODES) == set(ORDER) == set(SOCKETS)


@pytest.mark.parametrize("node", ORDER)
def test_widgets_keep_their_places(node):
    names = [i.id for i in NODES[node].inputs if i.kind in WIDGETS]
    assert names[: len(ORDER[node])] == ORDER[node], "saved graphs keep values by position: only append"


@pytest.mark.parametrize("node", SOCKETS)
def test_sockets_keep_their_places(node):
    inputs, outputs = SOCKETS[node]
    assert [i.id for i in NODES[node].inputs if i.kind not in WIDGETS] == inputs
    assert [o.id for o in NODES[node].outputs] == outputs


@pytest.mark.parametrize("node", NODES)
def test_everything_has_a_tooltip_and_a_help_page(root, node):
    for part in [*NODES[node].inputs, *NODES[node].outputs]:
        assert part.about.get("tooltip"), f"{node}.{part.id}"
    assert (root / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8").startswith(f"# {NODES[node].display_name}\n")


@pytest.mark.parametrize("node, settings", [("FastARMARSampler", MARSettings), ("FastARFastHybrid", FastHybridSettings)])
def test_widgets_say_what_the_settings_say(node, settings):
    inputs = {i.id: i for i in NODES[node].inputs}
    for name, (default, about) in knobs(settings).items():
        widget = inputs[name]
        assert widget.about["default"] == default and widget.about["tooltip"] == about.tooltip
        assert bool(widget.about["advanced"]) == about.advanced
        if about.choices:
            assert widget.kind == "COMBO" and widget.about["options"] == list(about.choices)
        else:
            assert widget.kind == ("INT" if isinstance(default, int) else "FLOAT")
            assert (widget.about["min"], widget.about["max"], widget.about["step"]) == (about.low, about.high, about.step)


def test_an_older_comfyui_gets_no_argument_it_does_not_know(monkeypatch):
    from dataclasses import dataclass

    from fastar_nodes.nodes import schema

    @dataclass
    class Older:
        node_id: str

    monkeypatch.setattr(schema.io, "Schema", Older)
    assert schema.schema(node_id="x", search_aliases=["y"]) == Older("x")
