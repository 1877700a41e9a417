"""The shared workflows in ComfyUI's own editor: opened, run with the Run button, looked at. Both renderers.

Needs playwright and a Chromium ($CHROMIUM, or one on the path). Screenshots and results go to $FASTAR_ARTIFACTS.
"""

import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfy_host import APPS, ROOT, TEMPLATES, Comfy, load_workflow, one_image, to_api
from fastar_nodes.runs.choice import names_of_settings
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.sweeps.plan import SUBJECTS
from flat_graphs import flat

playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED IN A BROWSER: playwright is not installed")

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
READY = """() => Boolean(window.app?.graph && window.app.extensionManager
    && Object.keys(LiteGraph.registered_node_types).length > 50)"""
# Where nodes are, in the units of the graph and with title bars, which lie above a node's position. In Nodes 2.0 the
# screen knows; the classic renderer draws nodes at their sizes, a collapsed one as its title bar.
BOXES = """() => app.graph._nodes.map(node => {
    const {scale, offset} = app.canvas.ds, canvas = app.canvas.canvas.getBoundingClientRect()
    const about = {type: node.title ?? node.type}
    const shown = document.querySelector(`[data-node-id="${node.id}"]`)?.getBoundingClientRect()
    if (shown)
        return {...about, x: (shown.x - canvas.x) / scale - offset[0], y: (shown.y - canvas.y) / scale - offset[1],
            w: shown.width / scale, h: shown.height / scale}
    const collapsed = node.flags.collapsed
    return {...about, x: node.pos[0], y: node.pos[1] - 30, w: collapsed ? node._collapsed_width ?? 80 : node.size[0],
        h: (collapsed ? 0 : node.size[1]) + 30}
})"""
# What is not in the window, or lies under the editor's side bar or top bar; their titles.
HIDDEN = """boxes => {
    const {scale, offset} = app.canvas.ds, canvas = app.canvas.canvas.getBoundingClientRect()
    const side = document.querySelector('.side-tool-bar-container')?.getBoundingClientRect()
    const top = document.querySelector('.workflow-tabs-container')?.getBoundingClientRect()
    return boxes.filter(box => {
        const x = (box.x + offset[0]) * scale + canvas.x, y = (box.y + offset[1]) * scale + canvas.y
        return x < (side?.right ?? 0) || y < (top?.bottom ?? 0) || x + box.w * scale > innerWidth
            || y + box.h * scale > innerHeight
    }).map(box => box.type)
}"""
# Nodes and groups that lie under the editor's button "Graph"; their titles.
UNDER_BUTTON = """boxes => {
    const isIt = b => b.innerText.trim() === 'Graph' && b.checkVisibility()
    const button = [...document.querySelectorAll('button')].find(isIt)
    if (!button) return []
    const {scale, offset} = app.canvas.ds, canvas = app.canvas.canvas.getBoundingClientRect()
    const about = button.getBoundingClientRect()
    const boxOf = ({title, pos: [x, y], size: [w, h]}) => ({type: title, x, y, w, h})
    const groups = app.graph._groups.map(boxOf)
    return [...boxes, ...groups].filter(box => {
        const x = (box.x + offset[0]) * scale + canvas.x, y = (box.y + offset[1]) * scale + canvas.y
        return x < about.right && x + box.w * scale > about.left && y < about.bottom && y + box.h * scale > about.top
    }).map(box => box.type)
}"""
# Nodes of which the editor's minimap covers more than the border, which is at most 16 pixels; their titles.
UNDER_MINIMAP = """boxes => {
    const map = document.querySelector('.minimap-main-container')?.getBoundingClientRect()
    if (!map) return []
    const {scale, offset} = app.canvas.ds, canvas = app.canvas.canvas.getBoundingClientRect()
    return boxes.filter(box => {
        const right = (box.x + box.w + offset[0]) * scale + canvas.x
        const bottom = (box.y + box.h + offset[1]) * scale + canvas.y
        return right > map.left + 16 && bottom > map.top + 16
    }).map(box => box.type)
}"""


# Widgets on open nodes of subgraphs that are not on the screen: the names that should be read there.
UNSEEN = """() => app.graph._nodes.filter(node => node.subgraph && !node.collapsed).flatMap(node => {
    const shown = document.querySelector(`[data-node-id="${node.id}"]`)
    const isSeen = widget => shown ? shown.innerText.includes(widget.label ?? widget.name)
        : node.isWidgetVisible?.(widget) ?? !widget.hidden
    return node.widgets.filter(widget => widget.name !== 'last run' && !isSeen(widget)).map(widget => widget.name)
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that can reach this machine only."""
    if not CHROMIUM:
        pytest.skip("NOT TESTED IN A BROWSER: no chromium on the path; set CHROMIUM")
    switches = "no-sandbox disable-gpu disable-background-networking disable-component-update no-first-run disable-sync"
    options = [f"--{name}" for name in f"{switches} disable-dev-shm-usage".split()]
    options.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(params=[False, True], ids=["litegraph", "vue"])
def editor(request: Any, comfy: Comfy, browser: Any) -> Iterator[Any]:
    """The editor of a new user with an empty graph, in one renderer; what the page complains about is collected
    in ``page.problems``.
    """
    comfy.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": request.param})
    page = browser.new_context(viewport={"width": 1920, "height": 1080}).new_page()
    page.problems = []
    page.goto(comfy.url, wait_until="domcontentloaded")
    page.wait_for_function(READY, timeout=90000)
    page.wait_for_timeout(2500)
    page.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.renderer = "vue" if request.param else "litegraph"
    yield page
    page.context.close()
    # What a failed test left behind must not be taken for the next one's.
    comfy.post("/queue", {"clear": True})
    comfy.post("/interrupt", {})
    # The editor saves an opened panel or another language for the next visit.
    comfy.forget_settings()


# What many have. The zoom at which the editor opens a template
# depends on it: the nodes take three quarters of the window.
LAPTOP = {"width": 1366, "height": 768}
WIDER = {"width": 1600, "height": 900}
DESKTOP = {"width": 1920, "height": 1080}
# Texts of nodes that stand on the screen.
SEEN = """() => [...document.querySelectorAll('textarea')].filter(
    area => area.readOnly && area.checkVisibility()).map(area => area.value).join('|')"""
# Whether the canvas has followed the window's size.
FILLED = """() => {
    const {width, height} = app.canvas.canvas.getBoundingClientRect()
    const drawn = app.canvas.canvas.width / devicePixelRatio
    return width <= innerWidth && width > innerWidth - 100 && height <= innerHeight && height > innerHeight - 150
        && Math.abs(drawn - width) < 2
}"""
OPENED = "app.canvas.ds.scale"
OPEN_TEMPLATE = "([graph, name]) => app.loadGraphData(graph, true, true, name, {openSource: 'template'})"


