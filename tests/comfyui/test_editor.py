"""What users do in ComfyUI's editor beside opening and running a graph: drop saved images, switch the language."""

import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from comfy_host import ROOT, Comfy, load_workflow
from PIL import Image
from test_browser import _no_complaint, _run, browser, editor  # noqa: F401  fixtures
from test_texts import TABLE

# ruff: noqa: F811

# Drops a file on the canvas, at a position of the graph, or in its lower left corner for null.
DROP = """([name, data, at]) => {
    const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0))
    const transfer = new DataTransfer()
    transfer.items.add(new File([bytes], name, {type: 'image/png'}))
    const canvas = app.canvas.canvas, box = canvas.getBoundingClientRect(), {scale, offset} = app.canvas.ds
    const corner = [box.x + 400, box.bottom - 60]
    const [x, y] = at ? [(at[0] + offset[0]) * scale + box.x, (at[1] + offset[1]) * scale + box.y] : corner
    const target = document.elementFromPoint(x, y)
    const about = {bubbles: true, cancelable: true, dataTransfer: transfer, clientX: x, clientY: y}
    for (const kind of ['dragenter', 'dragover', 'drop'])
        target.dispatchEvent(new DragEvent(kind, about))
}"""


def drop(page: Any, file: Path, at: list[float] | None = None) -> None:
    page.evaluate(DROP, [file.name, base64.b64encode(file.read_bytes()).decode(), at])
    page.wait_for_timeout(2500)


def picture_of(comfy: Comfy, entry: dict[str, Any], page: Any, kind: str = "SaveImage") -> Path:
    """File that the Save Image node of a run wrote."""
    types = page.evaluate("Object.fromEntries(app.graph._nodes.map(n => [n.id, n.type]))")
    image = next(out for key, out in entry["outputs"].items() if types.get(key) == kind)["images"][0]
    return comfy.base / "output" / image["subfolder"] / image["filename"]


WIDGETS = "type => Object.fromEntries(app.graph._nodes.find(n => n.type === type).widgets.map(w => [w.name, w.value]))"


REPORT = """() => {
    const node = LiteGraph.createNode('FastARLoadReport'), table = LiteGraph.createNode('PreviewAny')
    app.graph.add(node); app.graph.add(table)
    node.pos = [300, 200]; table.pos = [800, 200]; table.size = [700, 300]
    node.connect(2, table, 0)
    return [node.pos[0] + 60, node.pos[1] + 20]
}"""


def test_a_saved_picture_is_dropped_on_load_report(comfy, editor, artifacts):
    editor.evaluate("graph => app.loadGraphData(graph)", load_workflow("06 FastHybrid"))
    editor.wait_for_timeout(1500)
    saved = picture_of(comfy, _run(comfy, editor), editor)
    editor.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    at = editor.evaluate(REPORT)
    editor.wait_for_timeout(1500)
    drop(editor, saved, at)
    assert editor.evaluate("app.graph._nodes.length") == 2, "the image was opened as a workflow"
    assert editor.evaluate(WIDGETS, "FastARLoadReport")["image"].endswith(saved.name)
    entry = _run(comfy, editor)
    assert not comfy.failure(entry)
    (table,) = [out["text"][0] for out in entry["outputs"].values() if "text" in out]
    assert "| MAR" in table and "| FastHybrid" in table
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"load report_{editor.renderer}.png"))
    ((text, cells),) = editor.evaluate(TABLE)
    assert "|" not in text and (editor.renderer == "litegraph" or cells >= 16)
    _no_complaint(editor)


ADD = "type => { app.graph.add(LiteGraph.createNode(type)) }"

# Brings a node to the middle of the screen, selected or not; its id and where its title and its widget lookahead are.
SELECT = """([type, selected]) => {
    const node = app.graph._nodes.find(n => n.type === type)
    app.canvas.ds.scale = 1; app.canvas.deselectAll()
    if (selected) app.canvas.select(node)
    app.canvas.centerOnNode(node)
    const {scale, offset} = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect()
    const row = node.widgets.find(w => w.name === 'preset').last_y + 10
    const at = (x, y) => [(node.pos[0] + x + offset[0]) * scale + box.x, (node.pos[1] + y + offset[1]) * scale + box.y]
    return {id: node.id, title: at(90, -15), preset: at(60, row)}
}"""


# Text, and width of the images, of what the button "Info" of a selected node opens.
SHOWN = """() => {
    const box = document.querySelector('.node-help-content')
    if (!box) return box
    const images = [...box.querySelectorAll('img')]
    return {text: box.innerText, widths: images.map(i => i.complete ? i.naturalWidth : 0)}
}"""


