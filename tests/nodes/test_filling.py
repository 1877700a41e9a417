"""What presets fill in: numbers for the model behind a loader, read from its file's header or its catalogue entry."""

import json
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import filling
from fastar_nodes.nodes.sent import FREE
from fastar_nodes.samplers.mar.settings import MARSettings
from flat_graphs import flat
from graphs import WIDGETS, widget_values
from test_schemas import NODES

ROOT = Path(__file__).resolve().parents[2]


def loader(checkpoint, kind="FastARLoadMAR", **inputs):
    return {"class_type": kind, "inputs": {"checkpoint": checkpoint, **inputs}}


LLAMAGEN, TAR, HARMON = "FastARLoadLlamaGen", "FastARLoadTarDetokenizer", "FastARLoadHarmon"


@pytest.mark.parametrize(
    ("node", "preset", "model", "wanted", "words"),
    [
        # The demo's file recommends 32 AR steps, 50 diffusion steps and cfg 2, and starts at 950.
        (
            "FastARFastHybridSampler",
            "balanced",
            loader("demo"),
            {
                "steps": 32,
                "diffusion_steps": 50,
                "cfg": 2.0,
                "t_max": 950,
                "diffusion_steps_end": 50,
                "lookahead": 8,
            },
            "demo MAR",
        ),
        # Twice FastHybrid's k for MAR-B and MAR-H, 7 and 9.
        ("FastARFastHybridSampler", "fast", loader("mar-base"), {"lookahead": 14, "steps": 64, "t_max": 999}, ""),
        ("FastARFastHybridSampler", "fast", loader("mar-huge"), {"lookahead": 18, "diffusion_steps_end": 100}, ""),
        # 5 of 25 diffusion steps at the end start at 950.
        ("FastARLazyMARSampler", "fast", loader("mar-base"), {"diffusion_steps_end": 10, "t_max": 950}, ""),
        (
            "FastARMARSampler",
            "few steps",
            loader("mar-base"),
            {"steps": 24, "diffusion_steps": 50, "diffusion_steps_end": 10, "order": "halton", "t_max": 950},
            "",
        ),
        ("FastARMARSampler", "recommended", loader("unipic-1.5b", HARMON), {"steps": 32, "cfg": 3.0}, ""),
        # Published guidance: 4 for classes with top-k 2000, 7.5 for text with 1000, 1.435 of PAR-XXL-4x with all.
        ("FastARZipARSampler", "fast", loader("llamagen-l-384", LLAMAGEN), {"cfg": 4.0, "cfg_interval": 576}, ""),
        (
            "FastARLlamaGenSampler",
            "recommended",
            loader("llamagen-t2i-xl-512", LLAMAGEN),
            {"cfg": 7.5, "top_k": 1000},
            "",
        ),
        ("FastARPARSampler", "recommended", loader("par-xxl-4x", LLAMAGEN), {"cfg": 1.435, "top_k": 0}, ""),
        # 16 x 16 tokens; LANTERN's 1000 of 16384 codes are 31 of 512.
        (
            "FastARMuLoSDSampler",
            "balanced",
            loader("demo-dtok", TAR),
            {"cfg_interval": 256, "draft_parallel": 0, "draft_rows": 4, "expansion": 1, "neighbours": 31, "tau": 0.1},
            "demo Tar de-tokenizer",
        ),
        ("FastARLazyMARCache", "balanced", loader("mar-base"), {"refresh_period": 9, "start_step": 5}, ""),
        (
            "FastARTarPrompt",
            "recommended",
            loader("demo-tar", "FastARLoadTar"),
            {"repetition_penalty": 1.0},
            "demo Tar",
        ),
        ("FastARFastHybridSampler", "balanced", None, {"lookahead": 8, "t_max": 999}, "full-size model"),
    ],
)
def test_numbers_are_for_the_model(node, preset, model, wanted, words):
    found = filling.fill(node, preset, model)
    assert {name: found["values"][name] for name in wanted} == wanted
    assert found["model"] == words or (not words and found["model"].startswith("full-size "))
    assert None not in found["values"].values() and not {*FREE} & {*found["values"]}


