"""FastHybrid against the slow reference and by hand: guidance weights, which drafts are kept, and what it costs."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from fastar_nodes.reports.record import ACCEPTED, PLAIN, REDONE
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid, guidance_weights, guided
from fastar_nodes.samplers.mar.fasthybrid.settings import FastHybridSettings
from fastar_nodes.samplers.mar.mar import annealed_tables, mar
from fastar_nodes.samplers.mar.prepare import mar_canvas
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.transformer import FullTransformer
from fastar_nodes.samplers.noise import PairedNoise
from mar_reference import cosine_tables, reference
from stepping import stepped
from tiny_models import tiny_mar

BASE = {"steps": 8, "diffusion_steps": 12, "cfg": 2.0}
LABELS = (1, 4, 0)


SLOW = {"steps": 6, "diffusion_steps": 6, "cfg": 2.0, "lookahead": 3, "guided_steps": 5, "threshold": 0.97}


def run(model, images=(0, 1, 2), **settings):
    labels, noise = from_ids([LABELS[i] for i in images]), PairedNoise(5, images)
    return finish(fasthybrid(model, labels, FastHybridSettings(**{**BASE, **settings}), noise))


def plain(model, **settings):
    return finish(mar(model, from_ids(LABELS), MARSettings(**BASE, **settings), PairedNoise(5, (0, 1, 2))))


# gamma_t of t = T_g .. 1. cos: 1 - cos^2(pi t / 2 T_g); at T_g = 5 the angles are 90, 72, 54, 36 and 18 degrees.
WEIGHTS = {
    "cos": {1: [1], 2: [1, 0.5], 5: [1, 0.9045084972, 0.6545084972, 0.3454915028, 0.0954915028]},
    "linear-down": {1: [1], 2: [1, 0.5], 5: [1, 0.8, 0.6, 0.4, 0.2]},
    "square": {1: [1], 2: [1, 0.25], 5: [1, 0.64, 0.36, 0.16, 0.04]},
    "linear-up": {1: [1], 2: [0.5, 1], 5: [0.2, 0.4, 0.6, 0.8, 1]},
    "none": {1: [0], 2: [0, 0], 5: [0, 0, 0, 0, 0]},
}


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("schedule", WEIGHTS)
def test_guidance_weights_in_full(schedule, steps):
    assert list(guidance_weights(schedule, steps)) == pytest.approx(WEIGHTS[schedule][steps], abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cfg": 1.0, "temperature": 0.7},
        {"guidance_schedule": "square"},
        {"accepted": "keep", "cfg_schedule": "constant"},
        {"lookahead_start": 2, "lookahead": 4, "threshold": 0.98, "guidance_schedule": "linear-up"},
        {"lookahead": 4, "threshold": 0.99},
        {"lookahead": 4, "threshold": 0.98, "lookahead_start": 1, "diffusion_steps_end": 6},
        {"accepted": "renoise"},
        {"accepted": "renoise", "denoise": 0.5, "temperature": 0.7, "cfg": 1.0},
        {"accepted": "renoise", "denoise": 1.0},
    ],
    ids=str,
)
@pytest.mark.fast_cases(1)
def test_equals_the_slow_reference(model, changes):
    """Lookahead k = 3 of 6 AR steps, 6 diffusion steps and 5 guided ones; at 0.9 of 5 steps one is left out."""
    s = FastHybridSettings(**{**SLOW, **changes})
    noise, labels = PairedNoise(5, (0, 3)), (1, 4)
    gamma = {0.5: 3, 0.9: 1, 1.0: 0}[s.denoise] if s.accepted == "renoise" else WEIGHTS[s.guidance_schedule][5]
    slow, outcome = reference(model, labels, s, noise, (0, 200, 400, 599, 799, 950), (0, 250, 500, 749, 950), gamma)
    fast = finish(fasthybrid(model, from_ids(labels), s, noise))
    assert torch.equal(torch.from_numpy(fast.report.maps["outcome"]).flatten(1), outcome)
    assert len(outcome.unique()) == 3, "all outcomes must occur for this to say anything"
    torch.testing.assert_close(fast.latents, slow, rtol=1e-3, atol=1e-3 * float(slow.abs().max()))


@pytest.mark.parametrize("changes", [{"lookahead": 0}, {"lookahead": 2, "threshold": 1.01}], ids=str)
@pytest.mark.fast_cases(1)
def test_annealed_steps_are_kept(model, changes):
    annealed = plain(model, diffusion_steps_end=3).latents
    found = run(model, diffusion_steps_end=3, **changes).latents
    torch.testing.assert_close(found, annealed, rtol=1e-4, atol=1e-4)


# Lookahead, its first AR step, and the AR steps that are sampled in full.
SEGMENTS = [
    (2, 0, [0, 2, 4, 6]),
    (3, 0, [0, 3, 6]),
    (8, 0, [0]),
    (4, 1, [0, 1, 5]),
    (4, 3, [0, 1, 2, 3, 7]),
    (4, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize(("lookahead", "start", "full"), SEGMENTS)
def test_accepting_everything_costs_what_the_paper_says(model, lookahead, start, full):
    """Sequential head calls: T a segment, T_g for each of its other steps (paper: Q T + Q T_g (K - 1)), less one where
    the weight is 1. AR steps before the first lookahead are plain MAR's.
    """
    result = run(model, lookahead=lookahead, lookahead_start=start, threshold=-1.0, guided_steps=4)
    step, outcome = result.report.maps["step"], result.report.maps["outcome"]
    assert [at for at in range(8) if (outcome[step == at] == PLAIN).any()] == full
    assert result.report.counts["head_calls"] == len(full) * 12 + (8 - len(full)) * 3
    assert result.report.counts["transformer_passes"] == 8, "no image waits"
    assert result.report.counts["rejected"] == result.report.counts["restarts"] == 0
    assert (result.report.counts["accepted"] == 0) == (start >= 8)


# ------------------------------------------------------------------------------------------------ paces of their own


class InStep(FullTransformer):
    """All images at the same AR step, as with LazyMAR's caches."""

    allows_different_steps = False