# A message of the editor; the second since frontend 1.58.
EDITORS = ".p-toast-message, [data-testid=toast][data-toast-kind=error]"
# A message of web/js/errors.js.
MESSAGE = ".fastar-message"
TOAST = f"{EDITORS}, {MESSAGE}"
# Whether one thing on the screen covers another, and the node's rectangle with its title bar.
COVERS = """([selector, id]) => {
    const node = app.graph.getNodeById(id), {scale, offset} = app.canvas.ds
    const box = app.canvas.canvas.getBoundingClientRect()
    const [x, y] = [(node.pos[0] + offset[0]) * scale + box.x, (node.pos[1] - 30 + offset[1]) * scale + box.y]
    const [w, h] = [node.size[0] * scale, (node.size[1] + 30) * scale]
    const about = document.querySelector(selector).getBoundingClientRect()
    return about.left < x + w && x < about.right && about.top < y + h && y < about.bottom
}"""


def _no_complaint(page: Any) -> None:
    assert page.locator(TOAST).all_inner_texts() == []
    assert page.locator("[role=dialog]").all_inner_texts() == []
    assert page.problems == []


def _overlaps(boxes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    sides = (("x", "w"), ("y", "h"))
    return [
        (a["type"], b["type"])
        for a, b in itertools.combinations(boxes, 2)
        if all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in sides)
    ]


# Width on the screen of the image that a node shows. The classic renderer draws none larger than it is.
DRAWN = """id => {
    const fit = (box, image) => Math.min(box[0], box[1] * image.naturalWidth / image.naturalHeight)
    const image = document.querySelector(`[data-node-id="${id}"] img`), about = image?.getBoundingClientRect()
    if (image) return fit([about.width, about.height], image)
    const node = app.graph.getNodeById(id), preview = node.widgets.find(w => w.name.includes('image-preview'))
    const shown = fit([node.size[0], preview.computedHeight], node.imgs[0])
    return app.canvas.ds.scale * Math.min(node.imgs[0].naturalWidth, shown)
}"""


def _run(comfy: Comfy, page: Any) -> dict[str, Any]:
    """Press Run, with nothing cached; the history entry of what came of it."""
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    before = set(comfy.get("/history"))
    page.get_by_role("button", name="Run", exact=True).first.click()  # the second opens a menu
    end = time.monotonic() + 300
    while time.monotonic() < end:
        page.wait_for_timeout(250)
        for key in set(comfy.get("/history")) - before:
            return comfy.wait(key)
    raise TimeoutError(f"nothing ran; toasts: {page.locator(TOAST).all_inner_texts()}")


def _open(page: Any, name: str, window: dict[str, int]) -> None:
    """Open a template in a window of this size, and look at how it lies there.

    With a new id and name: of a graph that was open before, the editor restores the view.
    """
    page.set_viewport_size(window)
    page.wait_for_function(FILLED)
    graph = {**load_workflow(name), "id": str(uuid.uuid4())}
    page.evaluate(OPEN_TEMPLATE, [graph, f"{name} at {window['width']}"])
    page.wait_for_timeout(2500)
    _looks_well(page)


def _looks_well(page: Any) -> None:
    """Text is drawn, everything is in the window, and neither a node nor the minimap covers a node."""
    assert page.evaluate(OPENED) >= 0.6, "below, the classic renderer draws no text"
    boxes = page.evaluate(BOXES)
    assert page.evaluate(HIDDEN, boxes) == []
    assert _overlaps(boxes) == []
    assert page.evaluate(UNDER_BUTTON, boxes) == []
    assert page.evaluate(UNDER_MINIMAP, boxes) == []


def _without_images_that_nobody_chose(prompt: dict[str, Any]) -> dict[str, Any]:
    """As web/js/unused.js leaves them out: the switch gets the other side twice."""
    empty = [key for key, node in prompt.items() if node["inputs"].get("image") == ""]
    for node in prompt.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in empty:
                assert (node["class_type"], name, node["inputs"]["switch"]) == ("ComfySwitchNode", "on_true", False)
                node["inputs"][name] = node["inputs"]["on_false"]
    return {key: node for key, node in prompt.items() if key not in empty}


