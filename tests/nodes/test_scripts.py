"""Nodes called by a script, as programs write it from a graph; all templates in ComfyUI are in tests/comfyui."""

import asyncio

import pytest
import torch
from fake_comfy import state
from fastar_nodes.nodes import _let_scripts_call, compare, host, make_extension, samplers
from tiny import a_report, sample

HIDDEN = {"unique_id": 7, "prompt": {"3": {}}, "extra_pnginfo": None}


def test_hidden_inputs_are_not_taken_for_settings():
    class Node:
        @classmethod
        def execute(cls, model, **settings):
            return cls, model, settings

    _let_scripts_call(Node, "/comfy/custom_nodes/fastar-nodes")
    assert Node.execute(model=1, steps=2, **HIDDEN) == (Node, 1, {"steps": 2})
    assert Node.__module__ == "/comfy/custom_nodes/fastar-nodes"


@pytest.fixture
def registered(monkeypatch):
    """The nodes as ComfyUI has them, by type."""
    monkeypatch.setitem(host.folders.folder_paths.folder_names_and_paths, "fastar", ([], set()))
    nodes = asyncio.run(make_extension().get_node_list())
    return {node.define_schema().node_id: node for node in nodes}


def test_every_node_takes_its_hidden_inputs(registered):
    """It says what is missing, or that a value is wrong, and nothing of a hidden input."""
    for kind, node in registered.items():
        try:
            node.execute(**HIDDEN)
        except Exception as problem:
            assert not any(name in str(problem) for name in HIDDEN), f"{kind}: {problem}"


def test_compare_takes_plain_values():
    images, reports = [torch.rand(1, 8, 8, 3), torch.rand(1, 8, 8, 3)], [a_report("mar", 4.0), a_report("mar", 2.0)]
    plain = {"image_1": images[0], "report_1": reports[0], "image_2": images[1], "report_2": reports[1]}
    plain |= {"labels": "one\ntwo", "columns": 1, "baseline": 2, "differences": True}
    listed = {name: [value] for name, value in plain.items()}

    from_script, from_comfyui = compare.Compare.execute(**plain), compare.Compare.execute(**listed)
    assert torch.equal(from_script.result[0], from_comfyui.result[0])
    assert from_script.result[1] == from_comfyui.result[1]
    assert "one" in from_script.result[1] and "0.50x" in from_script.result[1]


@pytest.mark.parametrize("server", ["none", "without a run"])
def test_samplers_run_without_a_server(server, monkeypatch):
    if server == "none":
        monkeypatch.delattr(host.queue.PromptServer, "instance")
    monkeypatch.setattr(state, "context", None)
    samples, report = sample(samplers.MARSampler)
    assert samples.shape[0] == 2 and report.prompt == "" and host.queue.previews_wanted()
    assert host.queue.running_inputs() == {} and host.queue.waiting_prompts() == []