def many(model, images, make_transformer=FullTransformer, edit=None, **settings):
    """Images with labels by their numbers; the steps, and the result with its outcome and step of every token."""
    labels, noise = from_ids([i % 5 for i in images]), PairedNoise(5, images)
    chosen = FastHybridSettings(**{**BASE, "lookahead": 4, "guided_steps": 4, **settings})
    return stepped(fasthybrid(model, labels, chosen, noise, make_transformer, edit))


def part_of_an_image(model):
    """An edit that draws ten of sixteen tokens again."""
    mask = torch.zeros(1, 4, 4)
    mask.view(-1)[3:13] = 1
    start = torch.randn(1, model.net.config.channels, 4, 4, generator=torch.Generator().manual_seed(1))
    return Edit(start, mask)


ALONE = {
    "few rejections": {"threshold": 0.95},
    "some": {"threshold": 0.97},
    "many": {"threshold": 0.985},
    "all": {"threshold": 1.01},
    "keep": {"threshold": 0.98, "accepted": "keep"},
    "renoise": {"threshold": 0.98, "accepted": "renoise"},
    "annealed diffusion steps": {"threshold": 0.98, "diffusion_steps_end": 3},
    "more guided steps than annealed ones": {"threshold": 0.98, "diffusion_steps_end": 3, "guided_steps": 6},
    "a later start, no guidance": {"threshold": 0.98, "lookahead_start": 2, "cfg": 1.0},
    "an edit": {"threshold": 0.98, "edit": True},
}


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.fast_cases("some", "many", "annealed diffusion steps", "an edit")
def test_images_of_a_batch_are_those_drawn_alone(model, case):
    """The same outcomes, and the same latents up to rounding, whatever the other images do; the same rows."""
    settings = dict(ALONE[case])
    if settings.pop("edit", False):
        settings["edit"] = part_of_an_image(model)
    _, together = many(model, range(8), **settings)
    parts = [many(model, (i,), **settings)[1] for i in range(8)]

    for i, part in enumerate(parts):
        torch.testing.assert_close(together.latents[i : i + 1], part.latents, rtol=1e-4, atol=1e-4)
        for name in ("outcome", "step"):
            np.testing.assert_array_equal(together.report.maps[name][i], part.report.maps[name][0])
    for count in ("restarts", "accepted", "rejected", "head_rows"):
        assert together.report.counts[count] == sum(part.report.counts[count] for part in parts), count
    if case in ("some", "many"):
        assert 1 < together.report.counts["restarts"] and together.report.counts["transformer_passes"] > BASE["steps"]


