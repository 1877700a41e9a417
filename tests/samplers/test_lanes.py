"""Random numbers of verification: one that decides whether a draft is accepted is used for nothing else."""

from functools import partial
from itertools import combinations

import pytest
import torch
from block_models import tiny_bitdance
from fastar_nodes.samplers.blocks.bitdance import bitdance
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.nextstep.nextstep import nextstep
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise
from nextstep_models import PROMPTS, tiny_nextstep
from tiny_models import toy_mar

SHORT = {"steps": 2, "diffusion_steps": 6, "cfg": 2.0}


@pytest.fixture
def used(monkeypatch):
    """The keys and lanes of every use: a uniform for every draft, normals for what replaces it, uniforms for these."""
    uses = {}

    def watched(name, method):
        def call(self, lane, first=0, count=1, *channels):
            lanes = lane.tolist() if isinstance(lane, torch.Tensor) else [lane] * len(self.keys)
            use = name, isinstance(lane, torch.Tensor), count == 1
            assert len(set(self.keys.tolist())) == len(self.keys), "rows of one call are different ones"
            uses.setdefault(use, set()).update(zip(self.keys.tolist(), lanes, strict=True))
            return method(self, lane, first, count, *channels)

        return call

    for name in ("uniform", "normal"):
        monkeypatch.setattr(CounterRNG, name, watched(name, getattr(CounterRNG, name)))
    return uses


def speculation():
    """So many images that a draft of the first step is redrawn, too."""
    return mar(toy_mar(), from_ids([1] * 24), MARSettings(**SHORT, speculation=3), PairedNoise(7, range(24)))


def drafts(mode):
    settings = CSpDSettings(**SHORT, mode=mode, prefill_ratio=0.0, draft_length=2)
    labels, noise = from_ids([1] * 8), PairedNoise(7, range(8))
    return cspd(toy_mar(), labels, settings, noise, draft=toy_mar(off=0.1))


def blocks():
    """In the first block the guidance scale is 1, and the null branch has drafts of its own."""
    settings = BlockSettings(diffusion_steps=5, cfg=3.0, cfg_schedule="linear", speculation=3)
    return bitdance(tiny_bitdance(), from_ids([1, 1]), settings, PairedNoise(7, (0, 1)))


def continuous():
    """Every token has keys of its own, and its last step adds noise, so it is verified too."""
    settings = NextStepSettings(diffusion_steps=5, cfg=3.0, solver="em0", speculation=3)
    return nextstep(tiny_nextstep(), PromptCondition(PROMPTS[:2]), settings, PairedNoise(7, (0, 1)))


@pytest.mark.parametrize(
    ("start", "count"),
    [
        (speculation, 3),
        (partial(drafts, "paper"), 3),
        (partial(drafts, "published"), 3),
        (partial(drafts, "lossless"), 3),
        (blocks, 1),  # it needs no redraws
        (continuous, 1),
    ],
    ids=["speculation", "paper", "published", "lossless", "blocks", "continuous"],
)
def test_no_two_uses_share_a_random_number(start, count, used):
    finish(start())
    assert len(used) == count
    for one, other in combinations(used.values(), 2):
        assert one and not one & other
