"""A run as nodes, command line and Python make it: its checks, its memory, and what its sampler gets."""

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.limits import SEEDS, whole
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.mar.settings import MARSettings
from tiny_models import tiny_mar

CPU = torch.device("cpu")
FEW = MARSettings(steps=4, diffusion_steps=4)


def drawing(**about):
    """Three images of a tiny MAR, numbered as in a batch of ten."""
    usual = {
        "entry": SAMPLERS["mar"],
        "model": tiny_mar(),
        "settings": FEW,
        "condition": from_ids((1, 4, 0)),
        "seed": 5,
        "numbers": (7, 3, 9),
    }
    return Drawing(**{**usual, **about})


def edit_of(model, images=1):
    side = model.net.config.grid * model.patch
    start = torch.zeros(images, model.net.config.channels // model.patch**2, side, side)
    mask = torch.zeros(1, side, side)
    mask[:, 0] = 1
    return Edit(start, mask)


def test_an_image_is_that_of_its_number():
    three, _ = finish(drawing().steps())
    alone, report = finish(drawing(condition=from_ids((4,)), numbers=(3,)).steps())
    torch.testing.assert_close(alone[0], three[1], rtol=1e-4, atol=1e-4)
    assert report.seed == 5 and not torch.equal(three[0], three[1])


@pytest.mark.parametrize("more", [{}, {"cache": CacheSettings()}], ids=["plain", "caches"])
def test_a_report_holds_the_memory_that_was_estimated(more):
    run = drawing(**more)
    _, report = finish(run.steps())
    assert report.memory == run.memory() and ("cached" in report.maps) == bool(more)


def test_what_is_wrong_is_refused_before_the_sampler_begins():
    def sampler(*given, **more):
        raise AssertionError("it began")

    model = tiny_mar()
    drawn = drawing(entry=replace(SAMPLERS["mar"], run=sampler), model=model)
    drawn.check(CPU, "batch")
    replace(drawn, edit=edit_of(model)).check(CPU, "batch")

    many = replace(drawn, condition=from_ids([1] * 100_000), settings=replace(FEW, diffusion_steps=1000))
    with pytest.raises(UserError, match="^batch: the noise of 100000 images with 1000 diffusion steps"):
        many.check(CPU, "batch")
    with pytest.raises(UserError, match="^latent_image: its batch has 2 entries"):
        replace(drawn, edit=edit_of(model, images=2)).check(CPU, "batch")
    with pytest.raises(UserError, match="^mask: it is empty"):
        replace(drawn, edit=replace(edit_of(model), mask=torch.zeros(1, 4, 4))).check(CPU, "batch")


@pytest.mark.parametrize("value", [0, SEEDS - 1, torch.tensor(3)], ids=str)
def test_whole_numbers(value):
    assert whole(value, "seed", 0, SEEDS - 1) == int(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (SEEDS, f"seed: {SEEDS} is outside 0 to {SEEDS - 1}."),
        (-1, f"seed: -1 is outside 0 to {SEEDS - 1}."),
        (True, "seed: True is not a whole number."),
        (1.0, "seed: 1.0 is not a whole number."),
        ("7", "seed: '7' is not a whole number."),
        (["x" * 99], f"seed: {str(['x' * 99])[:60]} is not a whole number."),
    ],
    ids=str,
)
def test_what_is_no_whole_number(value, message):
    with pytest.raises(UserError) as problem:
        whole(value, "seed", 0, SEEDS - 1)
    assert str(problem.value) == message
