"""What every sampler of blocks must do. A new one passes all of it."""

import copy
import functools
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from block_models import text_bitdance, tiny_bitdance
from fastar_nodes.errors import UserError
from fastar_nodes.networks import speed
from fastar_nodes.reports.record import COUNTS
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.blocks.bitdance import BlockLook, bitdance
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.conditioning import ClassCondition, PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise, row_keys
from small_settings import BLOCKS, small
from stepping import process_state, stepped
from waits import counted_waits, moved, waits_of_steps

FEW = BlockSettings(**small("bitdance"))
LINEAR = replace(FEW, cfg_schedule="linear")
SMALL = {"width": 8, "height": 16}
# Sampler, model, settings: every sampler, and more settings and models of BitDance.
CASES = {name: (SAMPLERS[name].run, tiny_bitdance(), SAMPLERS[name].settings(**small(name))) for name in BLOCKS}
CASES |= {
    "bitdance, no guidance": (bitdance, tiny_bitdance(), replace(FEW, cfg=1.0)),
    "bitdance, linear guidance": (bitdance, tiny_bitdance(), LINEAR),
    "bitdance, annealed": (bitdance, tiny_bitdance(), replace(LINEAR, diffusion_steps_end=1)),
    "bitdance, single tokens": (bitdance, tiny_bitdance(block=1, grid=3), LINEAR),
    "bitdance, one block": (bitdance, tiny_bitdance(block=16), FEW),
    "bitdance, prompts": (bitdance, text_bitdance(), replace(FEW, **SMALL)),
    "bitdance, speculation": (bitdance, tiny_bitdance(), replace(LINEAR, diffusion_steps=12, speculation=3)),
    "bitdance, speculation, no guidance": (
        bitdance,
        tiny_bitdance(),
        replace(FEW, diffusion_steps=12, cfg=1.0, speculation=3),
    ),
    "bitdance, speculation, annealed": (
        bitdance,
        tiny_bitdance(),
        replace(FEW, cfg=1.0, diffusion_steps_end=1, speculation=3),
    ),
    "bitdance, speculation, single tokens": (
        bitdance,
        tiny_bitdance(block=1, grid=3),
        replace(LINEAR, speculation=8),
    ),
    "bitdance, speculation, prompts": (
        bitdance,
        text_bitdance(),
        replace(FEW, **SMALL, diffusion_steps=24, speculation=3),
    ),
}
# Images of a batch; the prompts differ in length.
LABELS = (1, 4, 0)
PROMPTS = ("a red house", "", "An old boat by the sea")


def start(case, images=(0, 1, 2), which=(0, 1, 2), seed=5, move=lambda m: m, **more):
    """The steps of a case; ``move`` changes the model."""
    sampler, model, settings = CASES[case]
    condition = from_ids([LABELS[i] for i in which])
    if model.condition == "prompt":
        condition = PromptCondition(tuple(PROMPTS[i] for i in which))
    return sampler(
        move(model), **{"condition": condition, "settings": settings, **more}, noise=PairedNoise(seed, images)
    )


whole = functools.cache(lambda case: stepped(start(case)))


# A case of every path of the code; the others are slow.
FAST = (
    "bitdance",
    "bitdance, single tokens",
    "bitdance, one block",
    "bitdance, prompts",
    "bitdance, speculation",
    "bitdance, speculation, annealed",
)
# Cases of tests that sample again, which takes long in all cases of FAST together.
FEWER = ("bitdance", "bitdance, prompts", "bitdance, speculation")


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


def evaluations(case) -> list[int]:
    """Evaluations of the head, block by block, by hand."""
    _, model, settings = CASES[case]
    height, width = model.grid(settings.height, settings.width)
    blocks = height * width // model.net.block
    if settings.diffusion_steps_end is None:
        return [settings.diffusion_steps + 1] * blocks

    assert (settings.diffusion_steps, settings.diffusion_steps_end, blocks) == (4, 1, 4)
    return [5, 4, 3, 2]


def speculates(case) -> bool:
    """Whether several diffusion steps are verified in one evaluation; ``test_speculative_blocks.py`` counts those."""
    return CASES[case][2].speculation > 1


