"""A condition has a socket type a kind: one that no model of a sampler reads is refused by editor and server.

Graphs that were saved when all conditions had one type open and run.
"""

import json
from typing import Any

import pytest
from comfy_host import ROOT, Comfy, Rejected, defaults, load_workflow
from sampler_nodes import SAMPLER_NODES, SCHEMAS, conditions_of
from test_browser import _no_complaint, _run, browser, editor  # noqa: F401  fixtures

# ruff: noqa: F811

MAKERS = {
    "FastARClassLabel": "FASTAR_LABELS",
    "FastARPrompt": "FASTAR_PROMPT",
    "FastARLlamaGenPrompt": "FASTAR_TEXT",
    "FastARTarPrompt": "FASTAR_CODES",
    "FastARImageToCodes": "FASTAR_CODES",
}
ALL = set(MAKERS.values())
TAKES = {node: conditions_of(node) for node in SCHEMAS if conditions_of(node)}

# Connects every maker with every sampler; the pairs that the editor allows.
CONNECT = """async ([makers, samplers]) => {
    await app.loadGraphData({nodes: [], links: [], version: 0.4})
    const allowed = []
    for (const maker of makers) for (const sampler of samplers) {
        const from = LiteGraph.createNode(maker), to = LiteGraph.createNode(sampler)
        app.graph.add(from); app.graph.add(to)
        const slot = to.inputs.findIndex(i => i.name === 'condition')
        from.connect(0, to, slot)
        if (to.inputs[slot].link != null) allowed.push([maker, sampler])
        app.graph.remove(from); app.graph.remove(to)
    }
    return allowed
}"""


def test_the_editor_connects_what_a_sampler_reads_and_nothing_else(editor: Any) -> None:
    wanted = {(maker, sampler) for maker, kind in MAKERS.items() for sampler, kinds in TAKES.items() if kind in kinds}
    allowed = editor.evaluate(CONNECT, [[*MAKERS], [*TAKES]])
    assert {tuple(pair) for pair in allowed} == wanted and len(wanted) < len(MAKERS) * len(TAKES)


# The samplers that are offered for the link of a condition; the list is made when a link is dragged.
OFFERED = """() => {
    document.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true}))
    return LiteGraph.slot_types_default_out
}"""


def test_a_link_that_is_dropped_is_offered_the_samplers_that_take_it(editor: Any) -> None:
    offered = editor.evaluate(OFFERED)
    for kind in {*MAKERS.values()}:
        assert {node for node in SAMPLER_NODES if kind in TAKES[node]} <= {*offered[kind]} <= {*TAKES}, kind


@pytest.mark.parametrize("sampler", TAKES)
def test_the_server_refuses_what_a_sampler_does_not_read(comfy: Comfy, info: dict[str, Any], sampler: str) -> None:
    """Nothing runs: the models are missing."""
    for maker, kind in MAKERS.items():
        prompt = {
            "what": {"class_type": maker, "inputs": defaults(info[maker])},
            "draw": {"class_type": sampler, "inputs": defaults(info[sampler], condition=["what", 0])},
            "see": {"class_type": "PreviewAny", "inputs": {"source": ["draw", 0]}},
        }
        with pytest.raises(Rejected) as told:
            comfy.queue(prompt)
        errors = json.loads(str(told.value))["node_errors"]["draw"]["errors"]
        mismatch = [e for e in errors if e["type"] == "return_type_mismatch"]
        assert bool(mismatch) == (kind not in TAKES[sampler]), (maker, errors)
        assert all(e["extra_info"]["input_name"] == "condition" for e in mismatch)


OLD = "FASTAR_CONDITION"


# A blueprint, which is a sub-graph with nothing connected to it.
CSPD = "Compare CSpD with MAR"


def graph_of(name: str) -> dict[str, Any]:
    """A template, or the blueprint of CSpD."""
    if name == CSPD:
        return json.loads((ROOT / "subgraphs" / f"{name}.json").read_text(encoding="utf-8"))
    return load_workflow(name)


def as_saved_before(name: str) -> dict[str, Any]:
    """A graph as it was saved when all conditions had one type, and CSpD had its draft first."""
    graph = graph_of(name)
    sub_graphs = graph.get("definitions", {}).get("subgraphs", [])
    for level in (graph, *sub_graphs):
        for node in level["nodes"]:
            if node["type"] == "FastARCSpDSampler":
                first, second, *others = node["inputs"]
                node["inputs"] = [second, first, *others]
                for link in level["links"]:
                    if link["target_id"] == node["id"] and link["target_slot"] < 2:
                        link["target_slot"] = 1 - link["target_slot"]

    def older(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: older(value) for key, value in part.items()}
        if isinstance(part, list):
            return [older(value) for value in part]
        return OLD if isinstance(part, str) and set(part.split(",")) <= ALL else part

    old = older(graph)
    assert OLD in json.dumps(old) and not any(kind in json.dumps(old) for kind in ALL)
    return old


LINKS = """() => {
    const told = []
    const look = (graph, path) => {
        for (const node of graph._nodes) {
            for (const input of node.inputs ?? []) if (input.link != null) {
                const link = graph.getLink(input.link), from = graph.getNodeById(link.origin_id)
                told.push([path + node.id, input.name, String(link.origin_id), link.origin_slot].join(' '))
            }
            if (node.subgraph) look(node.subgraph, path + node.id + '/')
        }
    }
    look(app.graph, '')
    return told.sort()
}"""


TYPES = "app.graph._nodes.flatMap(n => [...n.inputs, ...n.outputs]).filter(s => s.name == 'condition').map(s => s.type)"


@pytest.mark.parametrize(
    ("name", "runs"),
    [("06 FastHybrid", False), ("05 Inpaint", False), ("04 Text", False), (CSPD, False), ("07 LazyMAR", True)],
)
def test_a_graph_of_one_type_of_conditions_opens_with_all_its_wires_and_runs(
    comfy: Comfy, editor: Any, name: str, runs: bool
) -> None:
    """The prompt that it sends is that of the graph of today, of which one is run."""
    editor.evaluate("graph => app.loadGraphData(graph)", graph_of(name))
    editor.wait_for_timeout(1500)
    wires = editor.evaluate(LINKS)
    prompt = editor.evaluate("async () => (await app.graphToPrompt()).output")

    editor.evaluate("graph => app.loadGraphData(graph)", as_saved_before(name))
    editor.wait_for_timeout(1500)
    assert editor.evaluate(LINKS) == wires and wires
    assert editor.evaluate("async () => (await app.graphToPrompt()).output") == prompt
    if runs:
        assert not comfy.failure(_run(comfy, editor))
    _no_complaint(editor)

    # Its sockets have the types of today, so that they can be connected otherwise.
    types = editor.evaluate(TYPES)
    within = "definitions" in graph_of(name)  # in a sub-graph, whose own sockets are not among them
    assert within or types and OLD not in types, types