@pytest.mark.parametrize("images", [(0, 1, 2, 3), range(8)], ids=len)
@pytest.mark.parametrize("threshold", [0.97, 0.985])
def test_a_batch_makes_as_many_full_passes_as_the_image_that_needs_most(model, images, threshold):
    """In *keep* all head calls are those of full passes, of 12 steps each. In step there is a full pass at every AR
    step at which an image needs one.
    """
    settings = {"threshold": threshold, "accepted": "keep"}
    passes = [many(model, (i,), **settings)[1].report.counts["head_calls"] // 12 for i in images]
    _, together = many(model, images, **settings)
    _, in_step = many(model, images, InStep, **settings)
    needed = {int(s) for m in [in_step.report.maps] for s in np.unique(m["step"][m["outcome"] != ACCEPTED])}
    assert together.report.counts["head_calls"] == 12 * max(passes) < 12 * len(needed)
    assert in_step.report.counts["head_calls"] == 12 * len(needed)


def test_one_image_is_drawn_as_in_step(model):
    """Bit for bit, in the same calls and passes; so is a batch in which nothing is rejected."""
    for images, threshold in (((0,), 0.97), ((2,), 0.985), (range(3), -1.0)):
        (_, own), (_, in_step) = (many(model, images, kind, threshold=threshold) for kind in (FullTransformer, InStep))
        assert torch.equal(own.latents, in_step.latents)
        assert own.report.counts == in_step.report.counts


def test_steps_show_every_image_at_its_own_ar_step(model):
    """What is decided only grows, as does the number of AR steps that are done; at some step images differ."""
    steps, result = many(model, range(8), threshold=0.985)
    decided = torch.stack([step.decided.flatten(1) for step in steps])
    assert (decided[1:] >= decided[:-1]).all() and decided[-1].all()
    assert (decided.sum(2).float().std(1) > 0).any(), "the images are at different AR steps"

    done = [step.done for step in steps]
    assert done == sorted(done) and done[-1] == steps[-1].total == BASE["steps"]
    assert all(d < BASE["steps"] for d in done[:-1])

    # Each step shows the latents of the result where they are decided, and zeros elsewhere.
    for step in steps:
        shown = step.decided[:, None].expand_as(result.latents)
        assert torch.equal(step.latents, torch.where(shown, result.latents, 0.0))


@pytest.mark.parametrize(
    ("guided", "denoise", "steps"),
    [(15, 0.9, 13), (50, 0.58, 29), (10, 0.09, 0), (10, 0.9, 9), (10, 0.29, 2), (10, 0.3, 3), (10, 1.0, 10)],
)
@pytest.mark.fast_cases(3)
def test_renoised_drafts_run_their_share_of_the_guided_steps(model, guided, denoise, steps):
    """Rounded down, but 50 * 0.58, which is 28.999... in floating point, is 29. Without a step a draft is kept, as by
    *keep*.
    """
    settings = {"lookahead": 4, "threshold": -1.0, "guided_steps": guided, "t_max": 999}
    result = run(model, accepted="renoise", denoise=denoise, **settings)
    assert result.report.counts["head_calls"] == 2 * 12 + 6 * steps
    kept = run(model, accepted="keep", **settings).latents
    assert torch.equal(result.latents, kept) == (not steps)


@pytest.mark.parametrize(("end", "own", "first"), [(10, None, 950), (None, None, 999), (30, None, 999), (10, 999, 999)])
def test_guided_steps_start_where_the_full_ones_do(model, end, own, first):
    """At 950 of steps that fall to few (DiSA), so that all tokens are denoised from the same noise."""
    official = dataclasses.replace(model, t_max=999)
    no_skip = {"guided_steps": 6, "guidance_schedule": "none"}
    settings = FastHybridSettings(steps=5, diffusion_steps=40, diffusion_steps_end=end, t_max=own, **no_skip)
    canvas = mar_canvas("fasthybrid", official, from_ids((1,)), settings, PairedNoise(5, (0,)), None)
    found = guided(canvas).table.times[0], annealed_tables(canvas)[0].times[0]
    embedded = model.net.head.time_embed(torch.tensor([first]))[0]
    assert all(torch.allclose(time, embedded, atol=1e-6) for time in found)


def test_two_guided_steps_by_hand():
    """A head that predicts no noise and the middle of the variance: the data of a state x is x / sqrt(abar).

    Weights of 1 and 1/2: x' + sigma noise, then half of its data and half of x'. All drafts are accepted.
    """
    model = tiny_mar()
    for weight in model.net.head.final_layer.linear.parameters():
        weight.data.zero_()
    settings = {"lookahead": 8, "threshold": -1.0, "guided_steps": 2, "temperature": 0.7}
    kept, refined = (run(model, accepted=way, **settings) for way in ("keep", "refine"))
    draft = model.to_tokens(kept.latents)

    (_, _, abar_last), (_, beta, abar) = cosine_tables([0, 950])
    variance = beta * (1 - abar_last) / (1 - abar)  # of the posterior
    sigma = (variance * beta) ** 0.25
    noise = PairedNoise(5, (0, 1, 2)).step_noise("guided", 2, 16, 4)[:, 0]
    wanted = 0.5 * (draft + 0.7 * sigma * noise) / math.sqrt(abar_last) + 0.5 * draft

    accepted = torch.from_numpy(refined.report.maps["outcome"]).flatten(1) == ACCEPTED
    found = model.to_tokens(refined.latents)
    assert accepted.sum() > 3 * 12 and torch.equal(found[~accepted], draft[~accepted])
    scale = float(draft.abs().max())
    torch.testing.assert_close(found[accepted], wanted[accepted], rtol=1e-5, atol=1e-5 * scale)


# Two vectors of 16 channels whose cosine is 1/2, exactly in fp32: (1, 0, 0, 0) and (1, 1, 1, 1), then zeros.
ONE = torch.tensor([1.0, 0, 0, 0] + [0] * 12)
HALF = torch.tensor([1.0, 1, 1, 1] + [0] * 12)
# Four AR steps decide 2, 3, 5 and 6 of the tiny model's tokens, in raster order.
SETTINGS = {"steps": 4, "diffusion_steps": 3, "guided_steps": 2, "lookahead": 4, "cfg": 2.0, "order": "raster"}


class Prescribed(FullTransformer):
    """Gives ``z(image, step, positions)`` instead of the transformer's output: int64 [M] positions to fp32 [M, 16]."""

    def __init__(self, canvas, z):
        super().__init__(canvas)
        self.z = z

    def __call__(self, step, wanted):
        images = range(len(wanted))
        return self.prescribed(super().__call__(step, wanted), images, [step] * len(wanted), wanted)

    def for_snapshots(self, snapshots, wanted):
        return self.prescribed(super().for_snapshots(snapshots, wanted), *snapshots, wanted)

    def prescribed(self, out, images, steps, wanted):
        for row, (image, step) in enumerate(zip(images, steps, strict=True)):
            out[0, row] = self.z(image, step, wanted[row])
        return out


def outcomes(model, z, **settings):
    """FastHybrid's outcome map [B, 16] of two images, and its report."""
    look, s = partial(Prescribed, z=z), FastHybridSettings(**{**SETTINGS, **settings})
    report = finish(fasthybrid(model, from_ids((1, 4)), s, PairedNoise(5, (0, 1)), make_transformer=look)).report
    return torch.from_numpy(report.maps["outcome"]).flatten(1), torch.from_numpy(report.maps["step"]).flatten(1), report


def test_a_draft_at_the_threshold_is_kept(model):
    def z(image, step, wanted):
        return (ONE if step == 0 else HALF).expand(len(wanted), -1)

    outcome, step, report = outcomes(model, z, threshold=0.5)
    assert (outcome[step == 0] == PLAIN).all() and (outcome[step > 0] == ACCEPTED).all()
    assert report.similarity.tolist() == [0.5] * len(report.similarity)
    # Just above it the first drafts are redone, with all that follow them; the new drafts' cosine is 1.
    outcome, step, report = outcomes(model, z, threshold=0.5001)
    assert (outcome[step == 1] == REDONE).all() and (outcome[step > 1] == ACCEPTED).all()
    assert set(report.similarity.tolist()) == {0.5, 1.0}


def test_one_rejected_token_restarts_the_lookahead_of_its_image_alone(model):
    """AR steps 0 to 3 decide the positions 0-1, 2-4, 5-9 and 10-15; all are in reach of the first lookahead.

    From AR step 1 on, the conditions of positions 5 and above are others. Position 2 of image 0 is rejected at AR step
    1, its neighbours 3 and 4 are accepted: image 0 drafts positions 5 to 15 again, with the new conditions, and keeps
    all of them. Image 1 rejects nothing at AR step 1, keeps its old drafts, rejects them at AR step 2, and drafts
    positions 10 to 15 again.
    """

    def z(image, step, wanted):
        out = ONE.repeat(len(wanted), 1)
        if step >= 1:
            out[wanted >= 5] = HALF
        if step == 1 and image == 0:
            out[wanted == 2] = HALF
        return out

    outcome, step, report = outcomes(model, z, threshold=0.9)
    assert step[0].tolist() == [0] * 2 + [1] * 3 + [2] * 5 + [3] * 6
    assert outcome[0].tolist() == [PLAIN] * 2 + [REDONE] + [ACCEPTED] * 13
    assert outcome[1].tolist() == [PLAIN] * 2 + [ACCEPTED] * 3 + [REDONE] * 5 + [ACCEPTED] * 6
    counts = {name: report.counts[name] for name in ("accepted", "rejected", "restarts")}
    assert counts == {"accepted": 13 + 9, "rejected": 1 + 5, "restarts": 2}
    # Three full steps for 16 tokens of both images, then 1 + 11 of image 0 and 5 + 6 of image 1; one guided step of
    # two, as the first has the weight 1; two branches of guidance.
    assert report.counts["head_rows"] == 2 * (3 * (32 + 12 + 11) + 22)
    # A full pass of both; a guided step of image 1, while image 0 waits; a full pass of both at AR steps 1 and 2; a
    # guided step of both, after which image 1 is at its end, and one of image 0.
    assert report.counts["head_calls"] == 3 + 1 + 3 + 1 + 1
    assert report.counts["transformer_passes"] == 5