def _sends_what_the_file_says(page: Any, workflow: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """The prompt of the editor is that of the HTTP tests, but for the numbers that a preset sets."""
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    expected = _without_images_that_nobody_chose(to_api(workflow, info))
    assert prompt.keys() == expected.keys()
    for key, node in expected.items():
        sent, wanted = prompt[key]["inputs"], node["inputs"]
        if wanted.get("preset", "custom") != "custom":
            wanted = {name: value for name, value in wanted.items() if name in sent}
        inputs = {name: value for name, value in sent.items() if name in wanted}
        assert (prompt[key]["class_type"], inputs) == (node["class_type"], wanted)
    return prompt


def _comparison(workflow: dict[str, Any]) -> int | None:
    """Id of the node that shows a comparison's image; None if the graph compares nothing, or shows all its wires."""
    compares = "FastARCompare" in {node["type"] for node in flat(workflow)["nodes"]} and "definitions" in workflow
    shown = [node for node in workflow["nodes"] if node["type"] in ("SaveImage", "PreviewImage")]
    return max(shown, key=lambda node: node["size"][0])["id"] if compares and shown else None


def _figures_of_note(workflow: dict[str, Any]) -> list[str]:
    """The passes and calls that the first paragraph of a template's note promises for its first run: "53 passes"."""
    notes = [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    first = [note.split("\n\n")[0].replace("*", "") for note in notes]
    return re.findall(r"\d[\d,]* (?:passes|diffusion calls)", " ".join(first))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_reads_on_a_laptop_and_runs(comfy, editor, info, name, artifacts):
    workflow = load_workflow(name)
    _open(editor, name, DESKTOP)
    editor.screenshot(path=str(artifacts / f"{name}_{editor.renderer}_1920.png"))
    _open(editor, name, WIDER)
    editor.screenshot(path=str(artifacts / f"{name}_{editor.renderer}_1600.png"))
    _open(editor, name, LAPTOP)
    editor.screenshot(path=str(artifacts / f"{name}_{editor.renderer}_1366.png"))
    opened = editor.evaluate("app.graph._nodes.map(node => String(node.id))")
    assert sorted(opened) == sorted(str(node["id"]) for node in workflow["nodes"])
    assert editor.evaluate(UNSEEN) == []
    prompt = _sends_what_the_file_says(editor, workflow, info)
    (artifacts / f"{name}.api.json").write_text(json.dumps(prompt, indent=1), encoding="utf-8")

    entry = _run(comfy, editor)
    assert not comfy.failure(entry)
    editor.wait_for_timeout(2500)
    editor.screenshot(path=str(artifacts / f"{name}_{editor.renderer}_ran.png"))
    _no_complaint(editor)
    if not _keeps_previews(editor):
        _looks_well(editor)
    if _comparison(workflow):
        assert editor.evaluate(DRAWN, _comparison(workflow)) >= 380
    told = json.dumps(entry["outputs"])
    assert [figure for figure in _figures_of_note(workflow) if figure not in told] == []
    shown = [image for output in entry["outputs"].values() for image in output.get("images", [])]
    assert shown and all(np.asarray(comfy.picture(image)).std() > 5 for image in shown)


def _keeps_previews(page: Any) -> bool:
    """Whether the node of a sub-graph keeps the last preview of its samplers, which makes it taller: Nodes 2.0 since
    frontend 1.58.
    """
    version = page.evaluate("window.__COMFYUI_FRONTEND_VERSION__ ?? ''").split(".")
    return page.renderer == "vue" and len(version) > 1 and int(version[1]) >= 58


def test_a_mistake_is_told_in_the_editor(comfy: Comfy, editor: Any, workflow: Any, artifacts: Path) -> None:
    """Before anything runs, without a click and without a stack trace."""
    wrong = json.loads(json.dumps(workflow))
    labels = next(n for n in wrong["nodes"] if n["type"] == "FastARClassLabel")
    labels["widgets_values"][0] = "catt"
    editor.evaluate("graph => app.loadGraphData(graph)", wrong)
    editor.wait_for_timeout(1000)
    before = comfy.get("/history")
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.wait_for_timeout(2500)
    editor.screenshot(path=str(artifacts / f"mistake_{editor.renderer}.png"))
    assert comfy.get("/history") == before, "it ran"
    (told,) = editor.locator(MESSAGE).all_inner_texts()
    assert "Class Label" in told and "labels: there is no class 'catt'; the closest names: cat" in told
    assert "imagenet" not in told, "the demo has ten classes of its own"
    assert "Traceback" not in editor.locator("body").inner_text()
    assert not editor.evaluate(COVERS, [MESSAGE, labels["id"]])
    editor.wait_for_timeout(10000)
    assert editor.locator(MESSAGE).count() == 1, "it stays until somebody has seen it"
    editor.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    editor.wait_for_timeout(500)
    assert editor.locator(MESSAGE).count() == 0, "it is about another graph"


ADD_AN_IMAGE = """() => {
    const [source, shown] = ['EmptyImage', 'PreviewImage'].map(type => LiteGraph.createNode(type))
    for (const node of [source, shown]) app.graph.add(node)
    source.connect(0, shown, 0)
}"""


def test_a_message_stays_while_another_output_of_the_graph_runs(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    wrong = one_image()
    next(n for n in wrong["nodes"] if n["type"] == "FastARClassLabel")["widgets_values"][0] = "dog"
    editor.evaluate("graph => app.loadGraphData(graph)", wrong)
    editor.evaluate(ADD_AN_IMAGE)
    editor.wait_for_timeout(1000)
    entry = _run(comfy, editor)
    assert not comfy.failure(entry), "the image is drawn"
    editor.wait_for_timeout(1000)
    editor.screenshot(path=str(artifacts / f"mistake beside a result_{editor.renderer}.png"))
    (told,) = editor.locator(MESSAGE).all_inner_texts()
    assert "labels: there is no class 'dog'; the demo has sunset, " in told


# What is wrong: node type, and values by widget; and the sentence. The first two are ComfyUI's own checks. The editor
# sends numbers only with the preset custom.
REFUSED = {
    "a number": (
        "FastARMARSampler",
        {"preset": "custom", "steps": 100000},
        "steps: Value 100000 bigger than max of 4096",
    ),
    "a choice": (
        "FastARMARSampler",
        {"preset": "best"},
        "preset: 'best' not in ['recommended', 'few steps', 'custom']",
    ),
    "a file": ("FastARLoadMAR", {"checkpoint": "mine.pt"}, "checkpoint: "),
}
SET = """([type, name, value]) => {
    app.graph._nodes.find(node => node.type === type).widgets.find(widget => widget.name === name).value = value
}"""


def test_every_refusal_before_a_run_is_told(comfy: Comfy, editor: Any) -> None:
    for kind, values, sentence in REFUSED.values():
        editor.evaluate("graph => app.loadGraphData(graph)", one_image())
        editor.wait_for_timeout(1000)
        for name, value in values.items():
            editor.evaluate(SET, [kind, name, value])
        editor.evaluate("() => void app.queuePrompt(0, 1)")
        told = editor.locator(MESSAGE)
        told.wait_for(timeout=10000)
        assert sentence in told.inner_text()


ADD_A_PROMPT = """() => {
    const [source, shown] = ['FastARTarPrompt', 'PreviewAny'].map(type => LiteGraph.createNode(type))
    for (const node of [source, shown]) app.graph.add(node)
    source.connect(0, shown, 0)
}"""


def test_a_missing_socket_is_told_with_what_to_connect(editor: Any) -> None:
    """Whoever drags a condition into the canvas may take Tar Prompt for a LlamaGen."""
    editor.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    editor.evaluate(ADD_A_PROMPT)
    editor.evaluate("() => void app.queuePrompt(0, 1)")
    told = editor.locator(MESSAGE)
    told.wait_for(timeout=10000)
    assert "tar: Required input is missing. The language model, from Load Tar. For a LlamaGen, use Class Label" in (
        told.inner_text()
    )


@pytest.mark.parametrize("shown_as", ["graph", "App"])
def test_an_image_that_was_not_chosen_is_asked_for(comfy, editor, shown_as, artifacts):
    """Load Image would say [Errno 21] Is a directory."""
    workflow = load_workflow("05 Inpaint")
    switch = next(n for n in workflow["nodes"] if n.get("title") == "Example or your own image")
    switch["widgets_values"] = [True]
    before = comfy.get("/history")
    editor.evaluate(OPEN_TEMPLATE, [workflow, "05 Inpaint"])
    editor.wait_for_timeout(1500)
    if shown_as == "App":
        open_app(editor)
    editor.evaluate("() => void app.queuePrompt(0, 1)")
    editor.locator(MESSAGE).wait_for(timeout=10000)
    editor.screenshot(path=str(artifacts / f"no image in the {shown_as}_{editor.renderer}.png"))
    assert "'Your own image' has no file; choose or upload an image there" in editor.locator(MESSAGE).inner_text()
    assert comfy.get("/history") == before and "Errno" not in editor.locator("body").inner_text()


def test_a_message_gives_way_to_the_mask_editor_and_to_the_next_run(comfy, editor, artifacts):
    """An image whose mask is empty: it is told until one paints, and again if nothing was painted."""
    workflow = load_workflow("05 Inpaint")
    next(n for n in workflow["nodes"] if n.get("title") == "Example or your own image")["widgets_values"] = [True]
    own = next(n for n in workflow["nodes"] if n["type"] == "LoadImage")
    own["widgets_values"] = ["example.png", "image"]
    editor.set_viewport_size(LAPTOP)
    editor.evaluate(OPEN_TEMPLATE, [workflow, "05 Inpaint"])
    editor.wait_for_timeout(1500)
    message = editor.locator(MESSAGE)
    for _ in range(2):
        editor.get_by_role("button", name="Run", exact=True).first.click()
        message.filter(has_text="mask: it is empty").wait_for(timeout=60000)
        editor.evaluate("id => app.canvas.select(app.graph.getNodeById(id))", own["id"])
        editor.evaluate("void app.extensionManager.command.execute('Comfy.MaskEditor.OpenMaskEditor')")
        editor.locator("#maskEditorCanvasContainer").wait_for(timeout=20000)
        editor.wait_for_timeout(1500)
        editor.screenshot(path=str(artifacts / f"message and MaskEditor_{editor.renderer}.png"))
        assert message.count() == 0
        editor.get_by_text("Cancel", exact=True).click()
        editor.locator("#maskEditorCanvasContainer").wait_for(state="detached")

    # The next run removes it at once, before the server answers.
    editor.get_by_role("button", name="Run", exact=True).first.click()
    message.wait_for(timeout=60000)
    editor.route("**/prompt", lambda route: None)
    editor.get_by_role("button", name="Run", exact=True).first.click()
    message.wait_for(state="detached", timeout=10000)


# Moves a node so that a message of this size at the bottom of the screen would cover it.
TO_THE_BOTTOM = """type => {
    const node = app.graph._nodes.find(n => n.type === type), {scale, offset} = app.canvas.ds
    const box = app.canvas.canvas.getBoundingClientRect()
    const left = innerWidth / 2 / scale - offset[0] - node.size[0] / 2
    const top = (innerHeight - box.y) / scale - offset[1] - node.size[1] - 10
    node.pos = [left, top]
    return node.id
}"""


def test_a_message_covers_neither_the_node_nor_other_messages_and_ends_with_the_next_run(comfy, editor, artifacts):
    """A node in a subgraph that is refused: one message, which names both titles."""
    blueprint = json.loads((ROOT / "subgraphs" / "Inpaint (MAR).json").read_text(encoding="utf-8"))
    editor.set_viewport_size({"width": 1366, "height": 768})
    editor.evaluate("graph => app.loadGraphData(graph)", blueprint)
    editor.wait_for_timeout(1500)
    title = editor.evaluate("app.graph._nodes[0].title")
    inner = """text => {
        const outer = app.graph._nodes[0]
        for (const node of outer.subgraph.nodes)
            if (node.type === 'FastARClassLabel') node.widgets.find(w => w.name === 'labels').value = text
        for (const widget of outer.widgets) if (widget.name === 'labels') widget.value = text
        for (const [type, input] of [['EmptyImage', 'image'], ['SolidMask', 'mask']]) {
            const source = LiteGraph.createNode(type)
            app.graph.add(source)
            source.connect(0, outer, outer.inputs.findIndex(i => i.name === input))
        }
        const saved = LiteGraph.createNode('PreviewImage')
        app.graph.add(saved)
        outer.connect(0, saved, 0)
    }"""
    editor.evaluate(inner, "catt")
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.wait_for_timeout(2500)
    editor.screenshot(path=str(artifacts / f"mistake in a subgraph_{editor.renderer}.png"))
    (told,) = editor.locator(MESSAGE).all_inner_texts()
    assert f"{title} > Class Label" in told and "labels: there is no class 'catt'" in told
    editor.locator(MESSAGE).click()
    assert editor.locator(MESSAGE).count() == 0, "a click removes it"

    # A node where the message would be.
    wrong = one_image()
    label = next(n for n in wrong["nodes"] if n["type"] == "FastARClassLabel")
    label["widgets_values"][0] = "catt"
    editor.evaluate("graph => app.loadGraphData(graph)", wrong)
    editor.wait_for_timeout(1500)
    node = editor.evaluate(TO_THE_BOTTOM, "FastARClassLabel")
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.wait_for_timeout(2000)
    editor.screenshot(path=str(artifacts / f"mistake at the bottom_{editor.renderer}.png"))
    assert editor.locator(MESSAGE).count() == 1
    assert not editor.evaluate(COVERS, [MESSAGE, node])

    # Mended, the next run removes it.
    mend = "id => { app.graph.getNodeById(id).widgets.find(w => w.name === 'labels').value = 'cat' }"
    editor.evaluate(mend, node)
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.wait_for_timeout(1000)
    assert editor.locator(MESSAGE).count() == 0


WIRE_A_TEXT = """text => {
    const source = LiteGraph.createNode('PrimitiveString')
    app.graph.add(source)
    source.widgets[0].value = text
    const label = app.graph._nodes.find(n => n.type === 'FastARClassLabel')
    source.connect(0, label, label.inputs.findIndex(i => i.name === 'labels'))
    return label.id
}"""


def test_a_mistake_at_run_time_is_told_without_a_stack_trace(comfy, editor, workflow, artifacts):
    """The sentence at once, of the node that is wrong. Only the
    editor's report has the trace, which a bug report needs.
    """
    editor.evaluate("graph => app.loadGraphData(graph)", one_image())
    label = editor.evaluate(WIRE_A_TEXT, "catt")
    entry = _run(comfy, editor)
    assert comfy.exception_type(entry) == "fastar.UserError"
    told = editor.locator(MESSAGE).first
    told.wait_for(timeout=10000)
    assert editor.locator(MESSAGE).count() == 1
    assert "Class Label" in told.inner_text() and "there is no class 'catt'" in told.inner_text()
    assert "Traceback" not in told.inner_text() and "execution.py" not in told.inner_text()
    editor.screenshot(path=str(artifacts / f"mistake at run time_{editor.renderer}.png"))
    editor.get_by_role("button", name="View details").first.click()  # beside the message, not under it
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"mistake at run time_{editor.renderer}_details.png"))
    report, _, _ = editor.locator("body").inner_text().partition("## Logs")  # of the server, as its console shows them
    assert "there is no class 'catt'" in report and "fastar.UserError" in report
    assert "execution.py" in report
    assert f"**Node ID:** {label}" in report


def test_a_missing_model_file_is_offered_for_download(editor, artifacts):
    """A shared graph whose loader names an official file. The graph as shipped needs none."""
    graph = one_image()
    loader = next(n for n in graph["nodes"] if n["type"] == "FastARLoadMAR")
    files = [model["name"] for model in loader["properties"]["models"]]
    editor.evaluate(OPEN_TEMPLATE, [graph, "shipped"])
    editor.wait_for_timeout(2500)
    assert editor.get_by_text("is missing").count() == 0
    loader["widgets_values"][: len(files)] = files
    editor.evaluate(OPEN_TEMPLATE, [graph, "shared"])
    editor.get_by_role("button", name="View details").first.click()
    editor.wait_for_timeout(2500)
    editor.screenshot(path=str(artifacts / f"missing model_{editor.renderer}.png"))
    assert editor.get_by_role("button", name="Download", exact=False).count() >= len(files)
    shown = editor.locator("body").inner_text().partition("Missing Models")[2]
    assert all(file in shown for file in files)


# A loader at a checkpoint and a sampler at it; where on the screen the sampler's condition is.
LOADED = """async ([loader, checkpoint, sampler]) => {
    await app.loadGraphData({nodes: [], links: [], version: 0.4})
    const from = LiteGraph.createNode(loader), to = LiteGraph.createNode(sampler)
    app.graph.add(from); app.graph.add(to)
    from.pos = [100, 500]; to.pos = [700, 300]
    if (checkpoint) from.widgets.find(w => w.name === 'checkpoint').value = checkpoint
    from.connect(0, to, to.inputs.findIndex(i => i.name === 'model'))
    app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]
    const at = to.getInputPos(to.inputs.findIndex(i => i.name === 'condition'))
    const box = app.canvas.canvas.getBoundingClientRect()
    return [at[0] + box.x, at[1] + box.y]
}"""
MAKES = {
    ("FastARLoadMAR", "", "FastARFastHybridSampler"): ["FastARClassLabel"],
    ("FastARLoadHarmon", "", "FastARFastHybridSampler"): ["FastARPrompt"],
    ("FastARLoadLlamaGen", "", "FastARPARSampler"): ["FastARClassLabel"],
    ("FastARLoadLlamaGen", "llamagen-t2i-xl-256", "FastARAnySampler"): ["FastARLlamaGenPrompt"],
    ("FastARLoadBitDance", "bitdance-14b-64x", "FastARBitDanceSampler"): ["FastARPrompt"],
    ("FastARLoadBitDance", "bitdance-b-4x", "FastARAnySampler"): ["FastARClassLabel", "FastARPrompt"],
    ("FastARLoadTarDetokenizer", "", "FastARSweep"): ["FastARTarPrompt", "FastARImageToCodes"],
}


def test_a_dropped_condition_is_offered_what_the_model_reads(editor: Any, artifacts: Path) -> None:
    for nodes, makers in MAKES.items():
        x, y = editor.evaluate(LOADED, list(nodes))
        editor.wait_for_timeout(800)
        editor.mouse.move(x, y)
        editor.mouse.down()
        editor.mouse.move(x - 100, y - 50, steps=5)
        editor.mouse.move(x - 200, y - 150, steps=5)
        editor.mouse.up()
        shown = editor.locator(".litecontextmenu").last.inner_text(timeout=5000).split("\n")
        assert shown[4:] == makers, nodes
        editor.screenshot(path=str(artifacts / f"suggestions_{editor.renderer}.png"))
        editor.locator(".litecontextmenu .litemenu-entry").last.click()
        editor.wait_for_timeout(500)
        made = editor.evaluate("app.graph._nodes.filter(n => n.outputs.some(o => o.links?.length)).map(n => n.type)")
        assert sorted(made) == sorted([nodes[0], makers[-1]])
    colours = editor.evaluate("Object.values(app.canvas.default_connection_color_byType).filter(Boolean)")
    assert {"#8fb8de", "#7fd1ae", "#e08fa8", "#f2b263"} <= {*colours}


# Loaders with the nodes that are offered first for their model, and then for its condition.
FIRST = {
    ("FastARLoadMAR", "demo"): ("FastARMARSampler", "FastARClassLabel"),
    ("FastARLoadHarmon", "demo-hybrid"): ("FastARMARSampler", "FastARPrompt"),
    ("FastARLoadLlamaGen", "demo-llamagen"): ("FastARLlamaGenSampler", "FastARClassLabel"),
    ("FastARLoadLlamaGen", "demo-par"): ("FastARPARSampler", "FastARClassLabel"),
    ("FastARLoadJanus", "Janus-Pro-1B"): ("FastARLlamaGenSampler", "FastARPrompt"),
    ("FastARLoadTarDetokenizer", "demo-dtok"): ("FastARLlamaGenSampler", "FastARTarPrompt"),
    ("FastARLoadBitDance", "demo-bitdance"): ("FastARBitDanceSampler", "FastARClassLabel"),
}
A_LOADER = """async ([loader, checkpoint]) => {
    await app.loadGraphData({nodes: [], links: [], version: 0.4})
    const node = LiteGraph.createNode(loader)
    app.graph.add(node)
    node.pos = [100, 300]
    node.widgets.find(w => w.name === 'checkpoint').value = checkpoint
    app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]
}"""
# Where on the screen a socket of the newest node is: its first output, or its input of a name.
SOCKET = """name => {
    const node = app.graph._nodes.at(-1), box = app.canvas.canvas.getBoundingClientRect()
    // The editor may move the view to a new node.
    app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]
    if (name) node.pos = [700, 150]
    const [x, y] = name ? node.getInputPos(node.inputs.findIndex(i => i.name === name)) : node.getOutputPos(0)
    return [x + box.x, y + box.y]
}"""
FINISH = """() => {
    const [loader, sampler] = app.graph._nodes
    const [decode, shown] = ['VAEDecode', 'PreviewImage'].map(type => LiteGraph.createNode(type))
    for (const node of [decode, shown]) app.graph.add(node)
    sampler.connect(0, decode, 0)
    loader.connect(1, decode, 1)
    decode.connect(0, shown, 0)
}"""


def _drop(page: Any, socket: str, across: int) -> None:
    """Drag the link of a socket of the newest node on the empty canvas, and take what is offered first."""
    x, y = page.evaluate(SOCKET, socket)
    page.wait_for_timeout(800)
    x, y = page.evaluate(SOCKET, socket)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + across / 2, y + 40, steps=5)
    page.mouse.move(x + across, y + 80, steps=5)
    page.mouse.up()
    page.locator("[role=dialog]").last.wait_for(timeout=10_000)
    page.wait_for_timeout(500)
    page.keyboard.press("Enter")
    page.wait_for_timeout(800)
    # In newer editors a node follows the mouse until a click places it.
    page.mouse.click(x + across, y + 80)
    page.wait_for_timeout(300)


