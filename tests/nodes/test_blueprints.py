"""Subgraph blueprints: a broken file in ``subgraphs/`` shows an error to every user of the pack."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from graphs import WIDGETS, widget_values
from test_node_schemas import NODES
from test_workflows import CORE

FILES = sorted((Path(__file__).resolve().parents[2] / "subgraphs").glob("*.json"))
ENDS = {-10: "inputs", -20: "outputs"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def blueprint(request):
    """File, its one node and that node's definition."""
    graph = json.loads(request.param.read_text(encoding="utf-8"))
    (node,), (definition,) = graph["nodes"], graph["definitions"]["subgraphs"]
    return request.param, node, definition


def test_there_are_blueprints():
    assert len(FILES) == 3


def test_the_node_is_its_definition(blueprint):
    path, node, definition = blueprint
    assert str(uuid.UUID(definition["id"])) == node["type"] and definition["name"] == path.stem
    for side in ("inputs", "outputs"):
        assert [(s["name"], s["type"]) for s in node[side]] == [(s["name"], s["type"]) for s in definition[side]]


def test_inner_nodes_are_known(blueprint):
    _, _, definition = blueprint
    for node in definition["nodes"]:
        assert node["type"] in CORE or node["type"] in NODES
        if node["type"] in NODES:
            values = widget_values(node, NODES[node["type"]])
            for about in (i for i in NODES[node["type"]].inputs if i.kind == "COMBO"):
                assert values[about.id] in about.about["options"]


def test_links_agree_with_both_ends(blueprint):
    _, _, definition = blueprint
    nodes = {node["id"]: node for node in definition["nodes"]}
    for link in definition["links"]:
        number, source, target = link["id"], link["origin_id"], link["target_id"]
        if source in ENDS:
            assert number in definition["inputs"][link["origin_slot"]]["linkIds"]
        else:
            output = nodes[source]["outputs"][link["origin_slot"]]
            assert number in output["links"] and output["type"] == link["type"]
        if target in ENDS:
            assert number in definition["outputs"][link["target_slot"]]["linkIds"]
        else:
            assert nodes[target]["inputs"][link["target_slot"]]["link"] == number
    used = [i["link"] for node in nodes.values() for i in node["inputs"] if i["link"] is not None]
    used += [number for output in definition["outputs"] for number in output["linkIds"]]
    assert sorted(used) == sorted(link["id"] for link in definition["links"])


def test_required_sockets_are_connected(blueprint):
    _, _, definition = blueprint
    for node in (n for n in definition["nodes"] if n["type"] in NODES):
        linked = {i["name"] for i in node["inputs"] if i["link"] is not None}
        needed = {i.id for i in NODES[node["type"]].inputs if i.kind not in WIDGETS and not i.optional}
        assert needed <= linked, node["type"]


def test_promoted_widgets_exist(blueprint):
    _, node, definition = blueprint
    nodes = {str(n["id"]): n for n in definition["nodes"]}
    for number, widget in node["properties"]["proxyWidgets"]:
        inner = nodes[number]
        known = {i.id for i in NODES[inner["type"]].inputs} if inner["type"] in NODES else {"value", "seed"}
        assert widget in known
        assert all(i["link"] is None for i in inner["inputs"] if i["name"] == widget)
