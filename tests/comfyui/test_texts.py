"""What a node says about its run stays on the node: after the run, in saved graphs, in Apps. Both renderers."""

import uuid
from pathlib import Path
from typing import Any

from comfy_host import Comfy, load_workflow, one_image
from test_browser import OPEN_TEMPLATE, SEEN, _no_complaint, _run, browser, editor, open_app  # noqa: F401  fixtures

# ruff: noqa: F811

PROMPTED = "04 Text"
# Text on the nodes of a type: what the widget holds.
TEXT = "type => app.graph._nodes.find(n => n.type === type).widgets.find(w => w.name === 'last run').value"
TYPE_PROMPT = """text => {
    const node = app.graph._nodes.find(n => n.type === 'FastARPrompt')
    node.widgets.find(w => w.name === 'text').value = text
}"""
SENT = "async () => Object.values((await app.graphToPrompt()).output).flatMap(node => Object.keys(node.inputs))"
# As in a file: without what is undefined, which would come back as null and which frontend 1.58 does not open.
SAVED = "JSON.parse(JSON.stringify(app.graph.serialize()))"


def _values(graph: dict[str, Any]) -> dict[str, list[Any]]:
    """Number of saved widget values by node; the seed's changes."""
    return {str(node["id"]): len(node.get("widgets_values") or []) for node in graph["nodes"]}


def test_texts_stay_after_a_run_and_in_the_saved_graph(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    editor.set_viewport_size({"width": 1366, "height": 768})
    editor.evaluate("graph => app.loadGraphData(graph)", load_workflow(PROMPTED))
    editor.wait_for_timeout(1500)
    editor.evaluate(TYPE_PROMPT, "a purple elephant at night")
    before = editor.evaluate(SAVED)
    assert "a purple elephant at night" in str(before["nodes"])
    assert editor.evaluate(SEEN) == "", "nothing was said yet"

    assert not comfy.failure(_run(comfy, editor))
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"texts_{editor.renderer}.png"))
    kind = next(
        node["type"] for node in before["nodes"] if node["type"].endswith("Sampler") and "FastAR" in node["type"]
    )
    figures = editor.evaluate(TEXT, kind)
    assert " passes" in figures.split("\n")[-2] and " AR steps, " in figures.split("\n")[-1], "settings last"
    assert figures in editor.evaluate(SEEN)
    # The words of the prompt stand on its node already; see test_words.py.
    assert editor.evaluate(TEXT, "FastARPrompt") == ""

    # It is no input, and takes no other value's place.
    assert "last run" not in editor.evaluate(SENT)
    after = editor.evaluate(SAVED)
    assert _values(after) == _values(before)

    # Saved and opened again.
    editor.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    editor.evaluate("graph => app.loadGraphData(graph)", after)
    editor.wait_for_timeout(2000)
    editor.screenshot(path=str(artifacts / f"texts opened again_{editor.renderer}.png"))
    assert editor.evaluate(TEXT, kind) == figures and figures in editor.evaluate(SEEN)
    _no_complaint(editor)


# The text on the node of the graph's one subgraph, and a new value of one of its widgets.
TEXT_OF_SUBGRAPH = """() => app.graph._nodes.find(node => node.subgraph).widgets.find(
    widget => widget.name === 'last run')?.value ?? ''"""
SET_IN_SUBGRAPH = """([name, value]) => {
    const widget = app.graph._nodes.find(node => node.subgraph).widgets.find(widget => widget.name === name)
    widget.value = value
    widget.callback?.(value)
}"""


def test_the_node_of_a_subgraph_shows_what_the_nodes_inside_said(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    """Warnings first and once, then the figures of the comparison; not the samplers' again, and no settings."""
    editor.evaluate("graph => app.loadGraphData(graph)", load_workflow("06 FastHybrid"))
    editor.wait_for_timeout(1500)
    assert editor.evaluate(TEXT_OF_SUBGRAPH) == ""
    assert not comfy.failure(_run(comfy, editor))
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"texts of a subgraph_{editor.renderer}.png"))
    figures = editor.evaluate(TEXT_OF_SUBGRAPH)
    assert figures.startswith("FastHybrid: 32 passes, 436 diffusion calls") and "PSNR" in figures
    assert figures in editor.evaluate(SEEN)

    editor.evaluate(SET_IN_SUBGRAPH, ["threshold", 1.01])
    assert not comfy.failure(_run(comfy, editor))
    editor.wait_for_timeout(1500)
    said = editor.evaluate(TEXT_OF_SUBGRAPH)
    warning, figures = said.split("\n")
    assert warning.startswith("FastHybrid: No draft was accepted")
    assert figures.startswith("FastHybrid: 32 passes, 1,536 diffusion calls")

    assert "last run" not in editor.evaluate(SENT)
    saved = editor.evaluate(SAVED)
    editor.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    editor.evaluate("graph => app.loadGraphData(graph)", saved)
    editor.wait_for_function("app.graph._nodes.some(node => node.subgraph)", timeout=60000)
    editor.wait_for_timeout(2000)
    assert editor.evaluate(TEXT_OF_SUBGRAPH) == said and said in editor.evaluate(SEEN)
    _no_complaint(editor)