def test_enter_takes_the_right_node_for_a_dropped_model_and_condition(comfy: Comfy, editor: Any) -> None:
    """In the search box, which those have who installed ComfyUI since frontend 1.24. What comes of it runs."""
    editor.evaluate("app.extensionManager.setting.set('Comfy.LinkRelease.Action', 'search box')")
    for loader, (sampler, maker) in FIRST.items():
        editor.evaluate(A_LOADER, list(loader))
        _drop(editor, "", 250)
        _drop(editor, "condition", -250)
        found = editor.evaluate("app.graph._nodes.map(node => node.type)")
        assert found == [loader[0], sampler, maker], loader
        linked = editor.evaluate("app.graph._nodes[1].inputs.filter(i => i.link != null).map(i => i.name)")
        assert sorted(linked) == ["condition", "model"], loader

        if editor.renderer == "litegraph" and loader[1] in ("demo", "demo-llamagen"):
            editor.evaluate(FINISH)
            assert not comfy.failure(_run(comfy, editor))
    _no_complaint(editor)


A_SAMPLER = """async sampler => {
    await app.loadGraphData({nodes: [], links: [], version: 0.4})
    const node = LiteGraph.createNode(sampler)
    app.graph.add(node)
    node.pos = [100, 150]
    app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]
    return node.widgets.find(w => w.name === 'control_after_generate').value
}"""


