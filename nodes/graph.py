"""The graph that a node runs in: node id to {"class_type": ..., "inputs": ...}, as the client sent it.

The value of an input is what was typed, or a link [id of another node, number of its output]. ComfyUI checks only the
nodes that run, so the others may be of any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import host

Inputs = Mapping[str, Any]


def graph_of(node: Any) -> Mapping[str, Any]:
    """Node id to node, of the graph that the node runs in or is checked in; empty outside of both."""
    # ComfyUI passes an empty one to validate_inputs.
    graph = host.queue.hidden(node, "prompt") or host.server.sent_graph()
    return graph if isinstance(graph, Mapping) else {}


def inputs_of(entry: Any) -> Inputs:
    """The inputs of a node of a graph; empty if there is no such node."""
    if not isinstance(entry, Mapping):
        return {}

    inputs = entry.get("inputs")
    return inputs if isinstance(inputs, Mapping) else {}


def source_of(value: Any) -> tuple[str, int] | None:
    """The node and the number of the output that an input is connected to; None for a typed value."""
    if not isinstance(value, list) or len(value) != 2:
        return None

    number, output = value
    if isinstance(number, str) and isinstance(output, int):
        return number, output
    return None


def typed(node: Any, name: str) -> Any:
    """What the graph holds for an input of the node: a value, or a link as a list; None if it holds nothing."""
    return inputs_of(graph_of(node).get(_number(node))).get(name)


def maker(node: Any, name: str) -> str:
    """Type of the node that is connected to an input; "" if there is none."""
    source = source_of(typed(node, name))
    if source is None:
        return ""

    number, _ = source
    return type_of(graph_of(node).get(number))


def type_of(entry: Any) -> str:
    """Type of a node, by its entry in a graph; "" if it has none."""
    kind = entry.get("class_type") if isinstance(entry, Mapping) else None
    return kind if isinstance(kind, str) else ""


def users(node: Any, name: str) -> list[Inputs]:
    """Inputs of the nodes of the graph whose input ``name`` is connected to the first output of the node."""
    link = (_number(node), 0)

    found: list[Inputs] = []
    for entry in graph_of(node).values():
        inputs = inputs_of(entry)
        if source_of(inputs.get(name)) == link:
            found.append(inputs)
    return found


def taken(node: Any, output: int) -> bool:
    """Whether an output of the node is connected in the graph."""
    link = (_number(node), output)

    for entry in graph_of(node).values():
        values = inputs_of(entry).values()
        if any(source_of(value) == link for value in values):
            return True
    return False


_LOAD_IMAGE = "LoadImage"
_SWITCH = "ComfySwitchNode"


def without_file(node: Any, name: str) -> str:
    """Title of the Load Image without a file from which an input comes; "" if there is none.

    A template has no file to choose. ComfyUI takes the empty name for the input folder, which it cannot open.
    """
    link = source_of(typed(node, name))
    if link is None:
        return ""

    nodes = graph_of(node)
    number, _ = link
    for waited_for in needed(nodes, [number]):
        entry = nodes[waited_for]
        if entry.get("class_type") == _LOAD_IMAGE and inputs_of(entry).get("image") == "":
            about = entry.get("_meta")
            title = about.get("title") if isinstance(about, Mapping) else None
            return str(title or "Load Image")

    return ""


def leave_unread(node: Any) -> None:
    """Let ComfyUI not read the files of the Load Images without one: it does so before a run, to see whether they
    changed, and would complain in its log that the empty name is a folder.
    """
    for entry in graph_of(node).values():
        if type_of(entry) == _LOAD_IMAGE and inputs_of(entry).get("image") == "":
            entry["is_changed"] = [False]  # where ComfyUI keeps what it saw


def needed(nodes: Mapping[str, Any], ends: Iterable[str]) -> list[str]:
    """Ids of the nodes that run for the nodes ``ends``, these included. The other side of a switch does not run."""
    return _reached(nodes, ends, _waited_for)


def behind(nodes: Mapping[str, Any], number: str) -> dict[str, Any]:
    """The nodes that the result of a node depends on, with the node itself: id to (type, inputs)."""
    found: dict[str, Any] = {}
    for source in _reached(nodes, [number], lambda entry: inputs_of(entry).values()):
        found[source] = nodes[source].get("class_type"), inputs_of(nodes[source])
    return found


def _waited_for(entry: Mapping[str, Any]) -> Iterable[Any]:
    """The inputs for which a node waits: of a switch the side that it takes."""
    inputs = inputs_of(entry)
    side = inputs.get("switch")
    if entry.get("class_type") == _SWITCH and isinstance(side, bool):
        return [inputs.get("on_true" if side else "on_false")]

    return inputs.values()


def _reached(
    nodes: Mapping[str, Any], ends: Iterable[str], values_of: Callable[[Mapping[str, Any]], Iterable[Any]]
) -> list[str]:
    """Ids of the nodes on all ways back from ``ends``, along the links among ``values_of`` each node."""
    waiting = list(ends)
    found: dict[str, None] = {}

    while waiting:
        number = waiting.pop()
        entry = nodes.get(number)
        if number in found or not isinstance(entry, Mapping):
            continue

        found[number] = None
        for value in values_of(entry):
            link = source_of(value)
            if link is not None:
                waiting.append(link[0])

    return list(found)


def _number(node: Any) -> str:
    """The id of the node in its graph."""
    return host.queue.number_of(node)
