"""Reports in saved files, whoever sends the prompt, and also if the sampler did not run again."""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_comfy import state
from fastar_nodes.nodes import compare, metadata, samplers
from fastar_nodes.reports.exchange import KEY
from tiny import a_report

OUTPUTS = {"SaveImage": True, "FastARTimeLapse": True, "VAEDecode": False}


@pytest.fixture(autouse=True)
def comfyui(monkeypatch):
    """The output nodes that ComfyUI knows, nothing written so far, an empty queue."""
    table = {kind: type(kind, (), {"OUTPUT_NODE": ends}) for kind, ends in OUTPUTS.items()}
    monkeypatch.setitem(sys.modules, "nodes", SimpleNamespace(NODE_CLASS_MAPPINGS=table))
    monkeypatch.setattr(metadata, "_written", [])
    monkeypatch.setattr(state, "waiting", [])


def a_graph(prefix: str = "a", **sampler: Any) -> dict[str, Any]:
    """Loader 1, sampler 3, decoder 4, Save Image 5."""
    return {
        "1": {"class_type": "FastARLoadMAR", "inputs": {"checkpoint": "demo"}},
        "3": {"class_type": "FastARMARSampler", "inputs": {"model": ["1", 0], "seed": 7, "cfg": 3, **sampler}},
        "4": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["1", 1]}},
        "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": prefix}},
    }


def with_comparison(prefix: str = "a") -> dict[str, Any]:
    """A second sampler 6 with decoder 7, and Compare 8 in front of Save Image."""
    graph = a_graph(prefix)
    graph["6"] = {"class_type": "FastARFastHybridSampler", "inputs": {"model": ["1", 0], "seed": 7}}
    graph["7"] = {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 1]}}
    compared = {"image_1": ["4", 0], "report_1": ["3", 1], "image_2": ["7", 0], "report_2": ["6", 1]}
    graph["8"] = {"class_type": "FastARCompare", "inputs": compared}
    graph["5"]["inputs"]["images"] = ["8", 0]
    return graph