@pytest.mark.parametrize("sampler", ["FastARMARSampler", "FastARLlamaGenSampler"])
def test_enter_decodes_a_dropped_latent_and_a_new_seed_is_fixed(editor: Any, sampler: str) -> None:
    """Other samplers take latents too. Two new samplers have one seed, so that they can be compared."""
    editor.evaluate("app.extensionManager.setting.set('Comfy.LinkRelease.Action', 'search box')")
    assert editor.evaluate(A_SAMPLER, sampler) == "fixed"
    _drop(editor, "", 250)
    assert editor.evaluate("app.graph._nodes.map(node => node.type)") == [sampler, "VAEDecode"]


AXES = """sampler => {
    const node = LiteGraph.createNode('FastARSweep'), [own, ...axes] = ['sampler', 'x', 'y'].map(
        name => node.widgets.find(w => w.name === name))
    own.value = sampler
    own.callback(sampler)
    return axes.map(axis => axis.options.values)
}"""


def test_sweep_lists_the_settings_of_its_sampler(editor: Any) -> None:
    for name, entry in SAMPLERS.items():
        if name == "tar":  # not on the list
            continue
        x, y = editor.evaluate(AXES, name)
        assert sorted(x) == sorted([*names_of_settings({name: entry}), *SUBJECTS]) and y == ["none", *x], name


