"""What every MAR sampler must do, whatever it accelerates. A new sampler passes all of it."""

import copy
import functools
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import COUNTS, PLAIN, REDONE
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import ClassCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.prepare import mar_canvas
from fastar_nodes.samplers.noise import PairedNoise
from mar_reference import diffuse, full_z
from small_settings import MASKED, small
from stepping import process_state, stepped
from tiny_models import tiny_mar

FEW = {"steps": 6, "diffusion_steps": 8, "cfg": 2.0}


def of(name: str, case: str = "", **changes):
    """A sampler with its small settings, as the case "NAME, CASE"; ``changes`` are other settings."""
    entry = SAMPLERS[name]
    values = {**FEW, **small(name), **changes}
    return {f"{name}, {case}" if case else name: (entry.run, entry.settings(**values))}


# Every sampler, and more settings of some.
CASES = {name: case for each in MASKED for name, case in of(each).items()}
CASES |= of("mar", "no guidance", cfg=1.0)
CASES |= of("mar", "raster, constant cfg", order="raster", cfg_schedule="constant")
CASES |= of("mar", "annealed", diffusion_steps_end=3)
CASES |= of("mar", "speculation", speculation=3)
CASES |= of("fasthybrid", "no guidance", cfg=1.0)
CASES |= of("fasthybrid", "keep", accepted="keep")
CASES |= of("fasthybrid", "renoise", accepted="renoise")
CASES |= of("fasthybrid", "annealed", diffusion_steps_end=4)
CASES |= of("cspd", "speculation", speculation=3)
CASES |= of("cspd", "no guidance", cfg=1.0)
CASES |= of("cspd", "paper", mode="paper")
CASES |= of("cspd", "published", mode="published")
CASES |= of("cspd", "published, no alignment", mode="published", alignment=False, draft_length=1)
CASES |= of("gtr", "no guidance", cfg=1.0)
CASES |= of("lazymar", "no guidance", cfg=1.0)
CASES |= of("lazymar", "cached head", diffusion_steps=24)
CASES |= of("lazymar", "both branches", condition_cache=False)
CASES |= of("lazymar", "random rows", selection="random")
CASES |= of("lazymar", "decided tokens", selection="decided")

MODEL, DRAFT = tiny_mar(), tiny_mar(1)
DRAFTED = {entry.run for entry in SAMPLERS.values() if entry.needs_draft}


def start(case, images=(0, 1, 2), labels=(1, 4, 0), seed=5, move=lambda m: m, model=MODEL, draft=DRAFT, **more):
    """The steps of a case; ``move`` changes every model."""
    sampler, settings = CASES[case]
    more = {"condition": from_ids(labels), "noise": PairedNoise(seed, images), **more}
    if sampler in DRAFTED:
        more["draft"] = move(draft)
    return sampler(move(model), settings=settings, **more)


whole = functools.cache(lambda case: stepped(start(case)))


# A case of every path of the code; the others are slow.
FEWER = (*(name for name in MASKED if "+" not in name), "fasthybrid+lazymar")
FAST = (*FEWER, "mar, no guidance", "mar, speculation", "cspd, paper", "cspd, published", "lazymar, cached head")
pytestmark = pytest.mark.fast_cases(*FAST)


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


@pytest.mark.fast_cases("mar", "cspd", "lazymar")
def test_another_seed_another_picture(case):
    assert (whole(case)[1].latents - finish(start(case, seed=6)).latents).abs().max() > 0.1


@pytest.mark.fast_cases(*FEWER)
def test_an_image_does_not_depend_on_its_batch(case):
    _, together = whole(case)
    for i, label in enumerate((1, 4, 0)):
        alone = finish(start(case, (i,), (label,)))
        torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-4, atol=1e-4)
        for name, values in alone.report.maps.items():
            assert np.array_equal(values[0], together.report.maps[name][i]), name


@pytest.mark.fast_cases(*FEWER)
def test_latents_that_are_not_finite_are_refused(case):
    """The network's last product gives NaN, as half precision
    does where it overflows: no sampler returns an image of it.
    """

    def spoilt(model):
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.net.head.final_layer.linear.weight[0, 0] = torch.nan
        return model

    with pytest.raises(UserError, match="^model: .*latents that are not finite"):
        finish(start(case, move=spoilt))


@pytest.mark.fast_cases(*FEWER, "mar, speculation")
def test_repeats_itself_and_changes_nothing_global(case):
    before, weights = process_state(), {k: v.clone() for k, v in MODEL.net.state_dict().items()}
    left = start(case)
    next(left)
    assert process_state() == before, "in the middle of a run"
    left.close()
    again = finish(start(case))
    assert process_state() == before
    assert all(torch.equal(v, weights[k]) for k, v in MODEL.net.state_dict().items())
    assert torch.equal(again.latents, whole(case)[1].latents) and again.report.counts == whole(case)[1].report.counts


def test_the_settings_declare_the_noise_that_is_drawn(case):
    """The memory estimate counts what is declared; a stream that is not declared cannot be drawn."""
    drawn = {}

    class Noise(PairedNoise):
        def step_noise(self, stream, count, tokens, channels):
            drawn[stream] = count
            return super().step_noise(stream, count, tokens, channels)

    finish(start(case, noise=Noise(5, (0, 1, 2))))
    declared = CASES[case][1].streams()
    assert drawn.keys() == declared.keys()
    # Diffusion steps above t_max are left out.
    assert all(0.9 * declared[stream] <= count <= declared[stream] for stream, count in drawn.items())

    canvas = mar_canvas("mar", MODEL, from_ids((1,)), CASES[case][1], PairedNoise(5, (0,)), None)
    with pytest.raises(LookupError, match=r"^\w+Settings.streams\(\) lacks 'no such'; declare its diffusion steps.$"):
        canvas.noise_of("no such")


