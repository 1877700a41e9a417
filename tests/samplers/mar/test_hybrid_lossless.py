"""Lossless CSpD on hybrids draws plain MAR's distribution: three two-sample tests of 5,000 pictures each, at p = 0.001.

The seeds are fixed, so the test gives the same p-values in every run. The same tests reject the approximate modes.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from fastar_nodes.model_loaders.networks.prompts import HybridModel
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import CSpDSettings, MARSettings
from fastar_nodes.tools.statistics.lossless import ALPHA
from fastar_nodes.tools.statistics.toy import ManyImages, ToyHead
from fastar_nodes.tools.statistics.two_samples import p_values
from tiny_hybrids import tiny_hybrid

DRAWS = 5000
COMMON = {"ar_steps": 3, "diffusion_steps": 6, "cfg": 2.0, "temperature": 1.0}
DRAFTING = {"prefill_ratio": 0.0, "draft_length": 2}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@lru_cache
def toy_hybrid(perturbation: float = 0.0) -> HybridModel:
    """A tiny hybrid of four tokens whose head has a known distribution; weights differ by ``perturbation`` of their size."""
    model, g = tiny_hybrid(tokens=4), torch.Generator().manual_seed(5)
    for p in model.hybrid.parameters():
        p.add_(perturbation * p.abs().mean() * torch.randn(p.shape, generator=g))
    model.net.diffloss.net = ToyHead(model.net.config.channels)
    return model


@lru_cache
def drawn(key: str, perturbation: float | None = None, **settings) -> tuple[torch.Tensor, dict[str, int]]:
    """Pictures as vectors [DRAWS, 16] and counts, of MAR or of CSpD with a perturbed draft."""
    condition, noise = PromptCondition(("a boat",) * DRAWS), ManyImages(key, DRAWS)
    if perturbation is None:
        done = finish(mar(toy_hybrid(), condition, MARSettings(**COMMON, **settings), noise))
    else:
        made = CSpDSettings(**COMMON, **DRAFTING, **settings)
        done = finish(cspd(toy_hybrid(), condition, made, noise, draft=toy_hybrid(perturbation)))
    return done.latents.flatten(1), done.report.counts


@pytest.mark.parametrize("perturbation", [0.0, 0.03])
def test_lossless_drafts_do_not_change_the_distribution(perturbation):
    pictures, counts = drawn(f"lossless {perturbation}", perturbation, mode="lossless")
    p = p_values(drawn("plain")[0], pictures)
    assert min(p.values()) > ALPHA, p
    assert counts["accepted"] > 0 and (perturbation == 0 or counts["rejected"] > 0)


def test_the_approximate_mode_is_rejected():
    p = p_values(drawn("plain")[0], drawn("published", 0.2, mode="published")[0])
    assert min(p.values()) <= ALPHA, p


def test_two_runs_of_plain_mar_are_one_distribution():
    p = p_values(drawn("plain")[0], drawn("plain again")[0])
    assert min(p.values()) > ALPHA, p
