"""Nodes whose id changed after a release. The editor replaces them in saved graphs, and prompts run with the new id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import graph

if TYPE_CHECKING:
    from comfy_api.v0_0_2 import io

# The old id to the new one, of nodes with the same sockets and widgets.
RENAMED: dict[str, str] = {}
# What the editor adds after the widget of a seed.
_AFTER_SEED = "control_after_generate"


def convert(request: Any) -> None:
    """Rename the nodes of a prompt, which may leave out inputs: ComfyUI's own replacement needs all of them."""
    nodes = request.get("prompt") if isinstance(request, dict) else None
    for entry in nodes.values() if isinstance(nodes, dict) else ():
        if graph.type_of(entry) in RENAMED:
            entry["class_type"] = RENAMED[entry["class_type"]]


async def register(nodes: list[type[io.ComfyNode]]) -> None:
    """Tell the editor, through ComfyUI, which nodes replace those of saved graphs."""
    if not RENAMED:
        return

    from comfy_api.v0_0_2 import ComfyAPI, io

    schemas = {schema.node_id: schema for schema in (node.define_schema() for node in nodes)}
    for old, new in RENAMED.items():
        inputs = schemas[new].inputs
        widgets: list[str] = []
        for one in inputs:
            if isinstance(one, io.WidgetInput):
                widgets.append(one.id)
                widgets += [_AFTER_SEED] if getattr(one, _AFTER_SEED, False) else []

        same = io.NodeReplace(
            new_node_id=new,
            old_node_id=old,
            old_widget_ids=widgets,
            input_mapping=[{"new_id": one.id, "old_id": one.id} for one in inputs],
            output_mapping=[{"new_idx": i, "old_idx": i} for i in range(len(schemas[new].outputs))],
        )
        await ComfyAPI().node_replacement.register(same)