def own_pace(case):
    """Whether the images of a case may be at different AR steps: after a step some have gone on, others have not."""
    return case.startswith("fasthybrid") and "lazymar" not in case


def test_yields_after_every_step(case):
    seen, _ = whole(case)
    steps = FEW["steps"]
    done = [s.done for s in seen]
    assert sorted(set(done)) == list(range(1, steps + 1)) and done == sorted(done) and done.count(steps) == 1
    assert len(done) == steps or own_pace(case)
    assert all(s.total == steps for s in seen)
    assert all(s.latents.shape == (3, 4, 4, 4) and s.decided.shape == (3, 4, 4) for s in seen)
    counts = [int(s.decided.sum()) for s in seen]
    assert counts == sorted(counts) and counts[-1] == 48 and counts[0] < 48


def test_report_adds_up(case):
    settings, (_, result) = CASES[case][1], whole(case)
    report = result.report
    assert report.sampler == case.partition(",")[0]
    if "draft_passes" in report.counts:
        assert 1 < report.counts["transformer_passes"] - report.counts["draft_passes"] <= settings.steps
    else:
        assert report.counts["transformer_passes"] == settings.steps or own_pace(case)
    assert set(report.counts) <= set(COUNTS), "add what is missing to COUNTS, and explain it in docs/report.md"
    step, outcome = report.maps["step"], report.maps["outcome"]
    assert step.shape == outcome.shape == (3, 4, 4)
    assert step.min() == 0 and step.max() == settings.steps - 1
    assert report.settings == asdict(settings) and report.images == 3 and report.seed == 5
    assert report.seconds > 0 and sum(report.phases.values()) <= report.seconds * 1.05
    if "accepted" in report.counts:
        assert report.counts["accepted"] == int((outcome == 1).sum())
        assert report.counts["rejected"] == int(((outcome == 2) | (outcome == 5)).sum())
        if report.similarity is not None:
            assert report.counts["accepted"] + report.counts["rejected"] == len(report.similarity)
    assert torch.isfinite(result.latents).all() and result.latents.dtype == torch.float32


def test_too_many_steps_and_bad_labels_say_so(case):
    sampler, settings = CASES[case]
    more, many = {"draft": DRAFT} if sampler in DRAFTED else {}, replace(settings, steps=17)
    for field, chosen, condition in (
        ("steps", many, from_ids((1,))),
        ("condition: label 5 ", settings, from_ids((5,))),
        ("condition", settings, ClassCondition((), ())),
        ("condition", settings, from_ids((1, 2))),
    ):
        with pytest.raises(UserError, match=f"^{field}"):
            noise = PairedNoise(1, range(min(1, len(condition))))
            finish(sampler(MODEL, condition, chosen, noise, **more))


# ------------------------------------------------------------------------------------------------ the equations

# What the equations do not give token by token: caches approximate the transformer, and what is verified or resampled
# is of the same distribution, not of the same noise.
NOT_BY_EQUATIONS = tuple(case for case in CASES if "lazymar" in case or "cspd" in case or "speculation" in case)
DRAWN = (PLAIN, REDONE)  # outcomes of tokens that take all of their own diffusion


def timesteps(count: int) -> tuple[int, ...]:
    """Evenly spaced from 0 to the tiny model's highest, 950."""
    return tuple(min(round(999 * k / (count - 1)), 950) for k in range(count))


def scale_of(settings, decided: int) -> float:
    """The guidance scale of an AR step that ends with so many of 16 tokens."""
    if settings.cfg_schedule == "linear":
        return 1 + (settings.cfg - 1) * min(decided, 15) / 16
    return settings.cfg


@torch.no_grad()
def expect_equations(settings, result, labels=(1,), seed=5):
    """Check every token of images by itself: it is what the diffusion makes of its own noise, and of the transformer's
    output at its own position, given the tokens that the report says were decided before it, under the guidance scale
    of that number of tokens. The order is the report's, so that a sampler may choose any.
    """
    c = MODEL.net.config
    noise = PairedNoise(seed, range(len(labels)))
    start = noise.start_noise("full", c.tokens, c.channels)
    noises = noise.step_noise("full", settings.diffusion_steps, c.tokens, c.channels)
    all_tokens = MODEL.to_tokens(result.latents)
    fewest = getattr(settings, "diffusion_steps_end", None) or settings.diffusion_steps
    counts = range(fewest, settings.diffusion_steps + 1)

    checked = 0
    for b, label in enumerate(labels):
        when, outcome = (result.report.maps[name][b].flatten() for name in ("step", "outcome"))
        tokens = all_tokens[b]
        classes = [MODEL.net.class_emb.weight[label]] + [MODEL.net.fake_latent[0]] * (settings.cfg != 1)
        for step in range(settings.steps):
            known = np.flatnonzero(when < step).tolist()
            z = [full_z(MODEL.net, tokens, known, row) for row in classes]
            scale = scale_of(settings, int((when <= step).sum()))
            for p in np.flatnonzero((when == step) & np.isin(outcome, DRAWN)).tolist():
                rows = [row[p] for row in z]
                made = []
                for count in counts:
                    of_token = noises[b, [k * settings.diffusion_steps // count for k in range(count)], p]
                    one = diffuse(MODEL.net, rows, scale, start[b, p], of_token, timesteps(count), settings.temperature)
                    made.append(one)
                assert min(float((one - tokens[p]).abs().max()) for one in made) < 1e-3, (b, p)
                checked += 1
    assert checked > 4


@pytest.mark.fast_cases("mar", "fasthybrid", "gtr")
def test_every_token_is_that_of_the_equations(case):
    if case not in NOT_BY_EQUATIONS:
        expect_equations(CASES[case][1], whole(case)[1])
