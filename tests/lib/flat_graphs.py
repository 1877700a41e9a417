"""Saved graphs without sub-graphs, as the editor sends them."""

from __future__ import annotations

import copy
from typing import Any

# Ids that a sub-graph gives to its own inputs and outputs.
INPUTS = -10
OUTPUTS = -20


def flat(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph with the nodes inside each sub-graph node in its
    place: node 5 inside node 1 is "1:5", as in a prompt of the editor.

    Widgets on the sub-graph node need no care: the nodes inside hold their values.
    """
    whole = copy.deepcopy(graph)
    definitions = {definition["id"]: definition for definition in whole.get("definitions", {}).get("subgraphs", [])}
    nodes = [node for node in whole["nodes"] if node["type"] not in definitions]
    inside = {}
    for node in whole["nodes"]:
        if node["type"] in definitions:
            inside[node["id"]] = copy.deepcopy(definitions[node["type"]])

    links = {link[0]: list(link) for link in whole["links"]}
    _start_inside(links, inside)
    entering = {(link[3], link[4]): link for link in links.values() if link[3] in inside}
    for link in entering.values():
        del links[link[0]]

    for number, definition in inside.items():
        for inner in definition["nodes"]:
            nodes.append({**inner, "id": f"{number}:{inner['id']}"})

        for link in definition["links"]:
            if link["target_id"] == OUTPUTS:
                continue
            origin = [f"{number}:{link['origin_id']}", link["origin_slot"]]
            if link["origin_id"] == INPUTS:
                outer = entering.get((number, link["origin_slot"]))
                if outer is None:  # a widget, or an input that nothing feeds
                    continue
                origin = outer[1:3]
            name = f"{number}:{link['id']}"
            links[name] = [name, *origin, f"{number}:{link['target_id']}", link["target_slot"], link["type"]]

    _connect(nodes, links)
    return {**whole, "nodes": nodes, "links": [*links.values()]}


def _start_inside(links: dict[Any, list[Any]], inside: dict[int, dict[str, Any]]) -> None:
    """Let links from a sub-graph node start at the node inside that makes the output."""
    sources = {}
    for number, definition in inside.items():
        for link in definition["links"]:
            if link["target_id"] == OUTPUTS:
                sources[number, link["target_slot"]] = [f"{number}:{link['origin_id']}", link["origin_slot"]]

    for link in links.values():
        link[1:3] = sources.get((link[1], link[2]), link[1:3])


def _connect(nodes: list[dict[str, Any]], links: dict[Any, list[Any]]) -> None:
    """Write the links into the sockets of both ends."""
    for node in nodes:
        for socket in node["inputs"]:
            socket["link"] = None
        for output in node["outputs"]:
            output["links"] = []

    by_id = {node["id"]: node for node in nodes}
    for number, source, out, target, into, _ in links.values():
        by_id[source]["outputs"][out]["links"].append(number)
        by_id[target]["inputs"][into]["link"] = number
