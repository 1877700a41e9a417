"""Schemas of the nodes: widgets from settings, help pages, and the record on which saved graphs depend.

``schemas.json`` records ids, sockets, widgets by position, types, ranges, choices, defaults and which of them a prompt
must have. After an intended
change, record it with ``python tests/nodes/test_schemas.py``, which refuses what would break a saved graph: a widget
that moves or leaves, a socket, a choice or a node that leaves. Until the first release such a change is possible:
delete schemas.json first, and change the graphs in workflows/ and subgraphs/ with it.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
    import checkout  # noqa: F401  the package under its name
    import fake_comfy

    fake_comfy.install()

from fastar_nodes.nodes import (
    advisor,
    asking,
    compare,
    conditioning,
    editing,
    loaders,
    running,
    samplers,
    sharing,
    sweep,
    timelapse,
)
from fastar_nodes.samplers.settings import Settings, default_or_full_size, knobs
from graphs import WIDGETS, default

MODULES = (loaders, conditioning, samplers, editing, asking, compare, timelapse, sweep, sharing, advisor)
CLASSES = {node.define_schema().node_id: node for module in MODULES for node in module.NODES}
NODES = {name: node.define_schema() for name, node in CLASSES.items()}
GOLDEN = Path(__file__).with_name("schemas.json")


def widgets_of(about: Any) -> list[Any]:
    """Widgets of a node."""
    return [i for i in about.inputs if i.kind in WIDGETS]


def test_every_sampler_that_runs_here_has_a_node():
    with_node = {node.sampler for node in CLASSES.values() if hasattr(node, "sampler")}
    missing = ", ".join({name for name in running.runnable() if "+" not in name} - with_node)
    assert not missing, f"NODES in nodes/samplers.py lacks a class of {missing}; add one"
    assert with_node <= set(running.runnable())


@pytest.mark.parametrize("node", NODES)
def test_advanced_widgets_are_the_last(node):
    advanced = [bool(i.advanced) for i in widgets_of(NODES[node])]
    assert advanced == sorted(advanced)


@pytest.mark.parametrize("node", NODES)
def test_a_prompt_from_before_a_widget_was_added_runs(node):
    """So only the first widget may be required. The editor shows required widgets first."""
    required = [widget.id for widget in widgets_of(NODES[node]) if not widget.optional]
    assert required in ([], [widgets_of(NODES[node])[0].id])
    assert set(required) <= {"seed", "checkpoint", "image"}


# Whose settings depend on a preset and the connected model, see test_preset_requests.py.
WITH_PRESETS = [node for node in NODES if "preset" in [widget.id for widget in widgets_of(NODES[node])]]
# Whose default depends on the files of the machine.
MENUS = ("encoder", "ta_tok")


@pytest.mark.parametrize("node", [node for node in NODES if node not in WITH_PRESETS])
def test_a_widget_that_a_prompt_leaves_out_has_its_default(node):
    widgets = {widget.id: widget for widget in widgets_of(NODES[node])}
    taken_by = {name: part.default for name, part in inspect.signature(sweep._plan).parameters.items()}
    # The classes of settings whose fields are widgets of the node, the one with the most last.
    kinds = [kind for module in MODULES for kind in vars(module).values() if isinstance(kind, type)]
    settings = [kind for kind in kinds if issubclass(kind, Settings) and kind is not Settings]
    own = [kind for kind in settings if set(knobs(kind)) <= set(widgets)]
    for kind in sorted(own, key=lambda kind: len(knobs(kind))):
        taken_by |= {name: default_or_full_size(default, about) for name, (default, about) in knobs(kind).items()}
    taken_by |= {name: part.default for name, part in inspect.signature(CLASSES[node].execute).parameters.items()}

    for widget in widgets.values():
        if not widget.optional or widget.id in MENUS:
            continue
        taken = taken_by[widget.id]
        assert (type(taken), taken) == (type(default(widget)), default(widget)), widget.id


@pytest.mark.parametrize("node", NODES)
def test_no_widget_of_a_node_holds_a_number_that_stands_for_another(node):
    for widget in widgets_of(NODES[node]):
        if widget.kind in ("INT", "FLOAT") and widget.id != "threshold":  # a cosine
            assert widget.about["min"] is None or widget.about["min"] >= 0, widget.id


@pytest.mark.parametrize("node", NODES)
def test_everything_has_a_tooltip_and_is_explained_on_a_help_page(root, node):
    parts = [i for i in NODES[node].inputs if i.kind not in WIDGETS] + widgets_of(NODES[node])
    for part in [*parts, *NODES[node].outputs]:
        assert part.about.get("tooltip"), f"{node}.{part.id}"
    page = (root / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {NODES[node].display_name}\n")
    for part in parts:
        name = re.sub(r"_[1-8]$", "", part.id) if node in ("FastARCompare", "FastARTimeLapse") else part.id
        assert f"**{name}" in page, f"web/docs/{node}.md does not explain {part.id}: '- **{name}**: ...'"


@pytest.mark.parametrize("node", NODES)
def test_a_choice_in_braces_is_made_as_in_core(node):
    """CLIP Text Encode picks one of {red|blue}; so does every text here that says what to draw."""
    about = NODES[node]
    texts = [i for i in about.inputs if i.kind == "STRING"]
    if "condition" in [made.id for made in about.outputs]:
        assert texts or node == "FastARImageToCodes"
        assert all(i.about.get("dynamic_prompts") for i in texts)
    else:  # lists of values and names of files, in which braces and // stand for themselves
        assert not any(i.about.get("dynamic_prompts") for i in texts)


@pytest.mark.parametrize("node", ["FastARCompare", "FastARTimeLapse"])
def test_the_editor_and_the_server_agree_on_the_pairs(node):
    script = (Path(__file__).parents[2] / "web" / "js" / "compare.js").read_text(encoding="utf-8")
    sockets = {i.id: i.kind for i in NODES[node].inputs if i.kind not in WIDGETS}
    assert int(re.search(rf"const PAIRS = .*\b{node}: (\d+)", script)[1]) * 2 == len(sockets)
    kinds = re.findall(r'\["(\w+)", "([A-Z_]+)"\]', script)
    assert len(kinds) == 2
    for kind, type_ in kinds:
        assert {t for name, t in sockets.items() if name.startswith(f"{kind}_")} == {type_}


def test_scripts_of_the_editor_name_nodes_that_exist():
    """Whole ids, beginnings of ids, and ids in lower case."""
    known = [*NODES, *map(str.lower, NODES)]
    named: set[str] = set()
    for script in (Path(__file__).parents[2] / "web" / "js").glob("*.js"):
        named |= set(re.findall(r"\b(?:FastAR|fastar)[A-Za-z]*\b(?=[\"`])", script.read_text(encoding="utf-8")))
        named |= set(re.findall(r"\bsettings\.(fastar[a-z]+)", script.read_text(encoding="utf-8")))

    assert "FastARCompare" in named
    for name in named:
        assert any(node.startswith(name) for node in known), name


def _widget(part: Any) -> list[Any]:
    """Name, type, default, and choices or range. Menus of files are left out: they depend on the machine."""
    about = part.about
    options = about.get("options")
    if part.id in ("checkpoint", "decoder", "ta_tok", "encoder") or about.get("upload"):
        return [part.id, part.kind, "files"]
    if options is not None and len(options) > 100:  # names of classes
        return [part.id, part.kind, about["default"], len(options)]
    limits = options if options is not None else [about[k] for k in ("min", "max", "step") if k in about]
    return [part.id, part.kind, about["default"], limits]


def record(about: Any) -> dict[str, Any]:
    """What saved graphs depend on."""
    sockets = [i for i in about.inputs if i.kind not in WIDGETS]
    return {
        "name": about.display_name,
        "outputs": [[o.id, o.kind] for o in about.outputs],
        "widgets": [_widget(i) for i in widgets_of(about)],
        "required": [i.id for i in widgets_of(about) if not i.optional],
        "inputs": [[i.id, i.kind, "optional" if i.optional else "required"] for i in sockets],
    }


def schemas() -> dict[str, Any]:
    """Records of all nodes by id, as JSON reads them back."""
    return json.loads(json.dumps({name: record(node.define_schema()) for name, node in CLASSES.items()}))


# Choices that menus no longer show, and that nodes still accept.
STILL_ACCEPTED = {"speed": set(loaders._OLD_SPEEDS), "what": set(compare._OLD_MAPS)}


def _choices(widget: list[Any]) -> set[Any]:
    return set(widget[3]) if len(widget) > 3 and isinstance(widget[3], list) else set()


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a change from one set of records to another does to saved graphs."""
    out = []
    for node, was in old.items():
        if node not in new:
            out.append(f"{node} is gone")
            continue
        now = new[node]
        if [w[:2] for w in now["widgets"][: len(was["widgets"])]] != [w[:2] for w in was["widgets"]]:
            out.append(f"{node}: a widget moved, left or changed its type; append, or give the node a new id")
        for before, after in zip(was["widgets"], now["widgets"], strict=False):
            if before[1] == "COMBO" and not _choices(before) <= _choices(after) | STILL_ACCEPTED.get(before[0], set()):
                out.append(f"{node}.{before[0]}: a choice left")
        for kind in ("inputs", "outputs"):
            names = [socket[0] for socket in now[kind]]
            if [n for n in names if n in [s[0] for s in was[kind]]] != [s[0] for s in was[kind]]:
                out.append(f"{node}: its {kind} moved or left")
        if any(s[2] == "required" and s[0] not in [w[0] for w in was["inputs"]] for s in now["inputs"]):
            out.append(f"{node}: a new input is required")
        if not set(now["required"]) <= set(was["required"]):
            out.append(f"{node}: a prompt that was saved may lack the widget that is required now")
    return out


def test_schemas_are_the_recorded_ones():
    recorded, now = json.loads(GOLDEN.read_text(encoding="utf-8")), schemas()
    changed = [node for node in {*recorded, *now} if recorded.get(node) != now.get(node)]
    assert not changed, f"saved graphs depend on {', '.join(changed)}; record an intended change, see above"


if __name__ == "__main__":
    now = schemas()
    before = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    if broken := breaks(before, now):
        sys.exit("\n".join(["This would break saved graphs:", *broken]))
    text = json.dumps(dict(sorted(now.items())), indent=2, ensure_ascii=False)
    # A widget or socket a line.
    text = re.sub(r"(?<=\[)\n {8,}|\n {6,}(?=\])", "", re.sub(r",\n {8,}", ", ", text))
    GOLDEN.write_text(text + "\n", encoding="utf-8")