def test_help_opens_beside_the_graph_with_its_picture(editor, artifacts):
    node = "FastARFastHybridSampler"
    editor.evaluate(ADD, "FastARFastHybridSampler")
    editor.wait_for_timeout(1500)
    at = editor.evaluate(SELECT, [node, False])
    editor.wait_for_timeout(500)
    editor.mouse.click(*at["title"])
    editor.get_by_test_id("info-button").click(timeout=10000)
    editor.wait_for_timeout(2500)
    editor.screenshot(path=str(artifacts / f"help_{editor.renderer}.png"))
    shown = editor.evaluate(SHOWN)
    assert "FastHybrid Sampler" in shown["text"] and "lookahead" in shown["text"]
    assert len(shown["widths"]) == 1 and shown["widths"][0] > 100
    _no_complaint(editor)


def _node(number: int, kind: str, **more: Any) -> dict[str, Any]:
    about = {"id": number, "type": kind, "pos": [300 * number, 100], "size": [200, 100], "flags": {}, "order": number}
    return {**about, "mode": 0, "inputs": [], "outputs": [], "properties": {}, "widgets_values": [], **more}


_TABLE = [{"name": "source", "type": "*", "link": 3}]
_TO_SLOT_77 = [[3, 2, 77, 1, 0, "STRING"]]
# Graphs that were edited by hand, or damaged: nodes, links, extra.
MALFORMED: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "a link to an output that is not there": (
        [_node(1, "PreviewAny", inputs=_TABLE), _node(2, "FastARCompare")],
        _TO_SLOT_77,
        {},
    ),
    "objects for texts": ([_node(1, "FastARSweep", widgets_values=[{"a": 1}, [2], None])], [], {}),
    "numbers for lists": (
        [_node(1, "FastARMARSampler", widgets_values=3, properties={"fastar_text": {"a": 1}})],
        [],
        {},
    ),
    "an App without its inputs": (
        [_node(1, "FastARLoadMAR")],
        [],
        {"linearData": {"inputs": [5, None, [1], ["x", 2]]}},
    ),
    "an App with a name for its inputs": ([_node(1, "FastARLoadMAR")], [], {"linearData": {"inputs": {"a": 1}}}),
    "a reroute without sockets": (
        [
            _node(1, "FastARMARSampler", inputs=[{"name": "model", "type": "FASTAR_MAR", "link": 3}]),
            _node(2, "Reroute", outputs=[{"name": "", "type": "*", "links": [3]}]),
        ],
        [[3, 2, 0, 1, 0, "FASTAR_MAR"]],
        {},
    ),
}


def test_malformed_graphs_raise_nothing_in_our_scripts(editor):
    """An exception in a hook for the whole graph would stop it for the graph's other nodes."""
    ours: list[str] = []

    def keep(message: Any) -> None:
        if message.type == "error" and ("FastAR" in message.text or "fastar" in message.text):
            ours.append(message.text)

    editor.on("console", keep)
    for name, (nodes, links, extra) in MALFORMED.items():
        graph = {"last_node_id": 9, "last_link_id": 9, "nodes": nodes, "links": links, "groups": [], "extra": extra}
        editor.evaluate("graph => app.loadGraphData(graph).catch(() => 0)", {**graph, "config": {}, "version": 0.4})
        editor.wait_for_timeout(500)
        editor.evaluate("app.graphToPrompt().then(() => 0, () => 0)")
        assert not ours, name
    assert not editor.problems


# Saved lists of values from when these nodes had more widgets: those of a new node, but for what is removed.
_CURVE = [7, "fixed", "custom", 11, 12, 2.5, "linear", 0.8, "raster", 950, 13, "cosine", 4, 5]
_CACHES = ["custom", 3, 2, 0.25, "constant", "random", False, True, False, True, 2, 7]
_PERIOD = ["custom", 3, 2, 0.25, "constant", "random", False, True, False, True, 4, 9]
# Of FastHybrid the curve went first: the values before it, and those after it.
_FASTHYBRID = [7, "fixed", True, "custom", 11, 12, 2.5, 4, 0.95, 5, "linear", 0.8, "raster", 950, 13]
_LATER = ["square", "keep", 2, True, 0.5, 5]
_BEFORE_STAGES = [7, "fixed", True, "custom", 32, 50, 3.0, 2, 0.1, "linear", 1.0, "random", 950, 20, 0.6, 5]
VALUES_OF = "id => Object.fromEntries(app.graph.getNodeById(id).widgets.map(w => [w.name, w.value]))"