EARLIER = Path(__file__).with_name("earlier_sweep.json")
SENT = """async graph => {
    await app.loadGraphData(graph)
    return (await app.graphToPrompt()).output
}"""


def _in_a_subgraph(saved: dict[str, Any]) -> dict[str, Any]:
    """The loader, labels, Sweep and Sweep Grid of a graph in a sub-graph, whose image is saved outside."""
    nodes = [node for node in saved["nodes"] if node["id"] in (1001, 1002, 1004, 1005)]
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    links = [dict(zip(names, link, strict=True)) for link in saved["links"] if link[0] in (1001, 1002, 1003)]
    links.append(dict(zip(names, (1005, 1005, 0, -20, 0, "IMAGE"), strict=True)))
    (save,) = [node for node in saved["nodes"] if node["type"] == "SaveImage"]
    definition = {
        **{"id": "7d5aeb0b-2f4f-4b8e-8bb4-6b4f7d3d0c11", "name": "Sweep", "version": 1, "revision": 0},
        "state": {"lastGroupId": 0, "lastNodeId": 1010, "lastLinkId": 1010, "lastRerouteId": 0},
        "inputNode": {"id": -10, "bounding": [0, 0, 120, 60]},
        "outputNode": {"id": -20, "bounding": [900, 0, 120, 60]},
        "outputs": [
            {"id": "aa5aeb0b-2f4f-4b8e-8bb4-6b4f7d3d0c12", "name": "image", "type": "IMAGE", "linkIds": [1005]}
        ],
        **{"config": {}, "inputs": [], "widgets": [], "nodes": nodes, "groups": [], "links": links, "extra": {}},
    }
    outputs = [{"name": "image", "type": "IMAGE", "links": [1006]}]
    host = {"id": 1020, "type": definition["id"], "pos": [0, 0], "size": [200, 100], "inputs": [], "outputs": outputs}
    save["inputs"][0]["link"] = 1006
    links = [[1006, 1020, 0, save["id"], 0, "IMAGE"]]
    return {**saved, "nodes": [host, save], "links": links, "groups": [], "definitions": {"subgraphs": [definition]}}


def _behind_a_reroute(saved: dict[str, Any]) -> dict[str, Any]:
    """The graph with a Reroute between Sweep and both nodes."""
    graph = json.loads(json.dumps(saved))
    sockets = {"inputs": [{"name": "", "type": "*", "link": 1099}], "outputs": [{"name": "", "type": "*", "links": []}]}
    graph["nodes"].append({"id": 1099, "type": "Reroute", "pos": [0, 0], "size": [75, 26], **sockets})
    for link in graph["links"]:
        if link[1:3] == [1004, 0]:
            link[1] = 1099
            sockets["outputs"][0]["links"].append(link[0])
    graph["links"].append([1099, 1004, 0, 1099, 0, "*"])
    return graph


def test_a_graph_with_the_nodes_of_earlier_versions_opens_as_one_of_this(editor: Any) -> None:
    """It was saved when Sweep Grid and Sweep Plot drew a sweep."""
    saved = json.loads(EARLIER.read_text(encoding="utf-8"))
    sent = editor.evaluate(SENT, saved)
    assert sorted(node["class_type"] for node in sent.values()) == sorted(
        ["FastARLoadMAR", "FastARClassLabel", "FastARSweep", "SaveImage", "PreviewImage"]
    )
    inputs = sent["1004"]["inputs"]
    assert (inputs["folder"], inputs["cell_size"], inputs["measure"]) == ("threshold", 168, "PSNR")
    assert sent["1007"]["inputs"]["images"] == ["1004", 0] and sent["1008"]["inputs"]["images"] == ["1004", 2]
    _no_complaint(editor)

    again = editor.evaluate(SENT, editor.evaluate("app.graph.serialize()"))
    assert again == sent, "saved and opened again"

    assert editor.evaluate(SENT, _behind_a_reroute(saved)) == again, "the Reroute carries nothing any more"

    sent = editor.evaluate(SENT, _in_a_subgraph(saved))
    assert sent["1007"]["inputs"]["images"] == ["1020:1004", 0]
    assert sent["1020:1004"]["inputs"]["cell_size"] == 168
    _no_complaint(editor)


PROMPT = "async () => (await app.graphToPrompt()).output"
# Takes the last cell in the menu of a Sweep; the id of the sampler that it makes, and what the menu offers.
CARRIED = """id => {
    const extension = app.extensions.find(({name}) => name === 'FastAR.Sweep')
    const menus = extension.getNodeMenuItems(app.graph.getNodeById(id)).map(({submenu}) => submenu.options)
    menus[0].at(-1).callback()
    return [app.graph._nodes.at(-1).id, menus.map(menu => menu.map(({content}) => content))]
}"""


