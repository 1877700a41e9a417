"""BitDance on the command line: an image, and what is refused with the reason."""

import re

import pytest
from block_models import FOLDER, one_file
from fastar_nodes.runs import batches
from PIL import Image

QUICK = "--device cpu --set diffusion_steps=2"


@pytest.fixture
def path(tmp_path):
    return one_file(tmp_path / "bitdance.safetensors")


def test_an_image_of_labels_and_one_of_prompts_that_is_not_square(cli, path):
    answer = cli(f"compare {QUICK} --model", path, "--label", "1", "--out", "labels.png")
    assert answer.code == 0 and "BitDance" in answer.out, answer
    assert Image.open("labels.png").width > 0

    size = "--set width=8 --set height=16 --out prompt.png"
    answer = cli(f"compare {QUICK} {size} --model", FOLDER / "native", "--prompt", "a red house")
    assert answer.code == 0, answer


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--grid 4", "grid: no sampler of this run uses this option, because width and height"),
        ("--draft demo", "draft: no sampler of this run uses this option"),
        ("--batch 3 --set diffusion_steps=2", "batch: the noise of 3 images with 2 diffusion steps needs more than"),
    ],
)
@pytest.mark.fast_cases(2)
def test_what_cannot_be_is_refused(cli, sentence, path, monkeypatch, options, said):
    monkeypatch.setattr(batches, "NOISE_LIMIT", 4 * 2 * 4 * 16 * 6)
    text = sentence(cli(f"compare --device cpu {options} --model", path))
    assert re.search(said, text), text
