"""Every node's schema against a recorded one: ids, sockets, widgets by position, types, ranges, choices, defaults.

Saved graphs depend on all of it. After an intended change, record it with ``python tests/nodes/test_golden_schemas.py``, which refuses
what would break a saved graph: a widget that moves or leaves, a socket that leaves, a choice that leaves, a node that leaves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    import conftest  # noqa: F401  the package under its name
    import fake_comfy

    fake_comfy.install()

from fastar_nodes.nodes import loaders
from graphs import WIDGETS
from test_node_schemas import MODULES

GOLDEN = Path(__file__).with_name("schemas.json")
COMMAND = "python tests/nodes/test_golden_schemas.py"


def _widget(part: Any) -> list[Any]:
    """Name, type, default, and choices or range. Menus of files are left out: they depend on the machine."""
    about = part.about
    options = about.get("options")
    later = ["optional"] if part.optional else []
    if isinstance(options, loaders.Menu):
        return [part.id, part.kind, "files", *later]
    if options is not None and len(options) > 100:  # names of classes
        return [part.id, part.kind, about["default"], len(options), *later]
    limits = options if options is not None else [about[k] for k in ("min", "max", "step") if k in about]
    return [part.id, part.kind, about["default"], limits, *later]


def record(about: Any) -> dict[str, Any]:
    """What saved graphs depend on."""
    sockets = [i for i in about.inputs if i.kind not in WIDGETS]
    return {
        "name": about.display_name,
        "deprecated": about.is_deprecated,
        "widgets": [_widget(i) for i in about.inputs if i.kind in WIDGETS],
        "inputs": [[i.id, i.kind, "optional" if i.optional else "required"] for i in sockets],
        "outputs": [[o.id, o.kind] for o in about.outputs],
    }


def schemas() -> dict[str, Any]:
    """Records of all nodes by id, as JSON reads them back."""
    found = (node.define_schema() for module in MODULES for node in module.NODES)
    return json.loads(json.dumps({about.node_id: record(about) for about in found}))


def _choices(widget: list[Any]) -> set[Any]:
    return set(widget[3]) if len(widget) > 3 and isinstance(widget[3], list) else set()


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a change from one set of records to another does to saved graphs."""
    out = []
    for node, was in old.items():
        if node not in new:
            out.append(f"{node} is gone; keep it in nodes/previous.py")
            continue
        now = new[node]
        if [w[:2] for w in now["widgets"][: len(was["widgets"])]] != [w[:2] for w in was["widgets"]]:
            out.append(f"{node}: a widget moved, left or changed its type; append, or give the node a new id")
        for before, after in zip(was["widgets"], now["widgets"], strict=False):
            if before[1] == "COMBO" and not _choices(before) <= _choices(after):
                out.append(f"{node}.{before[0]}: a choice left")
        for widget in now["widgets"][len(was["widgets"]) :]:
            if widget[-1] != "optional":
                out.append(f"{node}.{widget[0]}: a new widget is required; list it in LATER of nodes/layout.py")
        for kind in ("inputs", "outputs"):
            names = [socket[0] for socket in now[kind]]
            if [n for n in names if n in [s[0] for s in was[kind]]] != [s[0] for s in was[kind]]:
                out.append(f"{node}: its {kind} moved or left")
        if any(s[2] == "required" and s[0] not in [w[0] for w in was["inputs"]] for s in now["inputs"]):
            out.append(f"{node}: a new input is required")
    return out


@pytest.mark.parametrize("node", sorted(json.loads(GOLDEN.read_text(encoding="utf-8"))))
def test_schemas_are_the_recorded_ones(node):
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert schemas().get(node) == recorded[node], f"saved graphs depend on it; if the change is intended: {COMMAND}"


def test_every_node_is_recorded():
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert set(schemas()) == set(recorded), f"record it: {COMMAND}"


def test_what_breaks_saved_graphs_is_found():
    old = {"A": {"widgets": [["x", "INT", 0, []], ["y", "COMBO", "a", ["a", "b"]]], "inputs": [["m", "M", "required"]]}}
    old["A"]["outputs"] = [["o", "O"], ["p", "P"]]

    def changed(**parts: Any) -> dict[str, Any]:
        return {"A": {**old["A"], **parts}}

    x, y = old["A"]["widgets"]
    assert breaks(old, old) == [] and breaks(old, changed(widgets=[x, y, ["z", "INT", 0, [], "optional"]])) == []
    assert breaks(old, changed(inputs=[["m", "M", "required"], ["n", "N", "optional"]])) == []
    for parts in (
        {"widgets": [x, y, ["z", "INT", 0, []]]},
        {"widgets": [y, x]},
        {"widgets": [x]},
        {"widgets": [["z", "INT", 0, []], x, y]},
        {"widgets": [x, ["y", "COMBO", "a", ["a"]]]},
        {"inputs": []},
        {"inputs": [["m", "M", "required"], ["n", "N", "required"]]},
        {"outputs": [["p", "P"], ["o", "O"]]},
    ):
        assert breaks(old, changed(**parts)), parts
    assert breaks(old, {})


if __name__ == "__main__":
    now = schemas()
    before = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    if broken := breaks(before, now):
        sys.exit("\n".join(["This would break saved graphs:", *broken]))
    lines = []
    for node, about in sorted(now.items()):
        parts = [
            f"    {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}"
            for k, v in about.items()
            if k not in ("widgets", "inputs")
        ]
        for kind in ("widgets", "inputs"):
            rows = ",\n".join(f"      {json.dumps(row, ensure_ascii=False)}" for row in about[kind])
            parts.append(f'    "{kind}": [\n{rows}\n    ]' if rows else f'    "{kind}": []')
        lines.append(f"  {json.dumps(node)}: {{\n" + ",\n".join(parts) + "\n  }")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