@pytest.mark.fast_cases(*FEWER)
def test_tokens_are_bits_and_another_seed_is_another_image(case):
    latents = whole(case)[1].latents
    assert latents.dtype == torch.float32 and bool((latents.abs() == 1).all())
    assert not torch.equal(latents, finish(start(case, seed=6)).latents)
    assert not torch.equal(latents[0], latents[1])


@pytest.mark.fast_cases(*FEWER)
def test_an_image_does_not_depend_on_its_batch(case):
    _, together = whole(case)
    for i in range(3):
        alone = finish(start(case, (i,), (i,)))
        assert torch.equal(alone.latents[0], together.latents[i])
        for name, values in alone.report.maps.items():
            assert np.array_equal(values[0], together.report.maps[name][i]), name


@pytest.mark.fast_cases(*FEWER)
def test_predictions_that_are_not_finite_are_refused(case):
    """The sign of NaN would be a token."""

    def spoilt(model):
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.net.denoiser.final_layer.linear.weight[0, 0] = torch.nan
        return model

    with pytest.raises(UserError, match="^model: .*latents that are not finite"):
        finish(start(case, move=spoilt))


@pytest.mark.parametrize("sampler", ["bitdance", "bitdance, speculation"])
@pytest.mark.parametrize("wrong", [0, 1, 3], ids="block {}".format)
def test_one_block_of_one_image_is_enough(monkeypatch, sampler, wrong):
    """Later blocks are finite again, because they read the signs only."""
    look = BlockLook.__call__

    def spoilt(self, block):
        hidden = look(self, block).clone()
        if block == wrong:
            hidden[1] = torch.nan
        return hidden

    monkeypatch.setattr(BlockLook, "__call__", spoilt)
    with pytest.raises(UserError, match="^model: .*latents that are not finite"):
        finish(start(sampler))


@pytest.mark.fast_cases(*FEWER)
def test_repeats_itself_and_changes_nothing_global(case):
    model = CASES[case][1]
    before, weights = process_state(), {k: v.clone() for k, v in model.net.state_dict().items()}
    left = start(case)
    next(left)
    assert process_state() == before, "in the middle of a run"
    left.close()
    again = finish(start(case))
    assert process_state() == before
    assert all(torch.equal(v, weights[k]) for k, v in model.net.state_dict().items())
    assert torch.equal(again.latents, whole(case)[1].latents) and again.report.counts == whole(case)[1].report.counts


@pytest.mark.fast_cases(*FAST)
def test_yields_after_every_evaluation_so_that_a_run_can_be_cancelled_within_a_block(case):
    seen, result = whole(case)
    counts = evaluations(case)
    total = sum(counts)
    done = [s.done for s in seen]
    assert all(s.total == total for s in seen)
    if speculates(case):  # a step for every window
        assert sorted(set(done)) == done and done[-1] == total
    else:
        assert done == list(range(1, total + 1))

    # The tokens of a block are there with its last evaluation.
    block = CASES[case][1].net.block
    images, _, height, width = result.latents.shape
    ends = np.cumsum(counts)
    for step in seen:
        finished = int((ends <= step.done).sum())
        assert step.decided.shape == (images, height, width)
        assert int(step.decided[0].sum()) == block * finished
        assert bool((step.latents.abs().sum(1) > 0).eq(step.decided).all())
    assert torch.equal(seen[-1].latents, result.latents)


@pytest.mark.fast_cases(*FAST)
def test_report_adds_up(case):
    _, model, settings = CASES[case]
    result = whole(case)[1]
    report = result.report
    counts = evaluations(case)
    branches = 1 + (settings.cfg != 1)
    block = model.net.block

    assert report.sampler == "bitdance" and set(report.counts) <= set(COUNTS)
    assert report.counts["transformer_passes"] == len(counts) + 1  # prompt, first rows, all blocks but the last
    if speculates(case):
        assert 0 < report.counts["accepted_steps"] < report.counts["drafted_steps"]
        assert report.counts["head_calls"] <= sum(counts)
    else:
        assert report.counts["head_calls"] == sum(counts)
        assert report.counts["head_rows"] == sum(counts) * branches * 3 * block
    step, outcome = report.maps["step"], report.maps["outcome"]
    assert step.min() == 0 and step.max() == len(counts) - 1 and not outcome.any()
    assert np.array_equal(np.bincount(step[0].flatten()), [block] * len(counts))
    assert report.settings == asdict(settings) and report.images == 3 and report.seed == 5
    assert report.seconds > 0 and sum(report.phases.values()) <= report.seconds * 1.05


