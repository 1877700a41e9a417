"""CSpD's mode ``paper``: the slow reference, written from the text of the paper, and the law of its rule.

What all modes have in common: ``test_cspd.py`` and ``test_sampler_contract.py``.
"""

import copy
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from cspd_reference import Reference
from fastar_nodes.networks.mar import MARModel
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.canvas import TokenIndex
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.cspd.mode import PathDensity
from fastar_nodes.samplers.mar.cspd.rejection import (
    PAPER_RULE,
    Rejection,
    RejectionNoise,
    Rule,
    acceptance_of_proposals,
    log_ratio,
)
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.mar.transformer import FullTransformer
from fastar_nodes.samplers.noise import PairedNoise
from tiny_models import tiny_mar
from torch import Tensor
from two_samples import ks

TIMES = (0, 200, 400, 599, 799, 950)
FEW = {"steps": 6, "diffusion_steps": len(TIMES), "cfg": 2.0, "mode": "paper", "prefill_ratio": 0.0}
LABELS, IMAGES = (1, 4, 0), (0, 1, 2)


@pytest.fixture(scope="module")
def model() -> MARModel:
    return tiny_mar()


def nearly(model: MARModel, amount: float) -> MARModel:
    """The model with noise on its weights."""
    g, net = torch.Generator().manual_seed(9), copy.deepcopy(model.net)
    for p in net.parameters():
        p.add_(amount * p.abs().mean() * torch.randn(p.shape, generator=g))
    return dataclasses.replace(model, net=net)


class Quiet(PairedNoise):
    """Noise in the last diffusion step alone: paths of models that differ in their stds only are the same."""

    def step_noise(self, stream: str, count: int, tokens: int, channels: int) -> Tensor:
        noise = super().step_noise(stream, count, tokens, channels)
        noise[:, :-1] = 0
        return noise


def wider(model: MARModel, amount: float) -> MARModel:
    """The model with larger variance logits."""
    net = copy.deepcopy(model.net)
    net.head.final_layer.linear.bias[net.config.channels :] += amount
    return dataclasses.replace(model, net=net)


def run(model, draft, images=IMAGES, labels=LABELS, make_transformer=FullTransformer, noise=PairedNoise, **changes):
    settings = CSpDSettings(**{**FEW, "draft_length": 3, **changes})
    return finish(cspd(model, from_ids(labels), settings, noise(5, images), make_transformer, draft=draft))


# ------------------------------------------------------------------------------------------------ the algorithm

REFERENCES = {
    "one at a time": (nearly, 3e-4, PairedNoise, {"draft_length": 1}),
    "near": (nearly, 3e-4, PairedNoise, {}),
    "a token a step": (nearly, 3e-4, PairedNoise, {"draft_length": 2, "cfg": 1.0, "steps": 16}),
    "nearer": (nearly, 1e-4, PairedNoise, {"draft_length": 2, "temperature": 0.9, "cfg_schedule": "constant"}),
    "pre-filled": (nearly, 1e-4, PairedNoise, {"draft_length": 50, "prefill_ratio": 0.34}),
    "far": (nearly, 1.0, PairedNoise, {"draft_length": 2}),
    # Only Sigma and the last std differ.
    "Sigma above 1": (wider, 0.1, Quiet, {}),
    "Sigma below 1": (wider, -0.05, Quiet, {}),
}


@pytest.mark.parametrize("case", REFERENCES)
@pytest.mark.fast_cases("near", "Sigma below 1")
def test_equals_the_slow_reference(model, case):
    """A batch of three images, each of which the reference draws alone: tokens, outcomes and counts."""
    change, amount, noise, changes = REFERENCES[case]
    draft = change(model, amount)
    result = run(model, draft, noise=noise, **changes)
    counts = dict.fromkeys(("accepted", "rejected", "redraws", "redraws_exhausted"), 0)
    for i, label in enumerate(LABELS):
        settings = CSpDSettings(**{**FEW, "draft_length": 3, **changes})
        slow = Reference(model, draft, label, settings, noise(5, (i,)), TIMES)
        latents = slow.run()
        torch.testing.assert_close(result.latents[i : i + 1], latents, rtol=1e-3, atol=1e-3)
        assert np.array_equal(result.report.maps["outcome"][i].ravel(), slow.outcome.numpy())
        counts = {name: counts[name] + n for name, n in slow.counts.items()}

    assert {name: result.report.counts[name] for name in counts} == counts
    # Each case has what it is there for.
    assert (counts["accepted"] > 0) == (case != "far")
    assert (counts["rejected"] > 0) == (case != "Sigma above 1")
    assert (counts["redraws_exhausted"] > 0) == (case == "Sigma below 1")