def test_a_cache_is_for_the_steps_of_its_sampler():
    """LazyMAR's own values for 32 AR steps."""
    found = filling.fill("FastARLazyMARCache", "balanced", loader("mar-base"), 32)["values"]
    assert (found["refresh_period"], found["start_step"]) == (5, 4)


@pytest.mark.parametrize(
    ("entry", "steps", "wanted"),
    [
        ("harmon-1.5b", 99, {"t_max": 950}),
        ("harmon-1.5b", 100, {"t_max": 999}),
        ("unipic-1.5b", 99, {"t_max": 999}),
        ("mar-base", 99, {"t_max": 999}),
    ],
)
def test_a_harmon_that_is_not_here_starts_where_it_will_start(entry, steps, wanted):
    """With fewer than 100 diffusion steps at 950, because its diffusion is MAR's; UniPic's ends at a lower beta."""
    model, _ = filling.model_of(loader(entry, "FastARLoadMAR" if entry == "mar-base" else HARMON))
    own = model.own_values(MARSettings(diffusion_steps=steps))
    assert {name: own[name] for name in wanted} == wanted


def test_custom_fills_in_nothing():
    assert filling.fill("FastARMARSampler", "custom", loader("demo")) == {"values": {}, "model": "demo MAR"}


@pytest.mark.parametrize("node", filling._kinds())
def test_a_new_node_shows_its_first_preset_for_a_full_size_model(node):
    shown = {i.id: i.about["default"] for i in NODES[node].inputs if i.kind in WIDGETS}
    numbers = filling.fill(node, shown["preset"])["values"]
    assert {name: shown[name] for name in numbers} == numbers


GRAPHS = sorted([*ROOT.glob("workflows/*.json"), *ROOT.glob("subgraphs/*.json")])


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_shared_graphs_show_the_numbers_of_their_presets(path):
    """A named preset holds its numbers: a run would otherwise begin with a warning. Also with the loader outside of a
    sub-graph.
    """
    graph = flat(json.loads(path.read_text(encoding="utf-8")))
    nodes = {node["id"]: node for node in graph["nodes"]}
    sources = {link[0]: nodes[link[1]] for link in graph["links"]}

    for node in nodes.values():
        sockets = {i["name"]: sources[i["link"]] for i in node["inputs"] if i["link"] is not None}
        model = next((sockets[name] for name in ("model", "target", "tar") if name in sockets), None)
        if node["type"] not in filling._kinds() or model is None:
            continue
        values = widget_values(node, NODES[node["type"]])
        loaded = {"class_type": model["type"], "inputs": widget_values(model, NODES[model["type"]])}
        numbers = filling.fill(node["type"], values["preset"], loaded)["values"]
        assert {name: values[name] for name in numbers} == numbers, node["type"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ((5, "fast"), "node: it got the number 5, which is not the type of a node with a preset"),
        (("FastARMARSampler", "fast"), "preset: it got the text 'fast'; choose one of recommended, few steps, custom"),
        (("FastARMARSampler", "recommended", 5), "loader: this is not a loader"),
        (
            ("FastARMARSampler", "recommended", loader("../secret.safetensors")),
            "checkpoint: '../secret.safetensors' is not",
        ),
        (("FastARMARSampler", "recommended", loader("demo", "SaveImage")), "loader: this is not a loader"),
    ],
)
def test_a_mistake_is_a_sentence(question, said):
    with pytest.raises(UserError, match=f"^{said}"):
        filling.fill(*question)


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff", b"{" * 100, b'{"node": null}'])
def test_a_request_is_answered_whatever_it_holds(body):
    status, content = filling.answer(body)
    assert status == 400 and 0 < len(content["error"]) < 400


def test_the_editor_leaves_alone_what_presets_leave_alone():
    script = (ROOT / "web" / "js" / "presets.js").read_text(encoding="utf-8")
    listed = script.partition("const FREE = [")[2].partition("]")[0]
    assert {*json.loads(f"[{listed}]")} == {*FREE, "enabled", "seed", "preset", "images", "first_image"}
