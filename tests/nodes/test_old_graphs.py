"""Every workflow ever shipped opens, runs, and samples with the settings that it was saved with.

``tests/workflows/N`` holds the workflows of the Nth state that was shipped, as they were. They are not edited; a new state is added as
a new folder, and ``settings.json`` beside it records what the samplers of the new graphs run with.
"""

from __future__ import annotations

import json

import pytest
import torch
from fake_comfy import Preview
from fastar_nodes.nodes import comparison, conditioning, host, hybrid, loaders, mar_samplers, previous, token_samplers
from graphs import SHIPPED, VIRTUAL, WIDGETS, Core, Run, load, widget_values

MODULES = (loaders, conditioning, hybrid, mar_samplers, token_samplers, comparison, previous)
CLASSES = {node.define_schema().node_id: node for module in MODULES for node in module.NODES}
SCHEMAS = {name: node.define_schema() for name, node in CLASSES.items()}
GRAPHS = sorted(SHIPPED.glob("*/*.json"))
# Graph to node number to what its sampler ran with, except the steps, which the test lowers.
SETTINGS = json.loads((SHIPPED / "settings.json").read_text(encoding="utf-8"))
STEPS = {"ar_steps": 4, "diffusion_steps": 6, "diffusion_steps_end": 0}


def name_of(path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(scope="module")
def run():
    return Run(CLASSES, STEPS)


@pytest.mark.parametrize("path", GRAPHS, ids=name_of)
def test_it_opens(path):
    graph = load(path)
    nodes = {node["id"]: node for node in graph["nodes"]}
    for node in nodes.values():
        if node["type"] in VIRTUAL:
            continue
        assert node["type"] in SCHEMAS or hasattr(Core, node["type"]), node["type"]
        if node["type"] not in SCHEMAS:
            continue
        about = SCHEMAS[node["type"]]
        inputs = {i.id: i for i in about.inputs}
        for name, value in widget_values(node, about).items():
            widget = inputs[name]
            if widget.kind == "COMBO":
                assert value in widget.about["options"], (node["type"], name, value)
            if widget.kind in ("INT", "FLOAT"):
                assert widget.about["min"] <= value <= widget.about["max"], (node["type"], name, value)
        linked = {i["name"] for i in node["inputs"] if i["link"] is not None}
        assert linked <= set(inputs)
        assert {i.id for i in about.inputs if i.kind not in WIDGETS and not i.optional} <= linked
    for _, source, slot, target, into, _ in graph["links"]:
        if nodes[source]["type"] in SCHEMAS and nodes[target]["type"] in SCHEMAS:
            wanted = next(
                i for i in SCHEMAS[nodes[target]["type"]].inputs if i.id == nodes[target]["inputs"][into]["name"]
            )
            assert SCHEMAS[nodes[source]["type"]].outputs[slot].kind in wanted.kind.split(",")


@pytest.mark.parametrize("path", GRAPHS, ids=name_of)
def test_it_runs_with_the_settings_it_was_saved_with(path, run, monkeypatch):
    monkeypatch.setattr(host.args, "preview_method", Preview.NoPreviews)
    with torch.inference_mode():  # as ComfyUI runs nodes
        outputs = run.graph(load(path))
    wanted, found = SETTINGS[name_of(path)], {}
    for number, out in outputs.items():
        if len(out) == 2 and hasattr(out[1], "settings"):
            assert out[0]["samples"].isfinite().all()
            settings = {k: v for k, v in out[1].settings.items() if k not in STEPS}
            found[str(number)] = {"sampler": out[1].sampler, "settings": settings}
    assert found == wanted


def test_every_graph_has_recorded_settings():
    assert {name_of(path) for path in GRAPHS} == set(SETTINGS)
