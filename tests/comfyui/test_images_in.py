"""An image and a prompt in, and a question about an image, in a real ComfyUI with the recorded tiny Janus: over HTTP,
and in the editor. Template 18 is opened and run in test_browser.py.
"""

import html
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import fastar_nodes
import janus_images
import numpy as np
import pytest
from comfy_host import ROOT, Comfy, widgets
from safetensors.torch import load_file
from test_browser import _no_complaint, _run, browser, editor  # noqa: F401  fixtures
from test_texts import TEXT

# ruff: noqa: F811

FILE = "Janus-4o-tiny.safetensors"
PICTURE = janus_images.FOLDER / "edit/input_0.png"


@pytest.fixture(scope="module")
def model(comfy):
    """The model in the server's folder, and images in its input folder."""
    path = comfy.base / "models" / "fastar" / FILE
    janus_images.one_file(path)
    for i in range(2):
        shutil.copyfile(janus_images.FOLDER / f"edit/input_{i}.png", comfy.base / "input" / f"in_{i}.png")
    yield path
    path.unlink()


def node(kind, **inputs):
    return {"class_type": kind, "inputs": {**widgets(kind), **inputs}}


def prompt_of(picture, **further):
    """A graph that loads model 1 and image 2."""
    nodes = {
        "1": node("FastARLoadJanus", checkpoint=FILE, dtype="fp32", speed="plain"),
        "2": {"class_type": "LoadImage", "inputs": {"image": picture}},
    }
    return nodes | further


def edit(sampler="FastARLlamaGenSampler", **inputs):
    """The graph of an edit, saved by node 6."""
    sampled = {"model": ["1", 0], "condition": ["3", 0], "seed": 7, "cfg": 5.0, "top_k": 0, **inputs}
    return prompt_of(
        "in_0.png",
        **{
            "3": node("FastARImageAndPrompt", image=["2", 0], text="make it night", images=2, freedom=1.0),
            "4": node(sampler, **sampled),
            "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 1]}},
            "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "edit"}},
        },
    )


def recorded_answer():
    """What the authors' code answered to the question about image 1."""
    tokens = load_file(janus_images.FOLDER / "understand/io.safetensors")["u2.tokens"]
    return janus_images.tiny_editor().detokenize(tokens.tolist()).strip()


def test_an_image_is_edited_as_in_python(comfy, model):
    images = comfy.run(edit())["6"]["images"]
    pipe = fastar_nodes.load(model, dtype="fp32", device="cpu")
    expected, _ = pipe("make it night", image=PICTURE, images=2, freedom=1.0, seed=7)
    assert len(images) == 2
    for shown, image in zip(images, expected, strict=True):
        assert np.abs(np.asarray(comfy.picture(shown)).astype(int) - np.asarray(image)).max() <= 1

    windows = comfy.run(edit(parallel=4))["6"]["images"]
    for shown, same in zip(images, windows, strict=True):
        assert np.array_equal(np.asarray(comfy.picture(shown)), np.asarray(comfy.picture(same)))
    assert len(comfy.run(edit("FastARZipARSampler"))["6"]["images"]) == 2


def test_a_question_is_answered(comfy, model):
    asked = node("FastARAskAboutImage", model=["1", 0], image=["2", 0], question="What is on the table?", seed=0)
    shown = {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}}
    prompt = prompt_of("in_1.png", **{"3": asked, "4": shown})
    assert comfy.run(prompt)["4"]["text"][0] == recorded_answer()

    # The tower and the output layer for words are held by the pack alone. Core unloads them without losing count.
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    assert comfy.run(prompt)["4"]["text"][0] == recorded_answer()
    assert "IndexError" not in comfy.log


def test_a_janus_pro_is_refused(comfy, model):
    pro = model.with_name("Janus-Pro-7B.safetensors")
    janus_images.one_file(pro, "Janus-Pro-7B")
    prompt = edit()
    prompt["1"]["inputs"]["checkpoint"] = pro.name
    assert "was not trained to edit" in comfy.complaint(prompt)
    pro.unlink()


# --- In the editor

# A graph as a user builds it: the loader and an image into Ask about Image, whose answer stands in Preview as Text.
ASK = """async () => {
    const add = (type, x, y, values) => {
        const node = LiteGraph.createNode(type)
        app.graph.add(node)
        node.pos = [x, y]
        for (const [name, value] of Object.entries(values))
            node.widgets.find(widget => widget.name === name).value = value
        return node
    }
    const model = add('FastARLoadJanus', 0, 0, {checkpoint: 'FILE', dtype: 'fp32'})
    const image = add('LoadImage', 0, 220, {image: 'in_1.png'})
    const ask = add('FastARAskAboutImage', 330, 0, {question: 'What is on the table?'})
    const shown = add('PreviewAny', 780, 0, {})
    model.connect(0, ask, 0)
    image.connect(0, ask, 1)
    ask.connect(0, shown, 0)
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [120, 120]

    // What stands on the node at each word that comes.
    window.words = []
    app.api.addEventListener('progress_text', () => window.words.push(
        ask.widgets.find(widget => widget.name === '$$node-text-preview')?.value))
}""".replace("FILE", FILE)


def ran(comfy: Comfy, editor: Any, screenshot: Path) -> dict[str, Any]:
    """Run the graph that is open and take a screenshot of it; its history entry."""
    editor.wait_for_timeout(1000)
    entry = _run(comfy, editor)
    assert not comfy.failure(entry)
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(screenshot))
    return entry


def test_words_stand_on_the_node_as_they_come(comfy: Comfy, editor: Any, model: Path, artifacts: Path) -> None:
    editor.set_viewport_size({"width": 1366, "height": 768})
    editor.evaluate(ASK)
    entry = ran(comfy, editor, artifacts / f"ask about image_{editor.renderer}.png")

    words = [html.unescape(text) for text in editor.evaluate("window.words")]
    assert len(words) == 8 and len({*words}) > 4, "a token each"
    assert all(later.startswith(text) for text, later in itertools.pairwise(words))
    assert editor.evaluate(TEXT, "FastARAskAboutImage") == recorded_answer()
    assert recorded_answer() in [output["text"][0] for output in entry["outputs"].values() if "text" in output]
    _no_complaint(editor)


# Feeds the blueprint with an image, and shows what it draws.
FEED = """() => {
    const [outer] = app.graph._nodes
    const image = LiteGraph.createNode('LoadImage'), shown = LiteGraph.createNode('PreviewImage')
    app.graph.add(image)
    app.graph.add(shown)
    outer.pos = [330, 0]
    shown.pos = [780, 0]
    image.widgets.find(widget => widget.name === 'image').value = 'in_1.png'
    image.connect(0, outer, 0)
    outer.connect(0, shown, 0)
    outer.widgets.find(widget => widget.name === 'checkpoint').value = 'FILE'
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [120, 120]
}""".replace("FILE", FILE)


def test_an_answer_is_drawn(comfy: Comfy, editor: Any, model: Path, artifacts: Path) -> None:
    blueprint = json.loads((ROOT / "subgraphs" / "Describe and Draw (Janus).json").read_text(encoding="utf-8"))
    editor.set_viewport_size({"width": 1366, "height": 768})
    editor.evaluate("graph => app.loadGraphData(graph)", blueprint)
    editor.wait_for_timeout(1000)
    editor.evaluate(FEED)
    entry = ran(comfy, editor, artifacts / f"describe and draw_{editor.renderer}.png")
    (image,) = [image for output in entry["outputs"].values() for image in output.get("images", [])]
    assert np.asarray(comfy.picture(image)).std() > 5
    _no_complaint(editor)
