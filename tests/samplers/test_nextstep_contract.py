"""What every sampler of continuous tokens in raster order must do. A new one passes all of it."""

import copy
import functools
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks import speed
from fastar_nodes.networks.llama import attend
from fastar_nodes.networks.nextstep import EPS, to_tokens
from fastar_nodes.reports.record import COUNTS
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.nextstep.nextstep import TokenLook, nextstep
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise, row_keys
from nextstep_models import EDITOR, PROMPTS, edits_of, tiny_nextstep
from small_settings import CONTINUOUS, small
from stepping import process_state, stepped
from waits import counted_waits, moved

FEW = NextStepSettings(**small("nextstep"))
# Sampler, model, settings: every sampler, and more settings and models of NextStep.
CASES = {name: (SAMPLERS[name].run, tiny_nextstep(), SAMPLERS[name].settings(**small(name))) for name in CONTINUOUS}
MORE = {
    "no guidance": {"cfg": 1.0},
    "falling guidance": {"cfg_schedule": "falling"},
    "rising guidance": {"cfg_schedule": "rising"},
    "annealed": {"diffusion_steps_end": 1},
    "em": {"solver": "em", "time_shift": 3.2},
    "sde": {"solver": "sde"},
    "ode": {"solver": "ode"},
    "cps": {"solver": "cps"},
    "normalised": {"use_norm": True},
    "not square": {"width": 16, "height": 8},
    "speculation": {"diffusion_steps": 12, "cfg": 1.0, "speculation": 3},
    "speculation, em": {"diffusion_steps": 12, "solver": "em", "speculation": 3},
    "speculation, cps": {"diffusion_steps": 6, "solver": "cps", "speculation": 8},
}
CASES |= {f"nextstep, {case}": (nextstep, tiny_nextstep(), replace(FEW, **more)) for case, more in MORE.items()}
CASES |= {
    "nextstep, edits": (nextstep, tiny_nextstep(EDITOR), replace(FEW, cfg_img=1.5)),
    "nextstep, edits, one guidance": (nextstep, tiny_nextstep(EDITOR), FEW),
}
# Rounding in fp32: a batch and an image alone take different kernels, and guidance multiplies what they differ by.
ROUNDING = 1e-4


def condition_of(case, which=(0, 1, 2)):
    """Prompts of different lengths, or images with them."""
    if "edits" in case:
        return edits_of(tuple(which))
    return PromptCondition(tuple(PROMPTS[i] for i in which), "blurry")


def start(case, images=(0, 1, 2), which=(0, 1, 2), seed=5, move=lambda m: m, **more):
    """The steps of a case; ``move`` changes the model."""
    sampler, model, settings = CASES[case]
    given = {"condition": condition_of(case, which), "settings": settings, **more}
    return sampler(move(model), **given, noise=PairedNoise(seed, images))


whole = functools.cache(lambda case: stepped(start(case)))

# A case of every path of the code; the others are slow.
FAST = ("nextstep", "nextstep, annealed", "nextstep, em", "nextstep, speculation", "nextstep, edits")
FEWER = ("nextstep", "nextstep, speculation", "nextstep, edits")


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


def counts_of(case) -> list[int]:
    """Diffusion steps, token by token, by hand."""
    _, model, settings = CASES[case]
    height, width = model.grid(settings.height, settings.width)
    if settings.diffusion_steps_end is None:
        return [settings.diffusion_steps] * (height * width)

    assert (settings.diffusion_steps, settings.diffusion_steps_end, height * width) == (3, 1, 9)
    return [3, 2, 2, 2, 2, 1, 1, 1, 1]


@pytest.mark.fast_cases(*FEWER)
def test_another_seed_is_another_image(case):
    latents = whole(case)[1].latents
    assert latents.dtype == torch.float32 and not torch.equal(latents, finish(start(case, seed=6)).latents)
    assert not torch.equal(latents[0], latents[1])


@pytest.mark.fast_cases(*FEWER)
def test_an_image_does_not_depend_on_its_batch(case):
    _, together = whole(case)
    for i in range(3):
        alone = finish(start(case, (i,), (i,)))
        close(alone.latents[0], together.latents[i])
        for name, values in alone.report.maps.items():
            assert np.array_equal(values[0], together.report.maps[name][i]), name


@pytest.mark.parametrize("wrong", [0, 4, 8], ids="token {}".format)
def test_one_token_of_one_image_that_is_not_finite_is_enough(monkeypatch, wrong):
    look = TokenLook.__call__

    def spoilt(self, cell, cells):
        conditions = look(self, cell, cells).clone()
        if cell == wrong:
            conditions[1] = torch.nan
        return conditions

    monkeypatch.setattr(TokenLook, "__call__", spoilt)
    with pytest.raises(UserError, match="^model: .*latents that are not finite"):
        finish(start("nextstep"))


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
def test_yields_after_every_token(case):
    seen, result = whole(case)
    tokens = len(counts_of(case))
    assert [s.done for s in seen] == list(range(1, tokens + 1)) and all(s.total == tokens for s in seen)

    _, model, settings = CASES[case]
    height, width = model.grid(settings.height, settings.width)
    for step in seen:
        assert step.decided.shape == (3, height, width) and int(step.decided[0].sum()) == step.done
        shown = to_tokens(step.latents, model.net.config.patch).abs().sum(-1) > 0
        assert torch.equal(shown, step.decided.flatten(1))
    assert torch.equal(seen[-1].latents, result.latents)