def test_a_sweep_shows_its_grid_and_plot_when_it_has_run(editor: Any, comfy: Comfy, artifacts: Path) -> None:
    """And not the preview of a cell, which the editor would show in their place."""
    graph = load_workflow("15 Sweep")
    (sweep,) = [node for node in graph["nodes"] if node["type"] == "FastARSweep"]
    sweep["widgets_values"][3] = "0.5, 0.9"
    sweep["widgets_values"][6] = "steps=4, diffusion_steps=6"
    sweep["widgets_values"][7] = editor.renderer
    editor.set_viewport_size(LAPTOP)
    editor.evaluate(OPEN_TEMPLATE, [graph, "10"])
    editor.wait_for_timeout(500)
    editor.evaluate("app.queuePrompt(0, 1)")
    editor.wait_for_function("Object.values(app.nodeOutputs).some(o => o.images?.length)", timeout=120_000)
    editor.wait_for_timeout(2000)
    assert editor.evaluate("Object.values(app.nodePreviewImages ?? {}).filter(shown => shown?.length)") == []
    assert "threshold  passes  diffusion calls" in editor.evaluate(SEEN)
    if editor.renderer == "litegraph":
        images = f"app.graph.getNodeById({sweep['id']}).imgs"
        editor.wait_for_function(f"{images}?.length === 1", timeout=30_000)
        assert editor.evaluate(f"{images}[0].naturalWidth") > 2 * 256 + 720
    editor.screenshot(path=str(artifacts / f"sweep_{editor.renderer}.png"))

    # A sampler for a cell, by the node's menu.
    made, (menu,) = editor.evaluate(CARRIED, sweep["id"])
    assert menu == ["threshold 0.5", "threshold 0.9"]
    inputs = editor.evaluate(PROMPT)[str(made)]["inputs"]
    (sent,) = [node["inputs"] for node in editor.evaluate(PROMPT).values() if node["class_type"] == "FastARSweep"]
    assert {name: inputs[name] for name in ("model", "condition")} == {
        name: sent[name] for name in ("model", "condition")
    }
    assert (inputs["preset"], inputs["threshold"], inputs["steps"], inputs["seed"]) == ("custom", 0.9, 4, 7)
    _no_complaint(editor)


# A new Compare, Token Map and Time-lapse on one run of a few steps; their ids.
SHOWING = """async () => {
    await app.loadGraphData({nodes: [], links: [], version: 0.4})
    const add = (type, values, ...links) => {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        for (const widget of node.widgets ?? []) if (widget.name in values) widget.value = values[widget.name]
        for (const [from, slot, name] of links) from.connect(slot, node, node.inputs.findIndex(i => i.name === name))
        return node
    }
    const loader = add('FastARLoadMAR', {}), label = add('FastARClassLabel', {labels: 'cat'})
    const sampler = add('FastARMARSampler', {preset: 'custom', steps: 4, diffusion_steps: 6}, [loader, 0, 'model'],
        [label, 0, 'condition'])
    const image = add('VAEDecode', {}, [sampler, 0, 'samples'], [loader, 1, 'vae'])
    const pair = [[image, 0, 'image_1'], [sampler, 1, 'report_1']]
    const shown = [add('FastARCompare', {}, ...pair), add('FastARTokenMap', {}, [sampler, 1, 'report']),
        add('FastARTimeLapse', {}, ...pair)]
    app.graph._nodes.forEach((node, k) => node.pos = [60 + 420 * Math.floor(k / 2), 60 + 460 * (k % 2)])
    app.canvas.ds.scale = 0.7; app.canvas.ds.offset = [0, 0]
    return shown.map(node => node.id)
}"""
# Pixels of the image on a node, in units of the graph.
IMAGE_ON = """id => {
    const found = document.querySelector(`[data-node-id="${id}"] img`)?.getBoundingClientRect()
    if (found) return [found.width / app.canvas.ds.scale, found.height / app.canvas.ds.scale]
    const node = app.graph.getNodeById(id), widget = node.widgets.find(w => /preview/.test(w.name))
    return node.imgs?.length ? [node.size[0], widget.computedHeight ?? widget.element?.clientHeight] : null
}"""


def test_new_nodes_show_their_results_themselves(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    ids = editor.evaluate(SHOWING)
    entry = _run(comfy, editor)
    assert not comfy.failure(entry)
    assert {str(number) for number in ids} <= entry["outputs"].keys()
    editor.wait_for_timeout(2500)
    editor.screenshot(path=str(artifacts / f"shown themselves_{editor.renderer}.png"))
    for number in ids:
        width, height = editor.evaluate(IMAGE_ON, number)
        assert width >= 150 and height >= 150, number
    assert editor.evaluate("id => app.graph.getNodeById(id).size[1]", ids[-1]) >= 300
    _no_complaint(editor)


SIZE_OF_SUBGRAPH = "[...app.graph._nodes.find(node => node.subgraph).size]"


def test_a_sampler_in_a_subgraph_shows_a_live_preview(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    """On the subgraph's node, in its first run, until the end."""
    if _keeps_previews(editor):
        pytest.skip("this editor shows the previews itself")

    editor.set_viewport_size(LAPTOP)
    editor.evaluate(OPEN_TEMPLATE, [load_workflow("02 Identical"), "02"])
    editor.wait_for_timeout(2000)
    before = editor.evaluate(SIZE_OF_SUBGRAPH)
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.wait_for_function("document.querySelector('.fastar-live')?.naturalWidth > 0", timeout=120_000)
    editor.screenshot(path=str(artifacts / f"live in a subgraph_{editor.renderer}.png"))
    editor.wait_for_function("!document.querySelector('.fastar-live')", timeout=120_000)
    assert editor.evaluate(SIZE_OF_SUBGRAPH) == before
    _no_complaint(editor)


# What Compare shows and sends while links are made and removed. "+3" connects image_3, "-3" removes its link.
GROWS = """async ([type, steps]) => {
    const compare = LiteGraph.createNode(type), sampler = LiteGraph.createNode('FastARMARSampler')
    app.graph.add(compare); app.graph.add(sampler)
    const shown = []
    const at = name => compare.inputs.findIndex(i => i.name === name)
    const settle = () => new Promise(done => setTimeout(done, 200))
    for (const step of steps) {
        const sockets = [at(`image_${step.slice(1)}`), at(`report_${step.slice(1)}`)]
        if (step[0] === '+') {
            const image = LiteGraph.createNode('EmptyImage')
            app.graph.add(image)
            image.connect(0, compare, sockets[0]); sampler.connect(1, compare, sockets[1])
        } else compare.disconnectInput(sockets[0])
        await settle()
        shown.push(compare.inputs.filter(i => !i.widget).map(i => i.name + (i.link == null ? '' : '*')).join(' '))
    }
    const sent = (await app.graphToPrompt()).output[compare.id].inputs
    await app.loadGraphData(app.graph.serialize())
    await settle()
    const again = (await app.graphToPrompt()).output[compare.id].inputs
    return [shown, sent, again]
}"""


def test_compare_grows_and_moves_no_link(editor):
    shown, sent, again = editor.evaluate(GROWS, ["FastARCompare", ["+1", "+2", "+3", "-2", "-3"]])
    assert shown == [
        "image_1* report_1* image_2 report_2",
        "image_1* report_1* image_2* report_2* image_3 report_3",
        "image_1* report_1* image_2* report_2* image_3* report_3* image_4 report_4",
        "image_1* report_1* image_2 report_2* image_3* report_3* image_4 report_4",
        "image_1* report_1* image_2 report_2* image_3 report_3* image_4 report_4",
    ]
    links = {name for name, value in sent.items() if isinstance(value, list)}
    assert links == {"image_1", "report_1", "report_2", "report_3"} and sent == again


def open_app(page: Any) -> None:
    """Show the graph that is open as an App, as the switch above it does."""
    page.evaluate("app.extensionManager.command.execute('Comfy.ToggleLinear')")
    page.wait_for_timeout(1500)
    tour = page.get_by_role("button", name="Skip", exact=True)  # ComfyUI's own, on the first App
    if tour.count():
        tour.first.click()
        page.wait_for_timeout(1000)


def test_time_lapse_grows_to_its_four_pairs(editor):
    shown, sent, again = editor.evaluate(GROWS, ["FastARTimeLapse", ["+1", "+2", "+3", "+4"]])
    assert [line.count("image_") for line in shown] == [2, 3, 4, 4] and "report_4*" in shown[-1]
    assert sent == again


# Widgets of these that the editor hides until advanced ones are asked for: an App shows their names and no control.
FOLDED = """inputs => inputs.filter(([id, name]) => {
    const widget = app.graph.getNodeById(id).widgets.find(widget => widget.name === name)
    return widget?.options?.advanced || widget?.advanced
})"""


@pytest.mark.parametrize("name", APPS)
def test_an_app_shows_inputs_and_image(comfy, editor, name, artifacts):
    editor.set_viewport_size(LAPTOP)
    app = load_workflow(name)
    editor.evaluate(OPEN_TEMPLATE, [app, name])
    editor.wait_for_timeout(1500)
    assert editor.get_by_text("Build an app").count() == 0, "a graph at first"
    open_app(editor)
    assert editor.get_by_text("Build an app").count() == 1
    editor.screenshot(path=str(artifacts / f"{name} as App_{editor.renderer}.png"))
    shown = editor.locator("body").inner_text()
    names = [widget for _, widget in app["extra"]["linearData"]["inputs"]]
    assert all(widget in shown for widget in names if widget != "last run")  # which is there after a run
    assert editor.evaluate(FOLDED, app["extra"]["linearData"]["inputs"]) == []
    assert not comfy.failure(_run(comfy, editor))
    editor.locator("img").last.wait_for(timeout=10000)
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"{name} as App_{editor.renderer}_ran.png"))
    if "last run" in names:  # of the nodes of subgraphs, Apps show promoted widgets only
        assert " passes" in editor.evaluate(SEEN), "the figures of the run"
    _no_complaint(editor)


