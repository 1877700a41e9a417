"""Models, labels and tables behind the nodes of other packs that stand for a link, in ComfyUI's own editor.

A pack of this test's own behaves as theirs do: a Set and a Get that only the editor has, and a switch that runs.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfy_host import Comfy, Missing

fill_in = pytest.importorskip("test_fill_in", reason="NOT TESTED IN A BROWSER: playwright is not installed")
browser = fill_in.browser
editor = fill_in.editor

PYTHON = """
class Anything(str):
    def __ne__(self, other):
        return False


class FirstOf:
    RETURN_TYPES = (Anything("*"),)
    FUNCTION = "choose"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}, "optional": {"first": (Anything("*"),), "second": (Anything("*"),)}}

    def choose(self, first=None, second=None):
        return (second if first is None else first,)


NODE_CLASS_MAPPINGS = {"ExampleFirstOf": FirstOf}
WEB_DIRECTORY = "web"
"""
SCRIPT = """
import { app } from "../../scripts/app.js"

class Virtual extends LGraphNode {
  constructor(title) {
    super(title)
    this.isVirtualNode = true
    this.serialize_widgets = true
  }
}

class Set extends Virtual {
  constructor(title) {
    super(title)
    this.addInput("*", "*")
    this.addOutput("*", "*")
    this.addWidget("text", "name", "", () => {})
  }
}

class Get extends Virtual {
  constructor(title) {
    super(title)
    this.addOutput("*", "*")
    this.addWidget("text", "name", "", () => {})
  }

  setter(graph) {
    return graph.nodes.find((node) => node.type === "ExampleSet" && node.widgets[0].value === this.widgets[0].value)
  }

  getInputLink(slot) {
    const setter = this.setter(this.graph)
    if (!setter) throw new Error("no Set of this name")
    return this.graph.getLink(setter.inputs[slot].link)
  }

  // Of a Set in the workflow that shows this subgraph.
  resolveVirtualOutput() {
    if (this.setter(this.graph) || this.graph === app.rootGraph) return undefined
    const link = app.rootGraph.getLink(this.setter(app.rootGraph)?.inputs[0].link)
    return link && { node: app.rootGraph.getNodeById(link.origin_id), slot: link.origin_slot }
  }
}

class Through extends Virtual {
  constructor(title) {
    super(title)
    this.addInput("*", "*")
    this.addOutput("*", "*")
  }
}

app.registerExtension({
  name: "Example.LinkNodes",
  registerCustomNodes() {
    for (const kind of [Set, Get, Through]) {
      kind.title = kind.name
      LiteGraph.registerNodeType(`Example${kind.name}`, kind)
    }
  },
})
"""


class WithLinkNodes(Comfy):
    """A server with such a pack beside ours."""

    def _copy_example(self) -> None:
        super()._copy_example()
        pack = self.base / "custom_nodes" / "example-link-nodes"
        (pack / "web").mkdir(parents=True)
        (pack / "__init__.py").write_text(PYTHON, encoding="utf-8")
        (pack / "web" / "nodes.js").write_text(SCRIPT, encoding="utf-8")


@pytest.fixture(scope="module")
def comfy() -> Iterator[Comfy]:
    try:
        server = WithLinkNodes()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


SAMPLER, LOADER = "FastARFastHybridSampler", "FastARLoadMAR"
# Ways from a loader to a sampler's model, as statements.
WAYS = {
    "link": "loader.connect(0, sampler, socket)",
    "Reroute": "const node = add('Reroute', 300, y); loader.connect(0, node, 0); node.connect(0, sampler, socket)",
    "Set and Get": "setter('Set and Get').connect(0, add('ExampleThrough', 0, y), 0)"
    "; getter('Set and Get').connect(0, sampler, socket)",
    "Get in a subgraph": "setter('above'); getter('above').connect(0, sampler, socket)",
    "Through twice": "const one = add('ExampleThrough', 200, y), two = add('ExampleThrough', 400, y)"
    "; loader.connect(0, one, 0); one.connect(0, two, 0); two.connect(0, sampler, socket)",
    "bypassed": "const node = add('ExampleFirstOf', 300, y); loader.connect(0, node, 0)"
    "; node.connect(0, sampler, socket); node.mode = 4",
    "switch": "const node = add('ExampleFirstOf', 300, y); loader.connect(0, node, 1)"
    "; node.connect(0, sampler, socket)",
}
START = f"""{fill_in.TOOLS}
    const start = async () => {{
        await app.loadGraphData({{nodes: [], links: [], version: 0.4}})
        const loader = add('{LOADER}', -400, 0), label = add('FastARClassLabel', -400, 400)
        widget(loader, 'checkpoint').value = 'demo'
        return [loader, label]
    }}
    const named = (type, name, y) => {{
        const node = add(type, 200, y)
        node.widgets[0].value = name
        return node
    }}
    const drawn = (label, y) => {{
        const sampler = add('{SAMPLER}', 700, y)
        link(label, sampler, 'condition')
        widget(sampler, 'seed').value = 7
        widget(sampler, 'control_after_generate').value = 'fixed'
        return sampler
    }}
    const promptOf = async id => (await app.graphToPrompt()).output[id]