def test_a_graph_from_before_a_widget_was_removed_opens(editor):
    socket = {
        "name": "diffusion_steps_curve",
        "type": "COMBO",
        "widget": {"name": "diffusion_steps_curve"},
        "link": None,
    }
    nodes = [
        _node(1, "FastARMARSampler", widgets_values=_CURVE, inputs=[socket]),
        _node(2, "FastARLazyMARCache", widgets_values=_CACHES),
        _node(3, "FastARLazyMARCache", widgets_values=_PERIOD),
        _node(4, "FastARFastHybridSampler", widgets_values=[*_FASTHYBRID, *_LATER]),
        _node(5, "FastARFastHybridSampler", widgets_values=[*_FASTHYBRID, "linear", *_LATER]),
        _node(6, "FastARGtRSampler", widgets_values=_BEFORE_STAGES),
        _node(7, "FastARGtRSampler", widgets_values=[*_BEFORE_STAGES[:14], "linear", *_BEFORE_STAGES[14:]]),
    ]
    graph = {"last_node_id": 9, "last_link_id": 9, "nodes": nodes, "links": [], "groups": [], "extra": {}}
    editor.evaluate("graph => app.loadGraphData(graph)", {**graph, "config": {}, "version": 0.4})
    editor.wait_for_timeout(1500)

    found = editor.evaluate(VALUES_OF, 1)
    wanted = {"seed": 7, "preset": "custom", "steps": 11, "diffusion_steps": 12, "cfg": 2.5, "temperature": 0.8}
    wanted |= {"order": "raster", "t_max": 950, "diffusion_steps_end": 13, "speculation": 4, "first_image": 5}
    assert {name: found[name] for name in wanted} == wanted and "diffusion_steps_curve" not in found
    assert not editor.evaluate("app.graph.getNodeById(1).inputs.some(i => i.name === 'diffusion_steps_curve')")
    found = editor.evaluate(VALUES_OF, 2)
    assert (found["refresh_period"], found["selection"], found["encoder_cache"]) == (3, "random", True)
    wanted = {"threshold": 0.95, "diffusion_steps_end": 13, "guidance_schedule": "square", "accepted": "keep"}
    wanted |= {"lookahead_start": 2, "denoise": 0.5, "first_image": 5}
    for number in (4, 5):
        found = editor.evaluate(VALUES_OF, number)
        assert {name: found[name] for name in wanted} == wanted and "align_lookaheads" not in found
    for gtr in (6, 7):  # saved before the setting stages came, and before another one went
        found = editor.evaluate(VALUES_OF, gtr)
        assert (found["steps"], found["first_share"], found["first_image"]) == (32, 0.6, 5)
        assert found["stages"] == "quarters"

    # What was set to another value is said once; a saved graph is then one of today.
    (told,) = editor.evaluate("[...document.querySelectorAll('.fastar-message')].map(m => m.innerText)")
    assert "diffusion_steps_curve cosine (MAR Sampler), head_period 9 (LazyMAR Cache)" in told and "block" not in told
    assert told.count("align_lookaheads true (FastHybrid Sampler; the images of a batch advance independently") == 2
    saved = editor.evaluate("app.graph.serialize()")
    editor.evaluate("graph => app.loadGraphData(graph)", saved)
    editor.wait_for_timeout(1500)
    assert editor.evaluate(VALUES_OF, 1)["first_image"] == 5
    assert editor.evaluate(VALUES_OF, 7)["stages"] == "quarters"
    assert not editor.evaluate("document.querySelectorAll('.fastar-message').length")
    _no_complaint(editor)


@pytest.fixture(params=["zh", "ja"])
def translated(request: Any, comfy: Comfy) -> Any:
    """A language of the editor, which the fixture ``editor`` forgets."""
    comfy.post("/settings", {"Comfy.Locale": request.param})
    return request.param


