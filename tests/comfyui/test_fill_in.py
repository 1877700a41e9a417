"""Presets in ComfyUI's own editor: a choice fills in numbers, and the numbers on the screen are those of the run."""

import json
import time
import urllib.request
from typing import Any

import pytest
import torch
from comfy_host import Comfy, load_workflow
from safetensors.torch import load_file

test_browser = pytest.importorskip("test_browser", reason="NOT TESTED IN A BROWSER: playwright is not installed")
browser = test_browser.browser
editor = test_browser.editor

# Sampler to its loaders by socket, each with a checkpoint, and the preset that is chosen.
MAR = {"model": ("FastARLoadMAR", "demo")}
GPT = {"model": ("FastARLoadLlamaGen", "demo-llamagen-low")}
SAMPLERS = {
    "FastARMARSampler": (MAR, "recommended"),
    "FastARFastHybridSampler": (MAR, "fast"),
    "FastARLazyMARSampler": (MAR, "fast"),
    "FastARCSpDSampler": ({"draft": ("FastARLoadMAR", "demo-draft"), "target": ("FastARLoadMAR", "demo")}, "fast"),
    "FastARLlamaGenSampler": (GPT, "recommended"),
    "FastARPARSampler": ({"model": ("FastARLoadLlamaGen", "demo-par")}, "recommended"),
    "FastARZipARSampler": (GPT, "fast"),
    "FastARMuLoSDSampler": (
        {"target": ("FastARLoadLlamaGen", "demo-llamagen"), "draft": ("FastARLoadLlamaGen", "demo-llamagen-low")},
        "balanced",
    ),
}

# A sampler with its loaders, a label and Save Latent; the id of the sampler. The links are made as by hand.
BUILD = """async ([sampler, loaders]) => {
    await app.loadGraphData({nodes: [], links: [], version: 0.4})
    const add = (type, x, y) => {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        node.pos = [x, y]
        return node
    }
    const node = add(sampler, 500, 100)
    Object.entries(loaders).forEach(([socket, [type, checkpoint]], k) => {
        const loader = add(type, 50, 100 + 300 * k)
        loader.widgets.find(w => w.name === 'checkpoint').value = checkpoint
        loader.connect(0, node, node.inputs.findIndex(i => i.name === socket))
    })
    const label = add('FastARClassLabel', 50, 750)
    label.connect(0, node, node.inputs.findIndex(i => i.name === 'condition'))
    const save = add('SaveLatent', 1000, 100)
    node.connect(0, save, 0)
    node.widgets.find(w => w.name === 'seed').value = 7
    node.widgets.find(w => w.name === 'control_after_generate').value = 'fixed'
    return node.id
}"""
# What a user's choice does to a widget.
SET = """([id, name, value]) => {
    const node = app.graph.getNodeById(id), widget = node.widgets.find(w => w.name === name)
    if (widget.setValue) widget.setValue(value, {e: {}, node, canvas: app.canvas})
    else { widget.value = value; widget.callback?.(value, app.canvas, node) }
}"""
SHOWN = """id => Object.fromEntries(app.graph.getNodeById(id).widgets.filter(w => w.options?.serialize !== false
    && !w.name.startsWith('$$')).map(w => [w.name, w.value]))"""
# A prompt waits for what is being filled in.
SETTLED = f"async id => {{ await app.graphToPrompt(); return ({SHOWN})(id) }}"


def shown(editor: Any, node: int) -> dict[str, Any]:
    """Values of a node's widgets, once nothing is being filled in."""
    return editor.evaluate(SETTLED, node)


def latents(comfy: Comfy) -> torch.Tensor:
    """What Save Latent wrote last."""
    files = sorted((comfy.base / "output").rglob("*.latent"), key=lambda path: path.stat().st_mtime_ns)
    return load_file(files[-1])["latent_tensor"]


