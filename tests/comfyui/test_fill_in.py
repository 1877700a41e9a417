"""Presets in ComfyUI's own editor: a choice fills in numbers, and the numbers on the screen are those of the run."""

import json
import time
import urllib.request
from typing import Any

import pytest
import torch
from comfy_host import Comfy, one_image
from safetensors.torch import load_file
from sampler_nodes import SAMPLER_NODES, demo_models, has_presets

test_browser = pytest.importorskip("test_browser", reason="NOT TESTED IN A BROWSER: playwright is not installed")
browser = test_browser.browser
editor = test_browser.editor

# Of every node with a preset: the loader of each socket with its checkpoint, and the preset that is chosen.
MAR = {"model": ("FastARLoadMAR", "demo")}
SAMPLERS = {
    node: (demo_models(entry), "fast" if has_presets(node) else "recommended") for node, entry in SAMPLER_NODES.items()
}
# Nodes before a sampler that have a preset too.
TAR_PROMPT = "FastARTarPrompt"
CACHE = "FastARLazyMARCache"
OTHERS = {TAR_PROMPT: ({"tar": ("FastARLoadTar", "demo-tar")}, "recommended"), CACHE: (MAR, "fast")}

# Of the window: less to draw while the samplers run.
SMALL = {"width": 1000, "height": 700}
# What the functions below share. ``set`` does what a user's choice does to a widget.
TOOLS = """
    const add = (type, x, y) => {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        node.pos = [x, y]
        return node
    }
    const widget = (node, name) => node.widgets.find(w => w.name === name)
    const set = (node, name, value) => {
        const found = widget(node, name)
        if (found.setValue) found.setValue(value, {e: {}, node, canvas: app.canvas})
        else { found.value = value; found.callback?.(value, app.canvas, node) }
    }
    const link = (from, to, socket) => from.connect(0, to, to.inputs.findIndex(i => i.name === socket))
    // A sampler with its loaders, a label and Save Latent. The links are made as by hand.
    const build = (sampler, loaders, x = 500, y = 100) => {
        const node = add(sampler, x, y)
        Object.entries(loaders).forEach(([socket, [type, checkpoint]], k) => {
            const loader = add(type, x - 450, y + 300 * k)
            widget(loader, 'checkpoint').value = checkpoint
            link(loader, node, socket)
        })
        if (node.outputs[0].type !== 'LATENT') return node
        const label = add('FastARClassLabel', x - 450, y + 650)
        link(label, node, 'condition')
        const save = add('SaveLatent', x + 500, y)
        widget(save, 'filename_prefix').value = `${sampler} ${node.id}`
        node.connect(0, save, 0)
        widget(node, 'seed').value = 7
        widget(node, 'control_after_generate').value = 'fixed'
        return node
    }
"""
BUILD = f"""async ([sampler, loaders]) => {{{TOOLS}
    await app.loadGraphData({{nodes: [], links: [], version: 0.4}})
    return build(sampler, loaders).id
}}"""
SET = f"([id, name, value]) => {{{TOOLS} set(app.graph.getNodeById(id), name, value) }}"
# A node in a sub-graph has the id of the sub-graph's node before its own.
SHOWN = """id => {
    const [first, ...inner] = String(id).split(':')
    let node = app.graph.getNodeById(first)
    for (const next of inner) node = node.subgraph.getNodeById(next)
    const widgets = node.widgets.filter(w => w.options?.serialize !== false && !w.name.startsWith('$$'))
    return Object.fromEntries(widgets.map(w => [w.name, w.value]))
}"""
# A prompt waits for what is being filled in.
SETTLED = f"async id => {{ await app.graphToPrompt(); return ({SHOWN})(id) }}"


def shown(editor: Any, node: int) -> dict[str, Any]:
    """Values of a node's widgets, once nothing is being filled in."""
    return editor.evaluate(SETTLED, node)


def latents(comfy: Comfy) -> dict[str, torch.Tensor]:
    """What the nodes Save Latent wrote since the last call, by the beginning of the files' names."""
    found = {}
    for path in (comfy.base / "output").rglob("*.latent"):
        found[path.name.split("_")[0]] = load_file(path)["latent_tensor"].clone()
        path.unlink()
    return found


