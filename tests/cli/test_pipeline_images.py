"""An image in the pipeline: a Janus that edits changes it as a prompt says."""

import numpy as np
import pytest
import torch
from fastar_nodes import Edit, UserError, load
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from janus_images import FOLDER, one_file, picture
from PIL import Image
from safetensors.torch import load_file

FILE = FOLDER / "edit/input_0.png"


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return load(one_file(tmp_path_factory.mktemp("editor") / "tiny.safetensors"), dtype="fp32", device="cpu")


def test_freedom_is_a_number_or_its_text(pipe):
    wanted = pipe.sample("night", image=FILE, freedom=2.5, seed=1).latents
    assert torch.equal(pipe.sample("night", image=FILE, freedom="2.5", seed=1).latents, wanted)
    assert torch.equal(pipe.sample("night", image=FILE, freedom=np.float32(2.5), seed=1).latents, wanted)
    assert pipe.condition("night", image=FILE, freedom="5").freedom == 5


def test_every_form_of_an_image(pipe):
    plain = pipe.sample("night", image=FILE, seed=1).latents
    for image in (str(FILE), Image.open(FILE), picture(0).numpy(), picture(0).numpy()[None], [FILE]):
        assert torch.equal(pipe.sample("night", image=image, seed=1).latents, plain)


def test_images_and_prompts_in_pairs(pipe):
    """Image 3 of a batch of pairs equals it alone."""
    files = [FILE, FOLDER / "edit/input_1.png"]
    together, report = pipe.sample(["night", "day"], image=files, images=2, seed=1)
    alone = pipe.sample("day", image=files[1], first=3, seed=1).latents
    assert torch.equal(together[3], alone[0])
    assert len(set(report.conditions)) == 2
    images, _ = pipe("night", image=FILE, images=2, sampler="zipar", preset="balanced")
    assert len(images) == 2 and images[0].size == (16, 16)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_eight_bits(tmp_path, dtype):
    """Of the language model's blocks alone: what reads images stays as exact as it is in 16 bits."""
    eight = load(one_file(tmp_path / "tiny.safetensors"), dtype=dtype, device="cpu")
    both = eight.sample("night", image=FILE, images=2, seed=1).latents
    assert torch.equal(eight.sample("night", image=FILE, first=1, seed=1).latents[0], both[1])
    assert eight.ask(FILE, "what is it?", limit=3)

    reader = eight.readers.image_reader(eight.ready)
    assert {weight.dtype for weight in reader.net.parameters()} == {torch.float32}
    assert any(weight.dtype.itemsize == 1 for weight in eight.model.net.parameters())


def test_a_mask_and_an_image_in_the_condition(pipe):
    condition = pipe.condition("night", image=FILE)
    codes = pipe.encode(Image.open(FILE).resize((16, 16)))
    mask = torch.zeros(1, 16, 16)
    mask[:, 8:] = 1
    entry = SAMPLERS["llamagen"]
    made = finish(entry.run(pipe.model, condition, entry.settings(), TokenNoise(1, (0,)), edit=Edit(codes, mask)))
    assert torch.equal(made.latents[:, :2], codes[:, :2])


def test_with_a_mask_it_is_inpainting_from_the_prompt_alone(pipe):
    mask = np.full((16, 16), 255, np.uint8)
    drawn = pipe.sample("night", image=FILE, mask=mask, seed=1)
    assert torch.equal(drawn.latents, pipe.sample("night", seed=1).latents)


def test_the_recorded_answer(pipe):
    tokens = load_file(FOLDER / "understand/io.safetensors")["u2.tokens"].tolist()
    image = FOLDER / "edit/input_1.png"
    answer = pipe.ask(image, "What is on the table?")
    assert answer == pipe.model.detokenize(tokens).strip()
    assert len(pipe.ask(image, "What is on the table?", limit=2)) < len(answer)
    drawn = [pipe.ask(image, "What?", temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_questions_that_do_not_fit(pipe):
    for found, arguments in {
        "limit: ": {"limit": 0},
        "temperature: ": {"temperature": 3},
        "seed: ": {"seed": -1},
    }.items():
        with pytest.raises(UserError, match=found):
            pipe.ask(GREY, "What?", **arguments)
    with pytest.raises(UserError, match="image: there are 2 images"):
        pipe.ask([GREY, GREY], "What?")
    with pytest.raises(UserError, match="^model: .* questions about images; use a Janus"):
        load("demo-llamagen").ask(GREY, "What?")


GREY = np.zeros((3, 3, 3), np.uint8)
WRONG = {
    "there are 3 images for 1 prompt;": {"image": [GREY] * 3},
    "^freedom: ": {"freedom": 3},
    "negative: ": {"image": GREY, "negative": "no"},
    "freedom: 11 is outside 0 to 10": {"image": GREY, "freedom": 11},
    "freedom: -1 is outside 0 to 10": {"image": GREY, "freedom": "-1"},
    "freedom: 'much' is not a number": {"image": GREY, "freedom": "much"},
    "freedom: True is not a number": {"image": GREY, "freedom": True},
    r"freedom: \[5\] is not a number": {"image": GREY, "freedom": [5]},
    "freedom: nan is not a finite number": {"image": GREY, "freedom": float("nan")},
    "image: the array has the dtype float64": {"image": np.zeros((3, 3, 3))},
    "image: the array has the dtype torch.int64": {"image": torch.zeros(1, 4, 4, dtype=torch.int64)},
    "image: it is a int": {"image": 3},
    "image: there are 0 images": {"image": []},
}


@pytest.mark.parametrize(("found", "arguments"), WRONG.items())
@pytest.mark.fast_cases(2)
def test_mistakes(pipe, found, arguments):
    with pytest.raises(UserError, match=found):
        pipe("night", **arguments)