# What nodes of the graph on the screen show of a run: images and texts.
RESULTS = """() => app.graph._nodes.flatMap(node => {
    const text = node.widgets?.find(widget => widget.name === 'last run')?.value
    const drawn = node.imgs?.length || document.querySelector(`[data-node-id="${node.id}"] img`)
    return [...(drawn ? [`an image on ${node.title}`] : []), ...(text ? [`a text on ${node.title}`] : [])]
})"""


def test_results_of_a_template_do_not_appear_on_another_one(comfy, editor, artifacts):
    """One runs while the other is looked at, in a tab of its own."""
    for name in ("01 Ten", "04 Text"):
        editor.evaluate(OPEN_TEMPLATE, [load_workflow(name), name])
        editor.wait_for_timeout(1500)
    editor.get_by_text("01 Ten").first.click()
    editor.wait_for_timeout(1500)
    before = set(comfy.get("/history"))
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.get_by_text("04 Text").first.click()
    for _ in range(200):
        editor.wait_for_timeout(250)
        if set(comfy.get("/history")) - before:
            break
    editor.wait_for_timeout(2000)
    editor.screenshot(path=str(artifacts / f"another tab_{editor.renderer}.png"))
    assert {node["type"] for node in load_workflow("04 Text")["nodes"]} == {
        *editor.evaluate("app.graph._nodes.map(node => node.type)")
    }
    assert editor.evaluate(RESULTS) == []

    editor.get_by_text("01 Ten").first.click()
    editor.wait_for_timeout(2000)
    editor.screenshot(path=str(artifacts / f"first tab_{editor.renderer}.png"))
    assert "a text on MAR Sampler" in editor.evaluate(RESULTS)


BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
# The blueprint with a loader and a label.
FED = """async graph => {
    await app.loadGraphData(graph)
    const blueprint = app.graph._nodes[0]
    const [loader, label] = ['FastARLoadMAR', 'FastARClassLabel'].map(type => LiteGraph.createNode(type))
    for (const node of [loader, label]) app.graph.add(node)
    blueprint.pos = [500, 150]; loader.pos = [50, 150]; label.pos = [50, 500]
    loader.connect(0, blueprint, 0)
    loader.connect(1, blueprint, 1)
    label.connect(0, blueprint, 2)
}"""


def test_a_blueprint_of_compare_shows_its_sheet(comfy, editor, artifacts):
    graph = json.loads((ROOT / "subgraphs" / "Compare LazyMAR with MAR.json").read_text(encoding="utf-8"))
    editor.evaluate(FED, graph)
    assert not comfy.failure(_run(comfy, editor))
    if editor.renderer == "vue":  # the classic editor shows it inside the sub-graph only
        editor.locator("[data-node-id] img").first.wait_for(timeout=10_000)
    editor.screenshot(path=str(artifacts / f"blueprint of Compare_{editor.renderer}.png"))


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_opens(editor, path, artifacts):
    graph = json.loads(path.read_text(encoding="utf-8"))
    editor.evaluate("graph => app.loadGraphData(graph)", graph)
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"blueprint {path.stem}_{editor.renderer}.png"))
    sent = editor.evaluate("async () => (await app.graphToPrompt()).output")
    (subgraph,) = graph["definitions"]["subgraphs"]
    inner = subgraph["nodes"]
    assert sorted(node["class_type"] for node in sent.values()) == sorted(node["type"] for node in inner)
    names = editor.evaluate("app.graph._nodes[0].widgets.map(w => w.name).filter(name => name !== 'last run')")
    promoted = graph["nodes"][0]["properties"].get("proxyWidgets", [])
    # The editor also shows a widget for an input that feeds one.
    fed = {i["link"] for node in inner for i in node["inputs"] if "widget" in i}
    assert len(names) == len(promoted) + sum(not fed.isdisjoint(i["linkIds"]) for i in subgraph["inputs"])
    assert not any(name.endswith("_1") or "." in name for name in names), "every widget has a name of its own"
    assert editor.evaluate(UNSEEN) == []
    _no_complaint(editor)