def test_the_comparison_would_see_another_rule(model, monkeypatch):
    """Sigma inverted, as in the published code; and drafts judged by wider densities."""

    def outcome(case: str):
        change, amount, noise, changes = REFERENCES[case]
        return run(model, change(model, amount), noise=noise, **changes).report.maps["outcome"]

    for case, rule in (("Sigma above 1", Rule(-1, 1.0)), ("Sigma below 1", Rule(-1, 1.0)), ("near", Rule(1, 3.0))):
        right = outcome(case)
        with monkeypatch.context() as patch:
            patch.setattr("fastar_nodes.samplers.mar.cspd.rejection.PAPER_RULE", rule)
            assert not np.array_equal(outcome(case), right), case


def test_a_draft_that_is_the_target_saves_all_but_one_pass_of_gamma_and_one(model):
    """16 AR steps: the first is the target's, then 3 drafts and a token of the target's own, again and again."""
    result = run(model, model, steps=16, images=(0,), labels=(1,))
    counts = result.report.counts
    assert (counts["accepted"], counts["rejected"]) == (12, 0)
    assert counts["draft_passes"] == 12 and counts["transformer_passes"] - counts["draft_passes"] == 1 + 4
    plain = finish(mar(model, from_ids((1,)), MARSettings(steps=16, diffusion_steps=6, cfg=2.0), PairedNoise(5, (0,))))
    off = float((result.latents - plain.latents).abs().max())
    scale = float(plain.latents.abs().max())
    assert 0 < off < 0.1 * scale, "the last diffusion step's noise, which MAR leaves out"


def test_an_image_does_not_depend_on_the_others_of_its_batch(model):
    """Images accept different numbers of drafts, so that their segments end at different AR steps."""
    draft = nearly(model, 1e-4)
    together = run(model, draft, steps=16, draft_length=2)
    outcomes = together.report.maps["outcome"]
    assert len({outcome.tobytes() for outcome in outcomes}) == 3
    for i, label in enumerate(LABELS):
        alone = run(model, draft, steps=16, draft_length=2, images=(i,), labels=(label,))
        torch.testing.assert_close(alone.latents, together.latents[i : i + 1], rtol=1e-3, atol=1e-4)
        assert np.array_equal(alone.report.maps["outcome"][0], outcomes[i])


class Remembers(FullTransformer):
    """A transformer that evaluates AR steps one by one, as one with a cache does."""

    allows_different_steps = False

    def __init__(self, canvas, asked):
        super().__init__(canvas)
        self.asked = asked

    def __call__(self, step, wanted):
        self.asked.append(step)
        return super().__call__(step, wanted)

    def discard_features(self):
        raise AssertionError("the target's tokens are final")


def test_a_transformer_that_remembers_is_asked_for_every_step_once(model):
    asked: list[int] = []
    draft = nearly(model, 3e-4)
    seen = run(model, draft, make_transformer=partial(Remembers, asked=asked))
    assert asked == list(range(6))
    together = run(model, draft)
    torch.testing.assert_close(seen.latents, together.latents, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ its law

DRAWS, ALPHA = 40_000, 0.001


def kernels(rest: float = 0.0) -> tuple[PathDensity, PathDensity]:
    """q = N(1, 1.2) and p = N(0, 1) of one channel; ``rest``: log Sigma."""
    q = PathDensity(*(torch.tensor([x]) for x in (1.0, math.log(1.2), rest)))
    p = PathDensity(*(torch.tensor([x]) for x in (0.0, 0.0, 0.0)))
    return q, p


def judged(rest: float, rule: Rule = PAPER_RULE, seed: int = 3) -> tuple[Tensor, float]:
    """Tokens fp64 [DRAWS] in place of drafts of q, and the share of accepted ones."""
    g = torch.Generator().manual_seed(seed)
    q, p = kernels(rest)
    drafts = q.mean + q.log_std.exp() * torch.randn(DRAWS, 1, generator=g)
    keys = torch.randint(-(2**62), 2**62, (1, DRAWS), generator=g)
    position = torch.arange(DRAWS)
    q, p = (PathDensity(*(part.expand(DRAWS, 1) for part in side)) for side in (q, p))
    tokens = TokenIndex((torch.zeros_like(position), position))
    found = Rejection(rule, RejectionNoise(keys)).verify(drafts, q, p, tokens)
    assert bool(found.has_value.all())
    return found.values[:, 0].double(), float(found.accepted.double().mean())


def normal(x: Tensor, mean: float, std: float) -> Tensor:
    return torch.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))