@pytest.mark.fast_cases(*FAST)
def test_report_adds_up(case):
    _, model, settings = CASES[case]
    result = whole(case)[1]
    report = result.report
    counts = counts_of(case)
    branches = 1 + settings.uses_guidance + ("edits" in case and settings.cfg_img != 1)

    assert report.sampler == "nextstep" and set(report.counts) <= set(COUNTS)
    assert report.counts["transformer_passes"] == len(counts), "the prompts, and all tokens but the last"
    if settings.speculation_window > 1:
        assert 0 < report.counts["accepted_steps"] < report.counts["drafted_steps"]
        assert report.counts["head_calls"] <= sum(counts) * 3
    else:
        assert report.counts["head_calls"] == sum(counts)
        assert report.counts["head_rows"] == sum(counts) * branches * 3
    step, outcome = report.maps["step"], report.maps["outcome"]
    assert not outcome.any() and step[0].flatten().tolist() == list(range(len(counts)))
    assert report.settings == asdict(settings) and report.images == 3 and report.seed == 5
    assert report.seconds > 0 and sum(report.phases.values()) <= report.seconds * 1.05


@pytest.mark.fast_cases("nextstep", "nextstep, edits", "nextstep, speculation")
def test_a_token_makes_the_host_wait_for_nothing(case):
    """Speculation reads once a window, which is a call of the head, what is accepted."""
    before = 0
    condition = condition_of(case)  # the autoencoder that reads images is loaded elsewhere
    with counted_waits() as waits:
        for step in start(case, move=moved, condition=condition):
            calls = step.report.counts["head_calls"]
            if step.done > 1:  # the first token also has the setup
                assert waits.total() == (calls - before if CASES[case][2].speculation_window > 1 else 0), waits
            before = calls
            waits.clear()


def test_bad_conditions_say_so(case):
    for condition in (from_ids((1,)), PromptCondition(())):
        with pytest.raises(UserError, match="^condition"):
            finish(start(case, range(len(condition)), condition=condition))
    with pytest.raises(UserError, match="^condition: it asks for 3 images, but the noise is for 2"):
        finish(start(case, (0, 1)))


# ------------------------------------------------------------------------------------------------ a plain reference