@pytest.mark.fast_cases("bitdance, one block", "bitdance, speculation")
def test_an_evaluation_makes_the_host_wait_for_nothing(case):
    with counted_waits() as waits:
        found, _ = waits_of_steps(start(case, move=moved), waits)
    # Speculation reads once a window what is accepted.
    assert {part.total() for part in found[1:-1]} == {int(speculates(case))}, found


def test_bad_conditions_say_so(case):
    _, model, _ = CASES[case]
    wrong = from_ids((5,)) if model.condition == "class" else from_ids((1,))
    for condition in (wrong, ClassCondition((), ()) if model.condition == "class" else PromptCondition(())):
        with pytest.raises(UserError, match="^condition"):
            finish(start(case, range(len(condition)), condition=condition))
    with pytest.raises(UserError, match="^condition: it asks for 3 images, but the noise is for 2"):
        finish(start(case, (0, 1)))


# ------------------------------------------------------------------------------------------------ a plain reference


def reference(model, condition, settings, noise, counts):
    """Latents of the equations as published, without caches: every pass reads the whole sequence of one image and one
    branch, and the head is computed from scratch. v = (x1 - x) / (1 - t), score = (t v - x) / (1 - t). ``counts``: the
    diffusion steps of every block.
    """
    net = model.net
    grid = model.grid(settings.height, settings.width)
    order = net.order(grid)
    length, size = len(order), net.block
    places = net.places(grid)
    blocks = length // size
    out = []

    for image in range(len(condition)):
        alone = PairedNoise(noise.seed, noise.images[image : image + 1])
        start = alone.start_noise("full", length, net.channels)[0, order]
        steps = alone.step_noise("full", settings.diffusion_steps, length, net.channels)[0][:, order]
        null_start = alone.start_noise("null", size, net.channels)[0]
        null_steps = alone.step_noise("null", settings.diffusion_steps, size, net.channels)[0]
        uniforms = uniforms_of(alone, "verify", blocks, settings)
        null_uniforms = uniforms_of(alone, "null/verify", blocks, settings)

        if model.condition == "class":
            labels = [torch.tensor([condition.labels[image]]), torch.tensor([5])]
            inputs = [net.class_rows(label) for label in labels]
        else:
            ids = [model.prompt(condition.texts[image]), model.null_prompt()]
            rows = [model.prompt_rows([one], grid) for one in ids]
            inputs = [(prefix, first) for prefix, _, first in rows]

        tokens = [torch.zeros(1, 0, net.channels)] * 2
        for block in range(blocks):
            at = slice(block * size, (block + 1) * size)
            hidden = []
            for (prefix, first), known in zip(inputs, tokens, strict=True):
                fed = [first] if not block else [first, net.embed(known, places[: at.start])]
                hidden.append(net.predictors(prefix, torch.cat(fed, 1), grid)[:, -size:] + places[at])

            linear = 1 + (settings.cfg - 1) * block / blocks
            cfg = linear if settings.cfg_schedule == "linear" else settings.cfg
            entries = [i * settings.diffusion_steps // counts[block] for i in range(counts[block])]
            chosen = steps[entries]
            null_chosen = null_steps[entries]
            window = settings.speculation
            if cfg == 1:
                made = null = sampled(net, hidden[:1], start[at], chosen[:, at], uniforms[block], 1.0, window)
                if settings.cfg != 1:
                    null = sampled(net, hidden[1:], null_start, null_chosen, null_uniforms[block], 1.0, window)
            else:
                made = null = sampled(net, hidden, start[at], chosen[:, at], uniforms[block], cfg, window)
            tokens = [torch.cat([tokens[0], made], 1), torch.cat([tokens[1], null], 1)]

        cells = torch.empty_like(tokens[0])
        cells[:, order] = tokens[0]
        out.append(cells.transpose(1, 2).unflatten(2, grid))

    return torch.cat(out)


def uniforms_of(noise, stream, blocks, settings):
    """A uniform number for every diffusion step of every block of an image, [blocks, N]."""
    return CounterRNG(row_keys(noise, stream, blocks)[0]).uniform(-1, 0, settings.diffusion_steps)


def sampled(net, hidden, x, noise, uniforms, cfg, window):
    """The signs of a block [1, P, C] by Euler-Maruyama steps from t = 0 to 0.95, and an evaluation there.

    With speculation a step is drafted with a frozen prediction: 0, then that of the last step that was rejected, or
    the last of a whole window.
    """
    x = x[None]
    count = len(noise)
    dt = 0.95 / count
    frozen = torch.zeros_like(x)
    since = 0  # steps that the frozen prediction has drafted
    for i in range(count + 1):
        t = dt * i
        left = max(1 - t, 0.05)
        predictions = [net.denoiser(x, torch.tensor([t]), rows) for rows in hidden]
        velocities = [(one - x) / left for one in predictions]
        v = velocities[0]
        if len(velocities) == 2:
            v = velocities[1] + cfg * (velocities[0] - velocities[1])
        if i == count:
            x = x + 0.05 * v
            break

        std = math.sqrt(2 * (1 - t) * dt)
        mean = moved_on(x, v, t, dt)
        if window < 2:
            x = mean + std * noise[i]
            continue

        drafted = moved_on(x, (frozen - x) / left, t, dt)
        prediction = x + left * v
        x, accepted = coupled(drafted + std * noise[i], drafted, mean, std, float(uniforms[i]))
        since += 1
        if not accepted or since == window:
            frozen = prediction
            since = 0

    return torch.where(x >= 0, 1.0, -1.0)


def moved_on(x, v, t, dt):
    """x after a step of the drift v + (1 - t) score."""
    score = (t * v - x) / (1 - t)
    return x + (v + (1 - t) * score) * dt


def coupled(draft, drafted, mean, std, uniform):
    """A sample of N(mean, std^2) from a draft of N(drafted, std^2), and whether it is the draft."""
    of_mean = -((draft - mean).double() ** 2).sum() / (2 * std**2)
    of_drafted = -((draft - drafted).double() ** 2).sum() / (2 * std**2)
    if math.log(uniform) <= of_mean - of_drafted:
        return draft, True

    # Mirrored at the plane halfway between the means.
    across = (drafted - mean) / (drafted - mean).norm()
    z = draft - drafted
    return mean + z - 2 * (across * z).sum() * across, False


@torch.no_grad()
@pytest.mark.fast_cases("bitdance, no guidance", "bitdance, one block", "bitdance, prompts", "bitdance, speculation")
def test_a_plain_reference_draws_the_same(case):
    _, model, settings = CASES[case]
    condition = from_ids(LABELS) if model.condition == "class" else PromptCondition(PROMPTS)
    counts = [evaluated - 1 for evaluated in evaluations(case)]
    expected = reference(model, condition, settings, PairedNoise(5, (0, 1, 2)), counts)
    assert torch.equal(whole(case)[1].latents, expected)


def test_the_report_says_what_this_run_ran_plain_and_not_an_earlier_one(monkeypatch):
    model = tiny_bitdance(seed=1)
    monkeypatch.setattr(speed.Recordable, "compiled", lambda self, function, part: function)
    model.net.speed = speed.COMPILE
    model.net.note_plain("a part of an earlier run")

    steps = bitdance(model, from_ids((1,)), FEW, PairedNoise(5, (0,)))
    next(steps)
    model.net.note_plain("diffusion head")
    assert (
        finish(steps).report.note == "speed: compile was chosen, but these parts ran with speed plain: diffusion head"
    )
