"""Janus on the command line: its file is identified, and prompts of a run are one batch."""

import json

import janus_images
import pytest
from janus_files import one_file


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(one_file(tmp_path_factory.mktemp("janus") / "tiny.safetensors"))


def test_the_usual_samplers_of_a_janus_and_several_prompts(cli, path):
    line = "compare --device cpu --prompt cat --prompt moon"
    done = cli(line, "--model", path)
    assert done.code == 0 and "LlamaGen" in done.out and "ZipAR" in done.out
    assert cli(f"{line} --samplers llamagen --set llamagen.parallel=4", "--model", path).code == 0


OPTIONS = {
    "--samplers par": "samplers: par",
    "--grid 8": "grid: ",
    "--negative x": "negative: ",
    "--label 3": "label: ",
}


@pytest.mark.parametrize(("options", "found"), OPTIONS.items())
@pytest.mark.fast_cases(3)
def test_what_does_not_apply(cli, path, options, found):
    prompt = "" if "label" in options else "--prompt cat"
    done = cli(f"compare --device cpu {prompt} {options}", "--model", path)
    assert done.code == 2 and found in done.err


# ------------------------------------------------------------------------------------------------ images in


@pytest.fixture(scope="module")
def editor(tmp_path_factory) -> str:
    return str(janus_images.one_file(tmp_path_factory.mktemp("editor") / "tiny.safetensors"))


IMAGES = [str(janus_images.FOLDER / f"edit/input_{i}.png") for i in range(2)]


def test_an_image_is_edited(cli, editor, tmp_path):
    line = "compare --device cpu --samplers llamagen,zipar --prompt night --prompt day --batch 2 --freedom 0"
    numbers = tmp_path / "numbers.json"
    done = cli(line, "--model", editor, "--image", IMAGES[0], "--image", IMAGES[1], "--json", numbers)
    assert done.code == 0
    first = json.loads(numbers.read_text())["runs"][0]
    assert len(first["conditions"]) == 4 and len(set(first["conditions"])) == 2
