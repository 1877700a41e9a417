"""CSpD's published rule by hand: which drafts and redraws are kept.

Whole recorded runs are in ``tests/parity/test_parity_cspd_temperature.py``.
"""

import math

import pytest
import torch
from fastar_nodes.samplers.mar.canvas import TokenIndex
from fastar_nodes.samplers.mar.cspd.mode import PathDensity
from fastar_nodes.samplers.mar.cspd.rejection import (
    MAX_PROPOSALS,
    PUBLISHED_RULE,
    Rejection,
    Rule,
    acceptance_of_proposals,
    log_ratio,
)


def published(inner: float) -> Rule:
    """The mode's rule at a factor of the stds."""
    return PUBLISHED_RULE._replace(draft_std_factor=inner)


def last(mean: float, std: float, rest: float = 1.0, tokens: int = 1) -> PathDensity:
    """Tokens of one channel; ``rest`` is the product of the other steps' stds."""
    return PathDensity(*(torch.full((tokens, 1), x) for x in (mean, math.log(std), math.log(rest))))


def test_the_ratio_of_one_channel():
    """p(1) / (Sigma q(1)) of N(1, 2) and N(0, 1) with Sigma = 2 /
    3 is (1 / 2) e^(1/2) 3 / 2; and with stds 42 times as large.
    """
    q, p, token = last(0.0, 1.0, 2.0), last(1.0, 2.0, 3.0), torch.ones(1, 1)
    assert float(log_ratio(token, q, p, *published(1.0)).exp()) == pytest.approx(0.75 * math.exp(0.5), rel=1e-5)
    assert float(log_ratio(token, q, p, *published(42.0)).exp()) == pytest.approx(
        0.75 * math.exp(0.5 / 42**2), rel=1e-5
    )
    kept = 1 - 1 / (0.75 * math.exp(0.5))
    assert float(acceptance_of_proposals(token, q, p, published(42.0).sigma_power)) == pytest.approx(kept, rel=1e-4)
    # Where q / (Sigma p) is above 1 nothing is kept.
    assert float(acceptance_of_proposals(token - 1, q, p, published(42.0).sigma_power)) == 0


class FewProposals:
    """Redraws of which each token keeps that of one number: 3 + 0.25 x its row. All others are 1,
    where q is above p.
    """

    def __init__(self, kept: list[int]):
        self.kept, self.asked = torch.tensor(kept), list[tuple[int, int, int]]()

    def acceptance(self, tokens):
        return torch.full((len(tokens),), 0.5)

    def proposals(self, tokens, first, count, channels):
        self.asked.append((len(tokens), first, count))
        number = torch.arange(first, first + count)
        _, position = tokens.index
        normals = torch.where(number == self.kept[position, None], 0.25 * position[:, None], -2.0)
        return normals[..., None], torch.full(normals.shape, 0.5)


def test_drafts_and_redraws():
    """q is N(0, 1) and p N(3, 1): log p / q = 3 x - 4.5 accepts a draft of 2 and rejects one of 0 at a guess of 0.5."""
    never = MAX_PROPOSALS
    noise = FewProposals([never, 0, 9, 10, 57, MAX_PROPOSALS - 1, never])
    drafts = torch.tensor([2.0, 0, 0, 0, 0, 0, 0])[:, None]
    rows = torch.arange(7)
    q, p = last(0.0, 1.0, tokens=7), last(3.0, 1.0, tokens=7)
    judged = Rejection(published(1.0), noise).verify(drafts, q, p, TokenIndex((torch.zeros_like(rows), rows)))
    assert judged.accepted.tolist() == [True, False, False, False, False, False, False]
    assert judged.values[:, 0].tolist() == [2.0, 3.25, 3.5, 3.75, 4.0, 4.25, 0.0]
    assert judged.proposal_counts.tolist() == [0, 1, 10, 11, 58, MAX_PROPOSALS, MAX_PROPOSALS]
    assert judged.has_value.tolist() == [True] * 6 + [False]
    assert judged.counts() == {"redraws": 80 + 2 * MAX_PROPOSALS, "redraws_exhausted": 1}
    assert judged.counts(rows < 2) == {"redraws": 1, "redraws_exhausted": 0}
    # All tokens are drawn ten times, and the four that kept none of these 90 times more.
    assert noise.asked == [(7, 0, 10), (4, 10, 90)]