def test_names_and_tooltips_are_translated(translated, comfy, editor, artifacts):
    names = json.loads((ROOT / "locales" / translated / "nodeDefs.json").read_text(encoding="utf-8"))
    editor.evaluate(ADD, "FastARFastHybridSampler")
    editor.wait_for_timeout(1500)
    titles = editor.evaluate(
        "Object.fromEntries(['FastARFastHybridSampler', 'FastARCompare'].map(t => [t, LiteGraph.createNode(t).title]))"
    )
    assert titles == {node: names[node]["display_name"] for node in titles}
    about = names["FastARFastHybridSampler"]
    at = editor.evaluate(SELECT, ["FastARFastHybridSampler", True])
    editor.wait_for_timeout(1000)
    if editor.renderer == "vue":
        editor.locator(f'[data-node-id="{at["id"]}"]').get_by_text(
            about["inputs"]["preset"]["name"], exact=True
        ).first.hover()
    else:
        editor.mouse.move(*at["preset"])
    editor.wait_for_timeout(2000)
    tooltip = about["inputs"]["preset"]["tooltip"]
    editor.screenshot(path=str(artifacts / f"tooltip {translated}_{editor.renderer}.png"))
    assert tooltip in editor.locator("body").inner_text().replace("\n", " ")
    _no_complaint(editor)


# Core's Compare Images with a red and a blue image, beside a node of ours.
TWO_IMAGES = """async inside => {
    const nodes = []
    const add = (type, x, y) => {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        node.pos = [x, y]
        nodes.push(node)
        return node
    }
    const compare = add('ImageCompare', 400, 100)
    add('FastARClassLabel', 400, 600)
    for (const [k, colour] of [0xff0000, 0x0000ff].entries()) {
        const image = add('EmptyImage', 0, 100 + 250 * k)
        for (const [name, value] of Object.entries({width: 64, height: 64, color: colour}))
            image.widgets.find(w => w.name === name).value = value
        image.connect(0, compare, compare.inputs.findIndex(i => i.name === ['image_a', 'image_b'][k]))
    }
    if (inside) app.canvas.setGraph(app.graph.convertToSubgraph(new Set(nodes)).subgraph)
    const shown = app.canvas.graph.nodes.find(node => node.type === 'ImageCompare')
    app.canvas.ds.scale = 1
    app.canvas.centerOnNode(shown)
    return shown.id
}"""
# The middle of the node's lower half on the screen.
MIDDLE = """id => {
    const {pos, size} = app.canvas.graph.getNodeById(id), {scale, offset} = app.canvas.ds
    const box = app.canvas.canvas.getBoundingClientRect()
    return [(pos[0] + size[0] / 2 + offset[0]) * scale + box.x, (pos[1] + size[1] / 2 + offset[1]) * scale + box.y]
}"""


@pytest.mark.parametrize("inside", [False, True], ids=["in a graph", "in a subgraph"])
def test_two_images_are_compared_with_a_divider(comfy: Comfy, editor: Any, artifacts: Path, inside: bool) -> None:
    """Core's node shows them in Nodes 2.0 only; web/js/slider.js does in the classic renderer."""
    editor.set_viewport_size({"width": 1200, "height": 800})
    node = editor.evaluate(TWO_IMAGES, inside)
    assert not comfy.failure(_run(comfy, editor))
    x, y = editor.evaluate(MIDDLE, node)

    def colours(name: str) -> list[str]:
        """What stands on both sides of the middle."""
        path = artifacts / f"divider {name}{' of a subgraph' * inside}_{editor.renderer}.png"
        editor.screenshot(path=str(path))
        shown = Image.open(path).convert("RGB")
        names = {(255, 0, 0): "red", (0, 0, 255): "blue"}
        return [names.get(shown.getpixel((round(x + side), round(y))), "other") for side in (-60, 60)]

    editor.mouse.move(x, y)
    end = time.monotonic() + 20
    middle = colours("in the middle")
    while "other" in middle and time.monotonic() < end:  # the editor has not loaded them yet
        editor.wait_for_timeout(500)
        middle = colours("in the middle")
    editor.mouse.move(x + 100, y, steps=5)
    editor.wait_for_timeout(1000)
    right = colours("on the right")
    assert (middle, right) == (["red", "blue"], ["red", "red"])
    _no_complaint(editor)


NAMES = """async (name) => {
  const made = {}
  for (const type of ["SaveImage", "FastARTimeLapse"]) {
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    node.widgets.find((widget) => widget.name === "filename_prefix").value = name
  }
  const nodes = Object.values((await app.graphToPrompt()).output)
  return Object.fromEntries(nodes.map((node) => [node.class_type, node.inputs.filename_prefix]))
}"""


def test_dates_and_values_in_the_name_of_a_time_lapse_are_replaced_as_in_save_image(editor):
    sent = editor.evaluate(NAMES, "%date:yyyy%/x_%date:MM-dd%_%Time-lapse.duration%_%year%_%no.such%")
    assert re.fullmatch(r"\d{4}/x_\d\d-\d\d_4_%year%_%no\.such%", sent["FastARTimeLapse"])
    assert sent["FastARTimeLapse"] == sent["SaveImage"]