def law(sigma: float) -> tuple[Tensor, float]:
    """Quantiles fp64 [DRAWS] of what equations 5 and 6 make of a draft of q, by integration, and the acceptance."""
    x = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    p, q = sigma * normal(x, 0.0, 1.0), normal(x, 1.0, 1.2)
    width = float(x[1] - x[0])
    accepted = torch.minimum(p, q)
    kept = float(accepted.sum()) * width
    residual = (p - q).clamp(min=0)
    mass = accepted + (1 - kept) * residual / (residual.sum() * width)
    below = mass.cumsum(0) * width
    wanted = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    return x[torch.searchsorted(below, wanted).clamp(max=len(x) - 1)], kept


def p_value(found: Tensor, quantiles: Tensor) -> float:
    """Of the Kolmogorov-Smirnov test; the quantiles are no sample, which makes it conservative."""
    return ks(found, quantiles)


@pytest.mark.parametrize("sigma", [1.0, 1.5, 0.8])
def test_the_law_of_a_token(sigma):
    """Of 40,000 tokens: that of the equations, which is p itself where Sigma = 1."""
    quantiles, kept = law(sigma)
    found, accepted = judged(math.log(sigma))
    assert p_value(found, quantiles) > ALPHA
    assert accepted == pytest.approx(kept, abs=4 * math.sqrt(kept * (1 - kept) / DRAWS))
    of_target, _ = law(1.0)
    assert (p_value(found, of_target) > ALPHA) == (sigma == 1.0), "with another Sigma it is not p"


@pytest.mark.parametrize("rule", [Rule(-1, 1.0), Rule(1, 2.0)], ids=["Sigma inverted", "wider densities"])
def test_the_test_sees_another_rule(rule):
    quantiles, _ = law(1.5)
    assert p_value(judged(math.log(1.5), rule)[0], quantiles) < ALPHA


def test_the_test_sees_a_careless_redraw():
    """A rejected token that is a sample of p, as if the first redraw were always kept."""
    found, accepted = judged(0.0)
    g = torch.Generator().manual_seed(4)
    q, p = kernels()
    drafts = q.mean + q.log_std.exp() * torch.randn(DRAWS, 1, generator=g)
    rejected = log_ratio(drafts, q, p, *PAPER_RULE) < torch.rand(DRAWS, generator=g).log()
    careless = torch.where(rejected, torch.randn(DRAWS, generator=g), drafts[:, 0]).double()
    assert p_value(careless, law(1.0)[0]) < ALPHA
    assert float(rejected.double().mean()) == pytest.approx(1 - accepted, abs=0.02)
    assert p_value(found, law(1.0)[0]) > ALPHA


def test_equations_5_and_11_of_one_channel():
    """By hand: Sigma = 2 / 3, p = N(1, 2) and q = N(0, 1) at 1: r = (2 / 3) (1 / 2) e^(1/2)."""
    of_q, of_p = (0.0, 0.0, math.log(2)), (1.0, math.log(2), math.log(3))  # mean, log std and log of the other stds
    q, p = (PathDensity(*(torch.tensor([[x]]) for x in parts)) for parts in (of_q, of_p))
    r = math.exp(0.5) / 3
    assert float(log_ratio(torch.ones(1, 1), q, p, *PAPER_RULE).exp()) == pytest.approx(r, rel=1e-5)
    assert float(acceptance_of_proposals(torch.ones(1, 1), q, p, PAPER_RULE.sigma_power)) == 0, "1 - 1 / r is negative"
    far = torch.full((1, 1), 3.0)
    r = 2 / 3 / 2 * math.exp(-0.5) / math.exp(-4.5)
    assert float(acceptance_of_proposals(far, q, p, PAPER_RULE.sigma_power)) == pytest.approx(1 - 1 / r, rel=1e-5)
