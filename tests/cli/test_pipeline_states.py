"""The pipeline in the states of torch that other packs and scripts leave: loading, drawing, editing, asking."""

import numpy as np
import pytest
from fastar_nodes import load
from janus_images import FOLDER, one_file
from test_pipeline import SAME
from torch_states import STATES, state_of_torch

FILE = FOLDER / "edit/input_0.png"
IMAGE = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
MASK = np.pad(np.full((8, 8), 255, np.uint8), 8)


def everything_of(pipe, call):
    """What the pipeline makes: images, latents, their pixels, latents of an image, and an image with a new part."""
    images, report = pipe(**call, seed=3)
    drawn = pipe.sample(**call, seed=3).latents
    made = [*map(np.asarray, images), drawn, pipe.decode(drawn), pipe.encode(IMAGE)]
    if report.sampler != "mulosd":
        edited, _ = pipe(**call, seed=3, image=IMAGE, mask=MASK)
        made += map(np.asarray, edited)
    return [np.asarray(one) for one in made]


def same(ones, others):
    return len(ones) == len(others) and all(
        one.dtype == other.dtype and np.array_equal(one, other) for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("name", STATES)
@pytest.mark.fast_cases("everything-mar", "everything-hybrid", "everything-llamagen")
def test_the_same_images_whatever_the_state(name, case, files):
    named, call, _ = SAME[case]
    call = {"images": 1, **call}

    def loaded():
        return load(**{key: getattr(files, file) for key, file in named.items()}, device="cpu", dtype="fp32")

    expected = everything_of(loaded(), call)
    with STATES[name]():
        found = state_of_torch()
        pipe = loaded()
        assert same(everything_of(pipe, call), expected)
        assert state_of_torch() == found

    assert same(everything_of(pipe, call), expected), "loaded in the state, used outside of it"


@pytest.mark.parametrize("name", ["everything", "default dtype fp16"])
def test_a_janus_edits_and_answers(name, tmp_path):
    path = one_file(tmp_path / "tiny.safetensors")

    def made():
        pipe = load(path, dtype="fp32", device="cpu")
        drawn = pipe.sample("night", image=FILE, seed=1).latents
        return drawn.tolist(), pipe.ask(FILE, "What?", temperature=1.5, seed=1, limit=8)

    expected = made()
    with STATES[name]():
        assert made() == expected
