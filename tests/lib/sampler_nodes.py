"""The samplers' nodes by their ids, from the registry and the recorded schemas alone: tests of a real ComfyUI do not
import the nodes.
"""

import json
from pathlib import Path

from fastar_nodes.runs.registry import Entry, first_names

# A combination has no node, and a second name none of its own.
ALL_NODES: dict[str, Entry] = {entry.node: entry for name, entry in first_names().items() if "+" not in name}
# Those that run on a demo model; NextStep has none.
SAMPLER_NODES = {node: entry for node, entry in ALL_NODES.items() if entry.demos(entry.families[0])}


def nodes_of(kind: str) -> tuple[str, ...]:
    """The nodes of the samplers of a kind of families."""
    return tuple(name for name, entry in ALL_NODES.items() if entry.family.kind == kind)


SCHEMAS = json.loads((Path(__file__).parents[1] / "nodes" / "schemas.json").read_text(encoding="utf-8"))
# By kind of families: the loader, and the demo models that a sampler gets alone, as target and as draft.
_DEMO = {
    "masked": ("FastARLoadMAR", "demo", "demo", "demo-draft"),
    "tokens": ("FastARLoadLlamaGen", "demo-llamagen-low", "demo-llamagen", "demo-llamagen-low"),
    "blocks": ("FastARLoadBitDance", "demo-bitdance", "", ""),
}


def demo_models(entry: Entry) -> dict[str, tuple[str, str]]:
    """Sockets of a sampler to the loader of a demo model and its checkpoint."""
    loader, alone, target, draft = _DEMO[entry.family.kind]
    if entry.needs_draft:
        return {"target": (loader, target), "draft": (loader, draft)}
    return {"model": (loader, entry.demo[0] if entry.demo else alone)}


def conditions_of(node: str) -> set[str]:
    """The types of conditions that a node takes; none without such a socket."""
    types = {name: types for name, types, _ in SCHEMAS[node]["inputs"]}.get("condition", "")
    return set(types.split(",")) - {""}


def has_presets(node: str) -> bool:
    """Whether the presets of accelerators are choices of a node."""
    return any(name == "preset" and "fast" in choices for name, _, _, choices in SCHEMAS[node]["widgets"])