def queued(comfy: Comfy, editor: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Queue what the editor shows; the prompt that it sent, and the latents."""
    before = set(comfy.get("/history"))
    editor.evaluate("app.queuePrompt(0)")
    end = time.monotonic() + 120
    while time.monotonic() < end:
        editor.wait_for_timeout(100)
        for key in set(comfy.get("/history")) - before:
            entry = comfy.wait(key)
            assert not comfy.failure(entry)
            return entry["prompt"][2], latents(comfy)
    raise TimeoutError(editor.locator(test_browser.TOAST).all_inner_texts())


def asked(comfy: Comfy, **question: Any) -> tuple[int, dict[str, Any]]:
    """Status and content of the server's answer."""
    request = urllib.request.Request(f"{comfy.url}/fastar/fill", json.dumps(question).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as problem:
        return problem.code, json.loads(problem.read())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_preset_to_custom_changes_nothing(comfy: Comfy, editor: Any, artifacts: Any, sampler: str) -> None:
    """Bit-equal latents of a preset that was just chosen, of custom, and of a prompt that leaves the numbers out."""
    loaders, preset = SAMPLERS[sampler]
    node = editor.evaluate(BUILD, [sampler, loaders])
    editor.evaluate(SET, [node, "preset", preset])
    prompt, first = queued(comfy, editor)  # at once, while the numbers are asked for

    own = next(iter(name for name in ("target", "model") if name in loaders))
    kind, checkpoint = loaders[own]
    loader = {"class_type": kind, "inputs": {"checkpoint": checkpoint}}
    status, answer = asked(comfy, node=sampler, preset=preset, loader=loader)
    assert status == 200 and answer["model"].startswith("demo ")
    numbers = answer["values"]
    sent = prompt[str(node)]["inputs"]
    assert {name: sent[name] for name in numbers} == numbers and sent["preset"] == preset

    before = shown(editor, node)
    assert {name: before[name] for name in numbers} == numbers
    editor.screenshot(path=str(artifacts / f"{sampler}_{editor.renderer}_{preset}.png"))
    editor.evaluate(SET, [node, "preset", "custom"])
    after = shown(editor, node)
    assert after == {**before, "preset": "custom"}
    prompt, custom = queued(comfy, editor)
    assert prompt[str(node)]["inputs"]["preset"] == "custom"
    assert torch.equal(first, custom)

    short = {name: value for name, value in sent.items() if name in ("seed", "condition", *loaders)}
    prompt[str(node)]["inputs"] = {**short, "preset": preset}
    comfy.run(prompt)
    assert torch.equal(latents(comfy), first)
    test_browser._no_complaint(editor)


def test_numbers_follow_the_loader_until_one_is_changed_by_hand(comfy: Comfy, editor: Any) -> None:
    loaders, _ = SAMPLERS["FastARFastHybridSampler"]
    node = editor.evaluate(BUILD, ["FastARFastHybridSampler", loaders])
    demo = shown(editor, node)
    assert (demo["preset"], demo["steps"], demo["lookahead"]) == ("balanced", 32, 4), "the new link filled it in"

    loader = editor.evaluate("app.graph._nodes.find(n => n.comfyClass === 'FastARLoadMAR').id")
    large = next(name for name in editor.evaluate(MENU, loader) if name.startswith("mar-huge"))
    editor.evaluate(SET, [loader, "checkpoint", large])
    full = shown(editor, node)
    assert (full["preset"], full["steps"], full["lookahead"], full["t_max"]) == ("balanced", 64, 9, 999)

    editor.evaluate(SET, [node, "lookahead", 5])
    editor.evaluate(SET, [loader, "checkpoint", "demo"])
    assert shown(editor, node) == {**full, "preset": "custom", "lookahead": 5}
    editor.evaluate(SET, [node, "preset", "balanced"])
    assert shown(editor, node) == demo


MENU = "id => app.graph.getNodeById(id).widgets.find(w => w.name === 'checkpoint').options.values"


def test_opening_a_graph_changes_nothing(editor: Any) -> None:
    graph = load_workflow("01 Cat")
    sampler = next(n for n in graph["nodes"] if n["type"] == "FastARMARSampler")
    sampler["widgets_values"][3] = 11  # steps, which no preset has
    editor.evaluate("graph => app.loadGraphData(graph)", graph)
    editor.wait_for_timeout(1500)
    found = shown(editor, sampler["id"])
    assert (found["preset"], found["steps"]) == ("recommended", 11)


def test_a_cache_follows_the_model_of_the_sampler_that_it_feeds(editor: Any) -> None:
    node = editor.evaluate(BUILD, ["FastARMARSampler", MAR])
    cache = editor.evaluate(ADD_CACHE, node)
    demo = shown(editor, cache)
    assert (demo["preset"], demo["refresh_period"], demo["computed_ratio"]) == ("balanced", 5, 0.3)
    loader = editor.evaluate("app.graph._nodes.find(n => n.comfyClass === 'FastARLoadMAR').id")
    large = next(name for name in editor.evaluate(MENU, loader) if name.startswith("mar-large"))
    editor.evaluate(SET, [loader, "checkpoint", large])
    full = shown(editor, cache)
    assert (full["refresh_period"], full["computed_ratio"]) == (9, 0.05)


ADD_CACHE = """id => {
    const cache = LiteGraph.createNode('FastARLazyMARCache'), node = app.graph.getNodeById(id)
    app.graph.add(cache)
    cache.connect(0, node, node.inputs.findIndex(i => i.name === 'cache'))
    return cache.id
}"""


def test_the_server_answers_a_mistake_with_a_sentence(comfy: Comfy) -> None:
    loader = {"class_type": "FastARLoadMAR", "inputs": {"checkpoint": "../secret.safetensors"}}
    status, answer = asked(comfy, node="FastARFastHybridSampler", preset="fast", loader=loader)
    assert status == 400 and answer["error"].startswith("checkpoint: ")
    status, answer = asked(comfy, node="x" * 100_000)
    assert status == 400 and answer["error"] == "the request has more than 65536 bytes."


# The node of a subgraph.
SUBGRAPH = "app.graph._nodes.find(n => n.subgraph).id"
# The numbers that a run of FastHybrid in it would take, and those that its node shows.
INSIDE = """async () => {
    const prompt = (await app.graphToPrompt()).output
    const {inputs} = Object.values(prompt).find(node => node.class_type === 'FastARFastHybridSampler')
    const shown = app.graph._nodes.find(n => n.subgraph).widgets.map(w => [w.name, w.value])
    return [inputs, Object.fromEntries(shown)]
}"""


def test_a_preset_that_a_subgraph_shows_fills_in_its_numbers(editor: Any) -> None:
    """The demo's *fast* has lookahead 8, threshold 0.8, no lookahead_start; its *balanced* 4, 0.95 and 8."""
    editor.evaluate("graph => app.loadGraphData(graph)", load_workflow("03 FastHybrid beside MAR - FastAR"))
    editor.wait_for_timeout(1500)
    node = editor.evaluate(SUBGRAPH)

    editor.evaluate(SET, [node, "preset", "fast"])
    inside, outside = editor.evaluate(INSIDE)
    assert (inside["preset"], inside["lookahead"], inside["threshold"], inside["lookahead_start"]) == (
        "fast",
        8,
        0.8,
        0,
    )
    assert (outside["preset"], outside["lookahead"], outside["threshold"]) == ("fast", 8, 0.8)

    editor.evaluate(SET, [node, "lookahead", 5])
    inside, outside = editor.evaluate(INSIDE)
    assert (inside["preset"], inside["lookahead"], outside["preset"], outside["lookahead"]) == ("custom", 5) * 2

    editor.evaluate(SET, [node, "preset", "balanced"])
    inside, outside = editor.evaluate(INSIDE)
    assert (inside["lookahead"], inside["lookahead_start"], outside["lookahead"]) == (4, 8, 4)
