"""A node that gets another id after a release: one line of nodes/renamed.py, tried with an invented rename."""

import asyncio
from types import SimpleNamespace

import comfy_api.v0_0_2 as comfy_api
import pytest
from fastar_nodes.nodes import renamed, samplers

OLD, NEW = "FastARPlainSampler", "FastARMARSampler"


@pytest.fixture(autouse=True)
def rename(monkeypatch):
    monkeypatch.setitem(renamed.RENAMED, OLD, NEW)


def test_a_prompt_runs_with_the_new_node():
    prompt = {"1": {"class_type": OLD, "inputs": {"seed": 1}}, "2": {"class_type": "KSampler", "inputs": {}}, "3": None}
    renamed.convert({"prompt": prompt})
    assert prompt["1"] == {"class_type": NEW, "inputs": {"seed": 1}} and prompt["2"]["class_type"] == "KSampler"
    for odd in (None, [], {}, {"prompt": 3}):
        renamed.convert(odd)


def test_comfyui_is_told_of_all_inputs_and_outputs(monkeypatch):
    told = []

    async def register(replacement):
        told.append(replacement)

    api = SimpleNamespace(node_replacement=SimpleNamespace(register=register))
    monkeypatch.setattr(comfy_api, "ComfyAPI", lambda: api, raising=False)
    monkeypatch.setattr(comfy_api.io, "NodeReplace", lambda **about: about, raising=False)
    monkeypatch.setattr(comfy_api.io, "WidgetInput", type(samplers.seed_widget()), raising=False)
    asyncio.run(renamed.register([samplers.MARSampler, samplers.LazyMARCache]))

    (found,) = told
    schema = samplers.MARSampler.define_schema()
    assert (found["old_node_id"], found["new_node_id"]) == (OLD, NEW)
    assert [one["old_id"] for one in found["input_mapping"]] == [one.id for one in schema.inputs]
    assert len(found["output_mapping"]) == len(schema.outputs)
    seed = found["old_widget_ids"].index("seed")
    assert found["old_widget_ids"][seed + 1] == "control_after_generate"