def queued(comfy: Comfy, editor: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Queue what the editor shows; the prompt that it sent, and the latents."""
    before = set(comfy.get("/history"))
    editor.evaluate("app.queuePrompt(0)")
    end = time.monotonic() + 240
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


def numbers_of(comfy: Comfy, node: str, preset: str, loader: tuple[str, str], **more: Any) -> dict[str, Any]:
    """The numbers of a preset for a loader and its checkpoint, as the server says."""
    kind, checkpoint = loader
    about = {"class_type": kind, "inputs": {"checkpoint": checkpoint}}
    status, answer = asked(comfy, node=node, preset=preset, loader=about, **more)
    assert status == 200, answer
    return answer["values"]


def main_loader(node: str) -> tuple[str, str]:
    """The loader of the model that a node samples."""
    loaders, _ = {**SAMPLERS, **OTHERS}[node]
    return next(loaders[socket] for socket in ("target", "model", "tar") if socket in loaders)


# All samplers in one graph, each node with its preset chosen; ids by type. A second MAR Sampler has LazyMAR's caches,
# and a second LlamaGen Sampler draws the codes of Tar.
BUILD_ALL = f"""async ([samplers, [tar, tarLoaders, tarPreset], [cache, mar, cachePreset]]) => {{{TOOLS}
    await app.loadGraphData({{nodes: [], links: [], version: 0.4}})
    const ids = {{}}
    let y = 0
    for (const [type, [loaders, preset]] of Object.entries(samplers)) {{
        const node = build(type, loaders, 500, y += 1000)
        ids[type] = node.id
        set(node, 'preset', preset)
    }}
    const cached = build('FastARMARSampler', mar, 2500, 1000), plan = add(cache, 2050, 1400)
    link(plan, cached, 'cache')
    const drawn = build('FastARLlamaGenSampler', {{model: ['FastARLoadTarDetokenizer', 'demo-dtok']}}, 2500, 2000)
    const prompt = build(tar, tarLoaders, 2050, 3000)
    set(prompt, 'text', 'a red boat at sunset')
    widget(prompt, 'seed').value = 7
    widget(prompt, 'control_after_generate').value = 'fixed'
    link(prompt, drawn, 'condition')
    set(plan, 'preset', cachePreset)
    set(prompt, 'preset', tarPreset)
    return {{...ids, [cache]: plan.id, [tar]: prompt.id}}
}}"""


def test_preset_to_custom_changes_nothing(comfy: Comfy, info: dict[str, Any], editor: Any) -> None:
    """Bit-equal latents of presets that were just chosen, whose numbers are not sent, and of custom."""
    ours = {name: about["input"] for name, about in info.items() if name.startswith("FastAR")}
    with_preset = {name for name, inputs in ours.items() if "preset" in inputs.get("optional", {})}
    without_demo = {"FastARNextStepSampler"}
    assert with_preset - without_demo == {*SAMPLERS, *OTHERS}
    editor.set_viewport_size(SMALL)
    extra = [[name, *OTHERS[name]] for name in (TAR_PROMPT, CACHE)]
    nodes = editor.evaluate(BUILD_ALL, [SAMPLERS, *extra])
    latents(comfy)  # of other tests
    prompt, first = queued(comfy, editor)  # at once, while the numbers are asked for
    assert len(first) == len(SAMPLERS) + 2

    before = {}
    for kind, number in nodes.items():
        _, preset = {**SAMPLERS, **OTHERS}[kind]
        steps = {"steps": 32} if kind == CACHE else {}
        numbers = numbers_of(comfy, kind, preset, main_loader(kind), **steps)
        sent = prompt[str(number)]["inputs"]
        assert sent["preset"] == preset and not {*sent} & {*numbers}, kind
        before[kind] = shown(editor, number)
        assert {name: before[kind][name] for name in numbers} == numbers, kind

    for kind, number in nodes.items():
        editor.evaluate(SET, [number, "preset", "custom"])
        assert shown(editor, number) == {**before[kind], "preset": "custom"}, kind
    prompt, custom = queued(comfy, editor)
    for kind, number in nodes.items():
        sent = prompt[str(number)]["inputs"]
        assert {name: sent[name] for name in before[kind] if name in sent} == {**before[kind], "preset": "custom"}, kind
    assert custom.keys() == first.keys()
    for name, tensor in first.items():
        assert torch.equal(custom[name], tensor), name
    test_browser._no_complaint(editor)


def test_numbers_follow_the_loader_until_one_is_changed_by_hand(comfy: Comfy, editor: Any) -> None:
    loaders, _ = SAMPLERS["FastARFastHybridSampler"]
    node = editor.evaluate(BUILD, ["FastARFastHybridSampler", loaders])
    demo = shown(editor, node)
    assert (demo["preset"], demo["steps"], demo["lookahead"]) == ("balanced", 32, 8), "the new link filled it in"

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
    graph = one_image()
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
    assert (demo["preset"], demo["refresh_period"], demo["computed_ratio"]) == ("balanced", 5, 0.25)
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


# Widgets of a FastHybrid Sampler in a subgraph that stand on the subgraph's node; the editor itself adds the seed.
PROMOTED = ["preset", "steps", "cfg", "threshold"]
ALONE, WITH_LOADER, TWO_LEVELS = "alone", "with its loader", "in a subgraph of a subgraph"
# The ids of the outermost subgraph node, and of the node with the loader's checkpoint.
BUILD_SUBGRAPH = f"""async ([where, promoted]) => {{{TOOLS}
    await app.loadGraphData({{nodes: [], links: [], version: 0.4}})
    const sampler = build('FastARFastHybridSampler', {{model: ['FastARLoadMAR', 'demo']}})
    const loader = app.graph.nodes.find(n => n.comfyClass === 'FastARLoadMAR')
    await app.graphToPrompt()

    const promote = (host, node, name) => {{
        const slot = node.inputs.find(i => i.widget?.name === name)
        host.subgraph.addInput(name, slot.type).connect(slot, node)
    }}
    const inside = (host, type) => host.subgraph.nodes.find(n => n.comfyClass === type)
    const withLoader = where === '{WITH_LOADER}'
    let {{node: host}} = app.graph.convertToSubgraph(new Set(withLoader ? [sampler, loader] : [sampler]))
    promoted.forEach(name => promote(host, inside(host, 'FastARFastHybridSampler'), name))
    if (withLoader) promote(host, inside(host, 'FastARLoadMAR'), 'checkpoint')
    if (where === '{TWO_LEVELS}') {{
        host = app.graph.convertToSubgraph(new Set([host])).node
        const names = new Set(host.widgets.map(w => w.name))
        promoted.filter(name => !names.has(name)).forEach(name => promote(host, host.subgraph.nodes[0], name))
    }}
    await new Promise(requestAnimationFrame)
    return [host.id, withLoader ? host.id : loader.id]
}}"""
# Inputs of the FastHybrid Samplers that the editor sends, by id.
SENT = """async () => Object.fromEntries(Object.entries((await app.graphToPrompt()).output).filter(
    ([, node]) => node.class_type === 'FastARFastHybridSampler').map(([id, node]) => [id, node.inputs]))"""


def sent_by_one(editor: Any) -> dict[str, Any]:
    """What the editor sends for the only FastHybrid Sampler, once nothing is being filled in."""
    (inputs,) = editor.evaluate(SENT).values()
    return inputs


@pytest.mark.parametrize("where", [ALONE, WITH_LOADER, TWO_LEVELS])
def test_presets_of_a_subgraph(comfy: Comfy, editor: Any, artifacts: Any, where: str) -> None:
    """A preset that is chosen on a subgraph's node fills in the numbers, whether they stand there or inside."""
    editor.set_viewport_size(SMALL)
    host, loader = editor.evaluate(BUILD_SUBGRAPH, [where, PROMOTED])
    sampler = "FastARFastHybridSampler"
    huge = "mar-huge"
    demo = {preset: numbers_of(comfy, sampler, preset, ("FastARLoadMAR", "demo")) for preset in ("fast", "balanced")}
    full = numbers_of(comfy, sampler, "balanced", ("FastARLoadMAR", huge))
    assert demo["fast"] != demo["balanced"] != full

    def holds(preset: str, numbers: dict[str, Any]) -> None:
        sent = sent_by_one(editor)
        values = shown(editor, host)
        assert {name: values[name] for name in PROMOTED} == {**{n: numbers[n] for n in PROMOTED[1:]}, "preset": preset}
        assert sent["preset"] == preset
        assert {name: sent[name] for name in numbers if name in sent} == (numbers if preset == "custom" else {})

    holds("balanced", demo["balanced"])
    choose(editor, host, "preset", "fast")
    holds("fast", demo["fast"])
    editor.screenshot(path=str(artifacts / f"subgraph {where}_{editor.renderer}.png"))

    editor.evaluate(SET, [host, "threshold", 0.5])
    holds("custom", {**demo["fast"], "threshold": 0.5})
    editor.evaluate(SET, [host, "preset", "balanced"])
    holds("balanced", demo["balanced"])
    editor.evaluate(SET, [loader, "checkpoint", huge])
    holds("balanced", full)

    # Saved and opened again: nothing is filled in, and a choice still is.
    editor.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    holds("balanced", full)
    editor.evaluate(SET, [host, "cfg", 7.0])
    holds("custom", {**full, "cfg": 7.0})
    editor.evaluate(SET, [loader, "checkpoint", "demo"])
    editor.evaluate(SET, [host, "preset", "fast"])
    holds("fast", demo["fast"])
    test_browser._no_complaint(editor)


# Where a pointer finds the right arrow of a widget of the classic renderer.
ARROW = """([id, name]) => {
    const node = app.graph.getNodeById(id), {scale, offset} = app.canvas.ds
    const box = app.canvas.canvas.getBoundingClientRect()
    const widget = node.widgets.find(w => w.name === name)
    const at = (x, y) => [(x + offset[0]) * scale + box.x, (y + offset[1]) * scale + box.y]
    return at(node.pos[0] + node.size[0] - 25, node.pos[1] + (widget.last_y ?? widget.y) + 10)
}"""


def choose(editor: Any, node: int, name: str, value: str) -> None:
    """Choose the next option of a menu with the pointer."""
    editor.evaluate("id => { app.canvas.ds.scale = 1; app.canvas.centerOnNode(app.graph.getNodeById(id)) }", node)
    editor.wait_for_timeout(500)
    if editor.renderer == "vue":
        editor.locator(f'[data-node-id="{node}"]').get_by_role("combobox", name=name).click()
        editor.get_by_role("option", name=value, exact=True).click()
    else:
        editor.mouse.click(*editor.evaluate(ARROW, [node, name]))
    end = time.monotonic() + 10
    while shown(editor, node)[name] != value and time.monotonic() < end:
        editor.wait_for_timeout(300)
    assert shown(editor, node)[name] == value


# A second node of the same subgraph.
ADD_HOST = """async id => {
    const graph = app.graph.serialize(), host = graph.nodes.find(n => n.id == id)
    const twin = {...structuredClone(host), id: 90, pos: [host.pos[0], host.pos[1] + 600]}
    twin.inputs.forEach(input => { input.link = null })
    twin.outputs.forEach(output => { output.links = [] })
    graph.nodes.push(twin)
    graph.last_node_id = 90
    await app.loadGraphData(graph)
}"""


def test_two_nodes_of_one_subgraph(comfy: Comfy, editor: Any) -> None:
    """Each has the numbers that stand on it; those inside are shared, and make the other's preset custom."""
    host, _ = editor.evaluate(BUILD_SUBGRAPH, [WITH_LOADER, PROMOTED])
    editor.evaluate(ADD_HOST, host)
    before = shown(editor, host)
    fast = numbers_of(comfy, "FastARFastHybridSampler", "fast", ("FastARLoadMAR", "demo"))
    editor.evaluate(SET, [90, "preset", "fast"])
    after = shown(editor, 90)
    assert after["preset"] == "fast" and after["threshold"] == fast["threshold"] != before["threshold"]
    assert shown(editor, host) == {**before, "preset": "custom"}


# Whether a widget takes part in a node's layout on the screen, by renderer.
IS_SHOWN = {
    "litegraph": """([id, name]) => {
        const node = app.graph.getNodeById(id), widget = node.widgets.find(w => w.name === name)
        return node.isWidgetVisible ? node.isWidgetVisible(widget) : !widget.hidden
    }""",
    "vue": """([id, name]) => [...document.querySelectorAll(`[data-node-id="${id}"] *`)].some(
        e => e.childElementCount === 0 && e.textContent.trim() === name && e.checkVisibility())""",
}
# What the editor's own control does: "Toggle Advanced Inputs" for the selected nodes, or the button at the node's foot.
UNFOLD = "id => { const node = app.graph.getNodeById(id); node.toggleAdvanced(); return node.size[1] }"


def test_advanced_settings_are_folded_and_sent(comfy: Comfy, editor: Any, artifacts: Any) -> None:
    """Folded on a new node; shown by the editor's control, also when the graph is opened again; sent in any case."""
    editor.set_viewport_size({"width": 1366, "height": 768})
    node = editor.evaluate(BUILD, ["FastARFastHybridSampler", MAR])
    editor.evaluate("id => { app.canvas.ds.scale = 0.7; app.canvas.centerOnNode(app.graph.getNodeById(id)) }", node)
    shown(editor, node)
    editor.wait_for_timeout(500)
    seen = IS_SHOWN[editor.renderer]
    assert editor.evaluate(seen, [node, "threshold"]) and not editor.evaluate(seen, [node, "temperature"])
    low = editor.evaluate("id => app.graph.getNodeById(id).computeSize()[1]", node)

    editor.evaluate(SET, [node, "temperature", 0.65])
    assert sent_by_one(editor)["temperature"] == 0.65

    if editor.renderer == "vue":
        editor.locator(f'[data-node-id="{node}"]').get_by_text("Show advanced inputs").first.click()
    else:
        editor.evaluate(UNFOLD, node)
        room = editor.evaluate("id => app.graph.getNodeById(id).computeSize()[1]", node)
        assert room >= low + 9 * 20, "room for nine settings more"
    editor.wait_for_timeout(500)
    editor.screenshot(path=str(artifacts / f"advanced_{editor.renderer}.png"))
    assert editor.evaluate(seen, [node, "temperature"])

    editor.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    editor.wait_for_timeout(1000)
    editor.screenshot(path=str(artifacts / f"advanced opened again_{editor.renderer}.png"))
    assert editor.evaluate(seen, [node, "temperature"])
    assert sent_by_one(editor)["temperature"] == 0.65