def test_an_image_that_nobody_chose_is_not_in_a_prompt(comfy: Comfy, editor: Any) -> None:
    """So neither ComfyUI nor an exported script looks for its file; with the switch on it is asked for."""
    editor.evaluate("graph => app.loadGraphData(graph)", load_workflow("05 Inpaint"))
    editor.wait_for_timeout(1500)
    prompt = editor.evaluate("async () => (await app.graphToPrompt()).output")
    assert "LoadImage" not in {node["class_type"] for node in prompt.values()}
    links = [value[0] for node in prompt.values() for value in node["inputs"].values() if isinstance(value, list)]
    assert set(links) <= set(prompt)

    before = len(comfy.log)
    assert not comfy.failure(_run(comfy, editor))
    assert "Errno" not in comfy.log[before:] and "WARNING" not in comfy.log[before:]

    editor.evaluate(SET_IN_SUBGRAPH, ["your own image", True])
    prompt = editor.evaluate("async () => (await app.graphToPrompt()).output")
    assert "LoadImage" in {node["class_type"] for node in prompt.values()}


def test_a_result_that_is_reused_says_the_same_again(comfy: Comfy, editor: Any, workflow: dict[str, Any]) -> None:
    """The text of a node that does not run again, in an editor that was opened meanwhile."""
    graph = one_image()
    editor.evaluate("graph => app.loadGraphData(graph)", graph)
    editor.wait_for_timeout(1000)
    _run(comfy, editor)
    editor.wait_for_timeout(1000)
    said = editor.evaluate(TEXT, "FastARMARSampler")
    editor.evaluate("graph => app.loadGraphData(graph)", graph)
    editor.wait_for_timeout(1000)
    assert said and editor.evaluate(TEXT, "FastARMARSampler") == ""
    editor.get_by_role("button", name="Run", exact=True).first.click()
    editor.wait_for_function(f"type => ({TEXT})(type)", arg="FastARMARSampler", timeout=60000)
    assert editor.evaluate(TEXT, "FastARMARSampler") == said


def test_an_app_shows_the_text(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    """Apps list the text among their inputs."""
    editor.evaluate(OPEN_TEMPLATE, [one_image(), "an App"])
    editor.wait_for_timeout(1500)
    open_app(editor)
    assert not comfy.failure(_run(comfy, editor))
    editor.wait_for_timeout(2000)
    editor.screenshot(path=str(artifacts / f"texts in an app_{editor.renderer}.png"))
    assert " passes" in editor.evaluate(SEEN)


# What Preview as Text shows, on the screen: characters in the classic renderer, a table in Nodes 2.0.
TABLE = """() => [...document.querySelectorAll('.widget-text-preview')].filter(box => box.checkVisibility()).map(
    box => [box.querySelector('textarea')?.value ?? '', box.querySelectorAll('table td').length])"""


# Preview as Text for the table of the graph's one comparison.
ADD_TABLE = """() => {
    const compare = app.graph._nodes.find(node => node.outputs?.some(output => output.name === 'table'))
    const text = LiteGraph.createNode('PreviewAny')
    app.graph.add(text)
    text.pos = [compare.pos[0], compare.pos[1] + 1000]
    text.size = [700, 300]
    compare.connect(compare.outputs.findIndex(output => output.name === 'table'), text, 0)
    app.canvas.centerOnNode(text)
}"""


def test_tables_have_no_raw_pipes(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    editor.evaluate("graph => app.loadGraphData(graph)", load_workflow("06 FastHybrid"))
    editor.evaluate(ADD_TABLE)
    editor.wait_for_timeout(1500)
    assert not comfy.failure(_run(comfy, editor))
    editor.wait_for_timeout(2000)
    editor.screenshot(path=str(artifacts / f"table_{editor.renderer}.png"))
    ((text, cells),) = editor.evaluate(TABLE)
    if editor.renderer == "litegraph" and not cells:
        head, rule, mar, fast, *_ = text.split("\n")
        assert head.split()[:2] == ["sampler", "passes"] and set(rule) == {"─"}
        assert mar.split()[0] == "MAR" and mar.split()[-1] == "baseline" and fast.split()[0] == "FastHybrid"
        assert head.index("passes") == mar.index(mar.split()[1]), "columns stand under each other"
    else:
        assert cells >= 16
    assert "|" not in text


def test_texts_of_one_graph_do_not_appear_on_nodes_of_another(comfy: Comfy, editor: Any) -> None:
    """A template that was saved under another name has nodes of the same ids. What was said meanwhile is there when
    the first is opened again.
    """
    first = one_image()
    (label,) = (node for node in first["nodes"] if node["type"] == "FastARClassLabel")
    label["widgets_values"][2] = 16  # images, so that the run lasts longer than it takes to open another graph
    second = {**one_image(), "id": str(uuid.uuid4())}
    editor.evaluate("graph => app.loadGraphData(graph)", first)
    editor.wait_for_timeout(1000)
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    before = set(comfy.get("/history"))
    editor.get_by_role("button", name="Run", exact=True).first.click()
    while not comfy.get("/queue")["queue_running"]:
        editor.wait_for_timeout(100)

    editor.evaluate("graph => app.loadGraphData(graph)", second)
    assert set(comfy.get("/history")) == before, "the run ended before the other graph was open"
    while set(comfy.get("/history")) == before:
        editor.wait_for_timeout(250)
    editor.wait_for_timeout(1500)
    assert editor.evaluate(TEXT, "FastARMARSampler") == ""

    editor.evaluate("graph => app.loadGraphData(graph)", first)
    editor.wait_for_timeout(1500)
    assert " passes" in editor.evaluate(TEXT, "FastARMARSampler")
