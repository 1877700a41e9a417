"""NextStep on the command line and in Python: images of prompts, an edit, and what is refused with the reason."""

import json
import re

import fastar_nodes
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.runs import batches
from nextstep_models import FOLDER
from PIL import Image

QUICK = "--device cpu --set diffusion_steps=2 --set width=16 --set height=8"
SOURCE = FOLDER / "input_0.png"


@pytest.fixture
def editor(tmp_path):
    """The tiny NextStep under the name of one that edits images of 16 x 16 tokens."""
    folder = tmp_path / "NextStep-1-Large-Edit-256px"
    folder.symlink_to(FOLDER / "model")
    return folder


def test_images_of_prompts_that_are_not_square(cli):
    answer = cli(
        f"compare {QUICK} --prompt 'a red house' --prompt 'a boat' --negative blurry --json a.json --model",
        FOLDER / "model",
    )
    assert answer.code == 0 and "NextStep" in answer.out, answer
    (run,) = json.load(open("a.json"))["runs"]
    assert run["sampler"] == "nextstep" and len(run["conditions"]) == 2
    assert Image.open("compare.png").width > 0


def test_an_image_is_edited(cli, editor):
    """With guidance of its own for the image there is a third branch."""
    calls = []
    for scale in (1, 2):
        line = f"compare {QUICK} --prompt night --set cfg_img={scale} --json a.json"
        answer = cli(line, "--model", editor, "--image", SOURCE)
        assert answer.code == 0, answer
        (run,) = json.load(open("a.json"))["runs"]
        calls.append(run["counts"]["head_rows"] / run["counts"]["head_calls"])
    assert calls == [2, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--grid 4", "grid: no sampler of this run uses this option, because width and height"),
        ("--draft demo", "draft: no sampler of this run uses this option"),
        ("--samplers zipar", "samplers: zipar"),
        ("--label 3", "label: .* read prompts, not classes"),
        ("--set width=18", "width: .* cannot be divided into tokens of 4 x 4 pixels"),
        ("--set cfg=0.5", "cfg: 0.5 is outside 1 to 20"),
        ("--set parallel=2", "parallel: .*needs a model of discrete tokens"),
        ("--dtype fp16", "dtype: .*nobody has tested it in fp16"),
        ("--batch 3 --set diffusion_steps=2", "batch: the noise of 3 images with 2 diffusion steps needs more than"),
        ("--image SOURCE --freedom 3", "freedom: NextStep-1-Large-Edit-256px does not use this setting"),
        ("--image SOURCE --negative blurry", "negative: with --image, .* use their own negative text"),
    ],
    ids=str,
)
@pytest.mark.fast_cases(every=2)
def test_what_cannot_be_is_refused(cli, sentence, editor, monkeypatch, options, said):
    monkeypatch.setattr(batches, "NOISE_LIMIT", 4 * 2 * 4 * 256 * 16)
    asked = "" if "--label" in options else "--prompt night"
    words = f"compare --device cpu {asked} {options}".split()
    text = sentence(cli(*(SOURCE if word == "SOURCE" else word for word in words), "--model", editor))
    assert re.search(said, text), text


def test_a_model_that_was_not_trained_to_edit_is_refused(cli, sentence, tmp_path):
    folder = tmp_path / "NextStep-1.1"
    folder.symlink_to(FOLDER / "model")
    text = sentence(cli("compare --device cpu --prompt night --model", folder, "--image", SOURCE))
    assert "NextStep-1.1 was not trained to edit" in text and "load NextStep-1-Large-Edit" in text


def test_an_image_is_edited_in_python_too(editor):
    pipe = fastar_nodes.load(editor, dtype="fp32", device="cpu")
    settings = {"diffusion_steps": 2, "width": 16, "height": 8, "seed": 3}
    made = pipe.sample("night", image=Image.open(SOURCE), cfg_img=2.0, **settings)
    assert made.latents.shape == (1, 4, 4, 8) and not torch.equal(
        made.latents, pipe.sample("night", **settings).latents
    )
    with pytest.raises(UserError, match="^freedom: NextStep-1-Large-Edit-256px does not use this setting"):
        pipe.sample("night", image=Image.open(SOURCE), freedom=3.0, **settings)
    with pytest.raises(UserError, match="^negative: "):
        pipe.sample("night", image=Image.open(SOURCE), negative="blurry", **settings)