def reference(model, condition, settings, noise, counts):
    """Latents of the equations as published, without caches: every token reads the whole sequence of one image and one
    branch, and the head is computed from scratch.
    """
    net = model.net
    grid = model.grid(settings.height, settings.width)
    length = grid[0] * grid[1]
    out = []
    for image, text in enumerate(condition.texts):
        alone = PairedNoise(noise.seed, noise.images[image : image + 1])
        starts = alone.start_noise("full", length, net.channels)[0]
        steps = alone.step_noise("full", settings.diffusion_steps, length, net.channels)[0]

        source = None if condition.kind == "prompt" else condition.encoded_images[image]
        negative = condition.unconditional if source is None else "Copy original image."
        rows = [row_of(model, text, source, grid)]
        if settings.cfg != 1 and source is not None and settings.cfg_img != 1:
            rows.append(row_of(model, negative, source, grid))
        if settings.cfg != 1:
            rows.append(row_of(model, negative, None, grid))

        keys = row_keys(alone, "verify", length)[0]
        tokens = torch.zeros(1, 0, net.channels)
        for i in range(length):
            scales = [scale(settings, value, i, length) for value in (settings.cfg, settings.cfg_img)]
            conditions = [condition_behind(net, row, tokens) for row in rows]
            chosen = [k * settings.diffusion_steps // counts[i] for k in range(counts[i])]
            uniforms = CounterRNG(keys[i : i + 1]).uniform(-1, 0, counts[i])[0]
            x = sampled(net, conditions, starts[i], steps[chosen, i], uniforms, settings, scales)
            if settings.use_norm:
                x = (x - x.mean()) / (x.var(correction=0) + EPS).sqrt()
            tokens = torch.cat([tokens, x[None, None]], 1)

        patch = net.config.patch
        parts = tokens.view(1, *grid, -1, patch, patch).permute(0, 3, 1, 4, 2, 5)
        out.append(parts.reshape(1, -1, grid[0] * patch, grid[1] * patch))
    return torch.cat(out)


def row_of(model, text, source, grid):
    """The rows before token 0 of one branch, [1, n, D]."""
    m = model.marks
    digits = model.tokenize
    ids = model.tokenize(text)
    tail = [m.area, *digits(f"{grid[0]}*{grid[1]}"), m.begin]
    if source is None:
        return model.net.tok_embeddings(torch.tensor([[*ids, *tail]]))

    head = [m.area, *digits(f"{source.grid[0]}*{source.grid[1]}"), m.begin]
    parts = [
        model.net.tok_embeddings(torch.tensor([head])),
        model.net.image_in_projector(source.tokens)[None],
        model.net.tok_embeddings(torch.tensor([[m.end, *ids, *tail]])),
    ]
    return torch.cat(parts, 1)


def condition_behind(net, rows, tokens):
    """The condition [D] of the next token."""
    x = torch.cat([rows, net.image_in_projector(tokens)], 1)
    place = torch.arange(x.shape[1])[None]
    hidden = net.hidden(x, place, lambda i, q, k, v: attend(q, k, v, causal=True))
    return net.image_out_projector(hidden[0, -1])


def scale(settings, value, done, length):
    """The guidance scale of a token."""
    linear = {"falling": (length - done) / length, "rising": done / length}
    if settings.cfg_schedule == "constant":
        return value
    found = 1 + (value - 1) * linear[settings.cfg_schedule]
    return max(value / 2, found) if settings.cfg_schedule == "rising" else found


def sampled(net, conditions, x, noise, uniforms, settings, scales):
    """A token [T] by the published programs, one step after another.

    With speculation a step is drafted with a frozen expectation of the token: 0, then that of the last step that was
    rejected, or the last of a whole window.
    """
    count, k = len(noise), settings.time_shift
    if settings.solver == "em":
        times = [0.96 * i / max(1, count - 1) for i in range(count)]
    else:
        times = [i / count for i in range(count)]
    times = [t / (k - (k - 1) * t) for t in times]

    frozen, since = torch.zeros_like(x), 0  # and the steps that it has drafted
    for i, t in enumerate(times):
        v = guided(net, conditions, x, t, scales)
        u = 1.0 if i + 1 == count else times[i + 1]
        mean, std = step_to(x, v, t, u, times[-1], settings.solver)
        if settings.speculation_window < 2 or not std:
            x = mean + std * noise[i]
            continue

        drafted, _ = step_to(x, (frozen - x) / (1 - t), t, u, times[-1], settings.solver)
        expected = x + (1 - t) * v
        x, accepted = coupled(drafted + std * noise[i], drafted, mean, std, float(uniforms[i]))
        since += 1
        if not accepted or since == settings.speculation_window:
            frozen, since = expected, 0
    return x


def step_to(x, v, t, u, last, solver):
    """Mean and std of a step from t to u; ``last``: the time of the last evaluation."""
    dt = u - t
    if solver == "em" and u == 1.0:
        return x + 0.04 * v, 0.0
    if solver == "ode":
        return x + dt * v, 0.0
    if solver == "cps":
        x0, x1, angle = x - t * v, x + (1 - t) * v, 0.4 * math.pi
        return math.cos(angle) * (1 - u) * x0 + u * x1, math.sin(angle) * (1 - u)

    g2 = 2 * (1 - t)
    if solver == "sde":
        g2 = 0.64 * (1 - t) / t if t else 0.64 / (1 - last)
    score = (t * v - x) / (1 - t)
    return x + v * dt + g2 / 2 * score * dt, math.sqrt(g2 * dt)


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


def guided(net, conditions, x, t, scales):
    """The velocity [T] of a state, of one, two or three branches."""
    found = [net.head(x[None], torch.tensor([t]), c[None])[0] for c in conditions]
    if len(found) == 1:
        return found[0]
    if len(found) == 2:
        return found[1] + scales[0] * (found[0] - found[1])
    whole, part, null = found
    return null + scales[1] * (part - null) + scales[0] * (whole - part)


@torch.no_grad()
@pytest.mark.fast_cases(*FEWER, "nextstep, em", "nextstep, annealed")
def test_a_plain_reference_draws_the_same(case):
    _, model, settings = CASES[case]
    expected = reference(model, condition_of(case), settings, PairedNoise(5, range(3)), counts_of(case))
    torch.testing.assert_close(whole(case)[1].latents, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_is_near(dtype):
    model = CASES["nextstep"][1]
    half = replace(model, net=copy.deepcopy(model.net).to(dtype))
    half.net.head.final_layer.linear.float()
    found = finish(start("nextstep", move=lambda _: half)).latents
    expected = whole("nextstep")[1].latents
    other = finish(start("nextstep", seed=6)).latents
    assert (found - expected).abs().mean() < 0.5 * (other - expected).abs().mean()


def test_compiled_functions_give_the_same_image(monkeypatch):
    """The functions that may be compiled are run through an eager backend."""
    monkeypatch.setattr(speed, "BACKEND", "eager")
    model = CASES["nextstep"][1]
    other = replace(model, net=copy.deepcopy(model.net))
    speed.choose(other.net, speed.COMPILE, torch.device("cpu"))
    found = finish(start("nextstep", (0,), (0,), move=lambda _: other))
    close(found.latents, finish(start("nextstep", (0,), (0,))).latents)
    assert "plain" not in other.net.remark
