"""Reports in the files of a real ComfyUI: of any client, of a sampler that did not run again, in all formats."""

import io
import json
import urllib.parse

import pytest
from comfy_host import EDITOR, graph
from PIL import Image


def saved(comfy, entry, node="8"):
    """The file that a node saved."""
    (file,) = entry["outputs"][node]["images"]
    return comfy.bytes(f"/view?{urllib.parse.urlencode(file)}")


def runs(content):
    """Node and seconds of the runs in a PNG."""
    text = Image.open(io.BytesIO(content)).text
    return [(run["node"], run["seconds"]) for run in json.loads(text["fastar"])["runs"]]


@pytest.mark.parametrize(("extra", "seed"), [(None, 101), (EDITOR, 102)], ids=["a program", "the editor"])
def test_an_image_of_reused_samplers_has_their_reports(comfy, extra, seed):
    """Only the name of the file changes, so only Save Image runs again."""
    prompts = [graph(n3={"seed": seed}, n4={"seed": seed}, n8={"filename_prefix": name}) for name in ("one", "two")]
    first, again = [comfy.wait(comfy.queue(prompt, extra=extra)) for prompt in prompts]
    (reused,) = [data["nodes"] for name, data in again["status"]["messages"] if name == "execution_cached"]
    assert set(reused) >= {"3", "4", "7"}
    assert runs(saved(comfy, first)) == runs(saved(comfy, again)) and len(runs(saved(comfy, again))) == 2


def test_a_prompt_that_waited_for_the_sampler_has_its_report(comfy):
    prompts = [graph(n3={"seed": 103}, n4={"seed": 103}, n8={"filename_prefix": name}) for name in ("one", "two")]
    first, second = [comfy.wait(number) for number in [comfy.queue(prompt) for prompt in prompts]]
    assert runs(saved(comfy, first)) == runs(saved(comfy, second)) and len(runs(saved(comfy, second))) == 2


FORMATS = {
    "webp": ("SaveAnimatedWEBP", {"fps": 2.0, "lossless": True, "quality": 80, "method": "default"}),
    "png": ("SaveAnimatedPNG", {"fps": 2.0, "compress_level": 4}),
}


@pytest.mark.parametrize("ending", FORMATS)
def test_load_report_reads_animations_of_core(comfy, ending):
    kind, inputs = FORMATS[ending]
    shown = {"class_type": kind, "images": ["5", 0], "filename_prefix": "animated", **inputs}
    prompt = graph(n7={}, n8={"filename_prefix": "x"}, n9=shown)
    (comfy.base / "input" / f"animated.{ending}").write_bytes(saved(comfy, comfy.wait(comfy.queue(prompt)), "9"))

    loaded = {
        "1": {"class_type": "FastARLoadReport", "inputs": {"image": f"animated.{ending}"}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 2]}},
    }
    assert "| seconds" in comfy.run(loaded)["2"]["text"][0]
    assert f"animated.{ending}" in str(comfy.get("/object_info/FastARLoadReport"))


def test_a_prompt_from_before_the_last_widgets_runs(comfy):
    """As an API client may have saved it: with the first widgets only."""
    prompt = graph()
    for number, kept in {"1": ["checkpoint"], "2": ["labels"], "7": []}.items():
        inputs = prompt[number]["inputs"]
        prompt[number]["inputs"] = {name: v for name, v in inputs.items() if name in kept or isinstance(v, list)}
    assert comfy.run(prompt)["8"]["images"]
