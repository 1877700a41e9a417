"""What the nodes declare. Saved graphs depend on it: widgets by position, sockets by name."""

from __future__ import annotations

import re

import pytest
from fastar_nodes.nodes import comparison, conditioning, loaders, mar_samplers, token_samplers
from fastar_nodes.samplers.mar.settings import (
    CacheSettings,
    CSpDSettings,
    FastHybridSettings,
    LazyMARSettings,
    PlainMARSettings,
)
from fastar_nodes.samplers.settings import knobs
from fastar_nodes.samplers.tokens.settings import (
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TarPromptSettings,
    ZipARSettings,
)

NODES = {
    schema.node_id: schema
    for module in (loaders, conditioning, mar_samplers, token_samplers, comparison)
    for schema in (node.define_schema() for node in module.NODES)
}
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
MAR_MAIN, MAR_MORE = ["seed", "ar_steps", "diffusion_steps", "cfg"], ["cfg_schedule", "temperature", "order", "t_max"]
LAZY_MAIN = ["refresh_period", "start_step", "computed_ratio"]
LAZY_MORE = ["strategy", "condition_cache", "token_cache", "head_cache", "encoder_cache", "block", "head_period"]
TOKENS_MAIN, TOKENS_MORE = ["seed", "cfg", "temperature", "top_k"], ["top_p", "cfg_interval"]
# Append only. A new main setting of a sampler goes behind its advanced ones here and on the node.
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
    "FastARMARSampler": PlainMARSettings,
    "FastARFastHybrid": FastHybridSettings,
    "FastARLazyMAR": LazyMARSettings,
    "FastARLazyMARCache": CacheSettings,
    "FastARCSpD": CSpDSettings,
    "FastARLlamaGenSampler": LlamaGenSettings,
    "FastARPAR": PARSettings,
    "FastARZipAR": ZipARSettings,
    "FastARTarPrompt": TarPromptSettings,
    "FastARMuLoSD": MuLoSDSettings,
}
# What a graph may leave unconnected.
OPTIONAL = (
    {("FastARCompare", name) for name in SOCKETS["FastARCompare"][0] if name != "image_1"}
    | {(node, name) for node in SOCKETS for name in ("cache", *EDIT, "upscale_model")}
    | {("FastARTokenMap", "image")}
)


def test_every_node_is_listed_here():
    assert set(NODES) == set(ORDER) == set(SOCKETS)


@pytest.mark.parametrize("node", ORDER)
def test_widgets_keep_their_places(node):
    names = [i.id for i in NODES[node].inputs if i.kind in WIDGETS]
    assert names[: len(ORDER[node])] == ORDER[node], "saved graphs keep values by position: only append"


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
    assert (
        (root / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8").startswith(f"# {NODES[node].display_name}\n")
    )


@pytest.mark.parametrize("node", NODES)
def test_help_pages_explain_every_input(root, node):
    page = (root / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    for part in NODES[node].inputs:
        name = re.sub(r"_[1-8]$", "", part.id) if node == "FastARCompare" else part.id
        assert f"**{name}" in page, f"{node}: the help page does not explain {part.id}"


@pytest.mark.parametrize("node", SETTINGS)
def test_widgets_say_what_the_settings_say(node):
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