"""
# Ids of the samplers in a prompt, by way; on each the preset fast was chosen.
BUILD_WAYS = f"""async ([names, seed]) => {{{START}
    const [loader, label] = await start(), samplers = {{}}
    let y = 0
    const setter = name => {{ const node = named('ExampleSet', name, y); loader.connect(0, node, 0); return node }}
    const getter = name => named('ExampleGet', name, y)
    const connect = {{{", ".join(f"{json.dumps(name)}: (sampler, socket) => {{{way}}}" for name, way in WAYS.items())}}}
    for (const name of names) {{
        let sampler = drawn(label, y += 900), id = sampler.id
        widget(sampler, 'seed').value = seed
        const save = add('SaveLatent', 1200, y)
        widget(save, 'filename_prefix').value = name
        sampler.connect(0, save, 0)
        connect[name](sampler, sampler.inputs.findIndex(i => i.name === 'model'))
        if (name === 'Get in a subgraph') {{
            const get = app.graph.nodes.find(node => node.type === 'ExampleGet' && node.widgets[0].value === 'above')
            const {{node: host}} = app.graph.convertToSubgraph(new Set([sampler, get]))
            sampler = host.subgraph.nodes.find(node => node.comfyClass === '{SAMPLER}')
            id = `${{host.id}}:${{sampler.id}}`
        }}
        set(sampler, 'preset', 'fast')
        samplers[name] = String(id)
    }}
    return samplers
}}"""


def test_a_preset_behind_link_nodes_is_the_one_behind_a_link(comfy: Comfy, editor: Any, artifacts: Any) -> None:
    """The numbers of the connected model; after a switch the node shows a full-size model's, which are not sent."""
    editor.set_viewport_size(fill_in.SMALL)
    # Another seed, so that nothing is cached.
    seed = 1 if editor.renderer == "vue" else 2
    samplers = editor.evaluate(BUILD_WAYS, [list(WAYS), seed])
    prompt, latents = fill_in.queued(comfy, editor)
    editor.screenshot(path=str(artifacts / f"link nodes_{editor.renderer}.png"))

    demo = fill_in.numbers_of(comfy, SAMPLER, "fast", (LOADER, "demo"))
    _, answer = fill_in.asked(comfy, node=SAMPLER, preset="fast", loader=None)
    assert answer["values"]["steps"] != demo["steps"]
    for name, number in samplers.items():
        expected = answer["values"] if name == "switch" else demo
        values = fill_in.shown(editor, number)
        assert {key: values[key] for key in demo} == expected, name
        sent = prompt[number]["inputs"]
        assert sent["preset"] == "fast" and not {*sent} & {*demo}

    assert set(latents) == set(WAYS)
    for name, found in latents.items():
        assert torch.equal(found, latents["link"]), name
    text = editor.evaluate("id => app.graph.getNodeById(id).properties.fastar_text", samplers["switch"])
    assert "custom:" not in text
    fill_in.test_browser._no_complaint(editor)