def sent(graph: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The request of a client after the server has taken it."""
    request = {"prompt": copy.deepcopy(graph), **more}
    metadata.prepare(request)
    return request


def place(request: dict[str, Any]) -> Any:
    return request["extra_data"]["extra_pnginfo"]


def ran(request: dict[str, Any], number: str, monkeypatch: Any, seconds: float = 1.0, run: str = "first") -> None:
    """A sampler of the prompt runs and writes its report."""
    monkeypatch.setattr(state, "context", SimpleNamespace(prompt_id=run, node_id=number))
    hidden = SimpleNamespace(unique_id=number, prompt=request["prompt"], extra_pnginfo=place(request))
    node = type("Executed", (samplers.MARSampler,), {"hidden": hidden})
    metadata.write_reports(node, [a_report("mar", seconds)])


def runs(request: dict[str, Any]) -> list[tuple[str, float]]:
    """Node and seconds of each run that an image of the prompt would hold."""
    return [(run["node"], run["seconds"]) for run in place(request).get(KEY, {"runs": []})["runs"]]


@pytest.mark.parametrize(
    "more", [{}, {"extra_data": {}}, {"extra_data": {"extra_pnginfo": None}}, {"extra_data": {"extra_pnginfo": {}}}]
)
def test_a_client_that_is_not_the_editor_gets_the_report(more, monkeypatch):
    request = sent(a_graph(), **copy.deepcopy(more))
    ran(request, "3", monkeypatch)
    assert runs(request) == [("3", 1.0)]


def test_a_sampler_whose_result_is_reused_is_in_the_next_image(monkeypatch):
    ran(sent(a_graph("a")), "3", monkeypatch)
    assert runs(sent(a_graph("b"))) == [("3", 1.0)]
    assert runs(sent(a_graph("b", cfg=3.0))) == [("3", 1.0)], "the editor sends 3.0 as 3"

    editor = sent(a_graph("b"), extra_data={"extra_pnginfo": {"workflow": {"nodes": []}}})
    assert runs(editor) == [("3", 1.0)] and place(editor)["workflow"] == {"nodes": []}


def test_a_sampler_with_other_inputs_is_not(monkeypatch):
    ran(sent(a_graph()), "3", monkeypatch)
    other_model = a_graph()
    other_model["1"]["inputs"]["checkpoint"] = "mar-base"
    assert runs(sent(a_graph(seed=8))) == runs(sent(other_model)) == []


def test_a_prompt_that_waits_while_the_sampler_runs_gets_its_report(monkeypatch):
    first, second, other = sent(a_graph("a")), sent(a_graph("b")), sent(a_graph(seed=8))
    waiting = [(0, str(k), one["prompt"], one["extra_data"], ["5"], {}) for k, one in enumerate((second, other))]
    monkeypatch.setattr(state, "waiting", waiting)
    ran(first, "3", monkeypatch)
    assert runs(second) == [("3", 1.0)] and runs(other) == []


def test_a_sampler_that_runs_again_replaces_what_was_known(monkeypatch):
    """ComfyUI may have dropped its result, and does not say so before the run."""
    ran(sent(a_graph()), "3", monkeypatch, 1.0, "first")
    again = sent(a_graph())
    ran(again, "3", monkeypatch, 2.0, "second")
    assert runs(again) == [("3", 2.0)] == runs(sent(a_graph()))


def test_a_sampler_that_runs_for_each_value_of_a_list_writes_every_run(monkeypatch):
    request = sent(a_graph())
    for seconds in (1.0, 2.0):
        ran(request, "3", monkeypatch, seconds)
    assert runs(request) == [("3", 1.0), ("3", 2.0)] == runs(sent(a_graph()))


def test_a_comparison_that_is_reused_keeps_labels_and_figures(monkeypatch):
    first = sent(with_comparison())
    for number in ("3", "6"):
        ran(first, number, monkeypatch, float(number))
    hidden = SimpleNamespace(unique_id="8", prompt=first["prompt"], extra_pnginfo=place(first))
    node = type("Executed", (compare.Compare,), {"hidden": hidden})
    metadata.write_reports(node, [a_report("mar", 3.0), a_report("mar", 6.0)], ["A", "B"], [0, 0], (), "what it means")

    again = sent(with_comparison("b"))
    assert place(again) == place(first) and runs(again) == [("8", 3.0), ("8", 6.0)]
    assert [run["label"] for run in place(again)[KEY]["runs"]] == ["A", "B"]
    assert place(again)[KEY]["explained"] == "what it means"


def test_only_nodes_that_run_are_told_of(monkeypatch):
    first = sent(with_comparison())
    for number in ("3", "6"):
        ran(first, number, monkeypatch, float(number))

    # 1. The editor sends nodes that no output node needs, too.
    unconnected = with_comparison("b")
    unconnected["5"]["inputs"]["images"] = ["4", 0]
    assert runs(sent(unconnected)) == [("3", 3.0)]

    # 2. The other side of a switch.
    switched = with_comparison("b")
    switched["9"] = {"class_type": "ComfySwitchNode", "inputs": {}}
    switched["9"]["inputs"] = {"switch": True, "on_true": ["7", 0], "on_false": ["4", 0]}
    switched["5"]["inputs"]["images"] = ["9", 0]
    assert runs(sent(switched)) == [("6", 6.0)]

    # 3. The outputs that the client names.
    two = with_comparison("b")
    two["10"] = {"class_type": "SaveImage", "inputs": {"images": ["4", 0]}}
    assert runs(sent(two, partial_execution_targets=["10"])) == [("3", 3.0)]


def test_few_results_are_remembered(monkeypatch):
    for seed in range(metadata.MOST_REMEMBERED + 1):
        ran(sent(a_graph(seed=seed)), "3", monkeypatch)
    assert runs(sent(a_graph(seed=0))) == [] and runs(sent(a_graph(seed=1))) == [("3", 1.0)]


def test_prompts_of_others_are_left_alone():
    theirs = {
        "1": {"class_type": "KSampler", "inputs": {}},
        "5": {"class_type": "SaveImage", "inputs": {"x": ["1", 0]}},
    }
    ours_unused = {**theirs, "3": a_graph()["3"]}
    for graph in (theirs, ours_unused):
        assert "extra_data" not in sent(graph)


LOOP = {"3": {"class_type": "FastARMARSampler", "inputs": {"model": ["5", 0]}}}
LOOP["5"] = {"class_type": "SaveImage", "inputs": {"images": ["3", 0]}}


@pytest.mark.parametrize(
    "request_",
    [
        None,
        [],
        {},
        {"prompt": 3},
        {"prompt": {"3": None, "5": {"class_type": ["x"], "inputs": 3}}},
        {"prompt": LOOP},
        {"prompt": a_graph(), "extra_data": None},
        {"prompt": a_graph(), "extra_data": {"extra_pnginfo": [1]}},
        {"prompt": a_graph(), "extra_data": {"extra_pnginfo": {KEY: "x"}}},
        {"prompt": a_graph(), "partial_execution_targets": [{}]},
    ],
)
def test_requests_of_any_shape_are_taken(request_, monkeypatch):
    """What is no graph stays as it was sent, and a graph keeps its nodes."""
    ran(sent(a_graph()), "3", monkeypatch)
    request = copy.deepcopy(request_)
    metadata.prepare(request)
    if isinstance(request_, dict) and isinstance(request_.get("prompt"), dict):
        assert request["prompt"] == request_["prompt"]
    else:
        assert request == request_
