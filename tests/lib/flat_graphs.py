"""Saved graphs without sub-graphs, as the editor sends them."""

from __future__ import annotations

import copy
from typing import Any


def flat(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph with the nodes inside each sub-graph node in its
    place: node 5 inside node 1 is "1:5", as in a prompt of the editor.

    Inputs of a sub-graph that are widgets are left out: the nodes inside hold their values too.
    """
    definitions = {definition["id"]: definition for definition in graph.get("definitions", {}).get("subgraphs", [])}
    graph = copy.deepcopy(graph)
    nodes, links = [], {link[0]: link for link in graph["links"]}
    entering: dict[Any, list[Any]] = {}  # link to a sub-graph's node: the links to the nodes inside that it becomes
    for node in graph["nodes"]:
        if node["type"] not in definitions:
            nodes.append(node)
            continue
        inside = copy.deepcopy(definitions[node["type"]])
        renamed: dict[int, list[Any]] = {}  # link inside to its links outside
        for link in inside["links"]:
            origin = [f"{node['id']}:{link['origin_id']}", link["origin_slot"]]
            if link["origin_id"] == -10:
                outside = node["inputs"][link["origin_slot"]]["link"]
                renamed[link["id"]] = [None if outside is None else f"{node['id']}:{link['id']}"]
                if outside is not None:
                    target = [f"{node['id']}:{link['target_id']}", link["target_slot"], link["type"]]
                    entering.setdefault(outside, []).append([*renamed[link["id"]], *target])
            elif link["target_id"] == -20:
                renamed[link["id"]] = node["outputs"][link["target_slot"]]["links"]
                for number in renamed[link["id"]]:
                    links[number] = [number, *origin, *links[number][3:]]
            else:
                number = f"{node['id']}:{link['id']}"
                renamed[link["id"]] = [number]
                target = [f"{node['id']}:{link['target_id']}", link["target_slot"], link["type"]]
                links[number] = [number, *origin, *target]
        for inner in inside["nodes"]:
            inner["id"] = f"{node['id']}:{inner['id']}"
            for socket in inner["inputs"]:
                socket["link"] = renamed[socket["link"]][0] if socket["link"] is not None else None
            for output in inner["outputs"]:
                output["links"] = [number for link in output["links"] for number in renamed[link]]
            nodes.append(inner)

    for outside, inner_links in entering.items():
        _, *origin = links.pop(outside)[:3]
        for number, *target in inner_links:
            links[number] = [number, *origin, *target]
    for node in nodes:
        for output in node["outputs"]:
            numbers = [entering.get(link, [[link]]) for link in output["links"]]
            output["links"] = [number for inner_links in numbers for number, *_ in inner_links]
    return {**graph, "nodes": nodes, "links": [*links.values()]}
