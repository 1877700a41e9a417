"""FastHybrid's formulas with expected values by hand: guidance weights, and which drafts verification keeps."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from fastar_nodes.reports.record import ACCEPTED, PLAIN, REDONE
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid, guidance_weights
from fastar_nodes.samplers.mar.loop import FullTransformer
from fastar_nodes.samplers.mar.settings import FastHybridSettings
from fastar_nodes.samplers.noise import PairedNoise

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


# ------------------------------------------------------------------------------------------------ verification

# Two vectors of 16 channels whose cosine is 1/2, exactly in fp32: (1, 0, 0, 0) and (1, 1, 1, 1), then zeros.
ONE = torch.tensor([1.0, 0, 0, 0] + [0] * 12)
HALF = torch.tensor([1.0, 1, 1, 1] + [0] * 12)
# Four AR steps decide 2, 3, 5 and 6 of the tiny model's tokens, in raster order.
SETTINGS = {"ar_steps": 4, "diffusion_steps": 3, "guided_steps": 2, "lookahead": 4, "cfg": 2.0, "order": "raster"}


class Prescribed(FullTransformer):
    """Gives ``z(step, position)`` instead of the transformer's output: int64 [B, M] positions to fp32 [B, M, 16]."""

    def __init__(self, z):
        super().__init__()
        self.z = z

    def __call__(self, run, step, wanted):
        out = super().__call__(run, step, wanted)
        out[0].copy_(self.z(step, wanted))
        return out


def outcomes(model, z, **settings):
    """FastHybrid's outcome map [B, 16] of two images, and its report."""
    transformer, s = Prescribed(z), FastHybridSettings(**{**SETTINGS, **settings})
    report = finish(fasthybrid(model, from_ids((1, 4)), s, PairedNoise(5, (0, 1)), transformer=transformer)).report
    return torch.from_numpy(report.maps["outcome"]).flatten(1), torch.from_numpy(report.maps["step"]).flatten(1), report


def test_a_draft_at_the_threshold_is_kept(model):
    def z(step, wanted):
        return (ONE if step == 0 else HALF).expand(*wanted.shape, -1)

    outcome, step, report = outcomes(model, z, threshold=0.5)
    assert (outcome[step == 0] == PLAIN).all() and (outcome[step > 0] == ACCEPTED).all()
    assert report.similarity.tolist() == [0.5] * len(report.similarity)
    # Just above it the first drafts are redone, with all that follow them; the new drafts' cosine is 1.
    outcome, step, report = outcomes(model, z, threshold=0.5001)
    assert (outcome[step == 1] == REDONE).all() and (outcome[step > 1] == ACCEPTED).all()
    assert set(report.similarity.tolist()) == {0.5, 1.0}


def test_without_position_subtracts_the_embedding_of_the_same_token_from_both(model):
    """z' = p + a and z = p + b: cos(a, b) = 1/2, cos(z', z) is above 0.7, and below 0.4 if the embedding is subtracted from one only."""
    net = copy.deepcopy(model.net)
    place = torch.zeros(16, 16)
    place[:, 5] = 2.0 + torch.arange(16)
    net.diffusion_pos_embed_learned.copy_(place[None])
    placed = dataclasses.replace(model, net=net)

    def z(step, wanted):
        return (ONE if step == 0 else HALF) + place[wanted]

    for threshold, kept in ((0.5, ACCEPTED), (0.5001, REDONE)):
        outcome, step, report = outcomes(placed, z, similarity="without position", threshold=threshold)
        assert (outcome[step == 1] == kept).all()
        assert set(report.similarity[:2].tolist()) == {0.5}
    outcome, step, _ = outcomes(placed, z, similarity="condition", threshold=0.5001)
    assert (outcome[step > 0] == ACCEPTED).all()


def test_one_wrong_token_has_its_images_whole_step_redone(model):
    """Position 5 is wrong, of the first image only."""

    def z(step, wanted):
        out = ONE.expand(*wanted.shape, -1).clone()
        if step:
            out[0][wanted[0] == 5] = HALF
        return out

    for verify in ("token", "step"):
        outcome, _, report = outcomes(model, z, threshold=0.9, verify=verify)
        position = torch.arange(16)
        wrong = (position >= 5) & (position < 10) if verify == "step" else position == 5
        assert torch.equal(outcome[0] == REDONE, wrong) and not (outcome[1] == REDONE).any()
        assert report.counts["rejected"] == int(wrong.sum()) and report.counts["restarts"] == 1