def test_numbers_follow_what_changes_between_loader_and_sampler(comfy: Comfy, editor: Any) -> None:
    """No link of the sampler changes: a name in Get, a link in front of Reroute, a bypassed and a muted node."""
    fast = {name: fill_in.numbers_of(comfy, SAMPLER, "fast", (LOADER, name)) for name in ("demo", "mar-huge")}
    assert fast["demo"]["steps"] != fast["mar-huge"]["steps"]
    found = editor.evaluate(f"""async () => {{{START}
        const [demo, label] = await start(), huge = add('{LOADER}', -400, 700), sampler = drawn(label, 0), steps = []
        const look = async () => {{
            await promptOf(sampler.id)
            steps.push([widget(sampler, 'steps').value, widget(sampler, 'preset').value])
        }}
        widget(huge, 'checkpoint').value = 'mar-huge'
        demo.connect(0, named('ExampleSet', 'a', 0), 0)
        huge.connect(0, named('ExampleSet', 'b', 200), 0)
        const get = named('ExampleGet', 'a', 400), reroute = add('Reroute', 400, 0)
        const node = add('ExampleFirstOf', 500, 0)
        get.connect(0, reroute, 0)
        reroute.connect(0, node, 0)
        node.mode = 4
        link(node, sampler, 'model')
        set(sampler, 'preset', 'fast')
        await look()
        get.widgets[0].value = 'b'
        await look()
        demo.connect(0, reroute, 0)
        await look()
        huge.connect(0, node, 0)
        await look()
        huge.mode = 2
        await look()
        demo.connect(0, node, 0)
        await look()
        get.widgets[0].value = 'no such name'
        get.connect(0, node, 0)
        await new Promise(done => setTimeout(done, 500))
        steps.push([widget(sampler, 'steps').value, widget(sampler, 'preset').value])
        return steps
    }}""")
    demo, huge = ([fast[name]["steps"], "fast"] for name in ("demo", "mar-huge"))
    assert found == [demo, huge, demo, huge, huge, demo, demo]


def test_a_circle_of_link_nodes_leads_nowhere(editor: Any) -> None:
    found = editor.evaluate(f"""async () => {{{START}
        const [, label] = await start(), sampler = drawn(label, 0)
        const one = add('ExampleThrough', 0, 0), two = add('ExampleThrough', 200, 0)
        one.connect(0, two, 0)
        two.connect(0, one, 0)
        link(two, sampler, 'model')
        set(sampler, 'preset', 'fast')
        await new Promise(done => setTimeout(done, 1000))
        return [widget(sampler, 'preset').value, widget(sampler, 'steps').value]
    }}""")
    assert found == ["fast", 64]


def test_values_of_primitives_count_as_the_widgets_own(comfy: Comfy, editor: Any) -> None:
    """Core's Primitive writes its value into the widget; a checkpoint from a node that runs is not known."""
    demo = fill_in.numbers_of(comfy, SAMPLER, "fast", (LOADER, "demo"))
    sent = editor.evaluate(f"""async () => {{{START}
        const [loader, label] = await start(), sampler = drawn(label, 0), sent = []
        const primitive = (node, name) => {{
            const made = add('PrimitiveNode', -800, 0)
            made.connect(0, node, node.inputs.findIndex(i => i.widget?.name === name))
            return made
        }}
        link(loader, sampler, 'model')
        const checkpoint = primitive(loader, 'checkpoint'), preset = primitive(sampler, 'preset')
        set(checkpoint, checkpoint.widgets[0].name, 'demo')
        set(preset, preset.widgets[0].name, 'fast')
        sent.push(await promptOf(sampler.id))
        set(sampler, 'cfg', 4.5)
        sent.push(await promptOf(sampler.id), await promptOf(sampler.id))
        return sent
    }}""")
    first, *edited = sent
    assert first["inputs"]["preset"] == "fast" and not {*first["inputs"]} & {*demo}
    for later in edited:
        assert {name: later["inputs"][name] for name in demo if name in later["inputs"]} == {"cfg": 4.5}


def test_labels_words_and_tables_are_found_behind_link_nodes(editor: Any) -> None:
    found = editor.evaluate(f"""async () => {{{START}
        const [loader, label] = await start(), sampler = add('{SAMPLER}', 700, 0)
        loader.connect(0, named('ExampleSet', 'model', 0), 0)
        link(named('ExampleGet', 'model', 100), sampler, 'model')
        label.connect(0, named('ExampleSet', 'label', 200), 0)
        link(named('ExampleGet', 'label', 300), sampler, 'condition')

        const compare = add('FastARCompare', 1200, 0), table = add('ExampleThrough', 1600, 0)
        const preview = add('PreviewAny', 1800, 0)
        compare.connect(compare.outputs.findIndex(o => o.name === 'table'), table, 0)
        table.connect(0, preview, 0)
        await app.graphToPrompt()
        document.dispatchEvent(new Event('input', {{bubbles: true}}))
        await new Promise(done => setTimeout(done, 1500))
        const mode = preview.widgets.find(w => ['preview_mode', 'previewMode'].includes(w.name))
        return [widget(label, 'add_label').options.values, mode.value]
    }}""")
    labels, markdown = found
    assert "boat" in labels and "tabby" not in labels and markdown is True
