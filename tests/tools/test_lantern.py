"""The LANTERN-style comparison: its rules, its exact limits, independence of the batch, and its report."""

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import ACCEPTED, PLAIN, REJECTED
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.tools.lantern import CERTAIN, LanternSettings, certain_rest, drafted_rest, lantern, likeliest, relaxed
from tiny_tokens import VQ, other_vocabulary, tiny_vq
from tokens_reference import condition_of, tiny_gpt

FEW = {"cfg": 2.5, "top_k": 8, "top_p": 0.9, "temperature": 0.9}
KINDS = ("class", "text", "features", "class, grouped heads")
TARGETS = {kind: tiny_gpt(kind) for kind in KINDS}
DRAFTS = {kind: tiny_gpt(kind, seed=1) for kind in KINDS}
CASES = {
    "itself": {},
    "other": {"draft": "other"},
    "certain": {"drafts": CERTAIN},
    "long": {"draft_length": 9, "draft": "other"},
    "lambda": {"delta": 3.0, "neighbours": 5},
    "greedy": {"temperature": 0.0, "draft": "other"},
    "guided at first": {"cfg_interval": 6},
    "one": {"draft_length": 1, "draft_cfg": 2.5},
    "plain": {"neighbours": 0, "draft": "other"},
    "no guidance": {"cfg": 1.0},
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def run(kind="class", images=(0, 1, 2), seed=5, draft="itself", **changes):
    chosen = LanternSettings(**{**FEW, "draft_length": 3, "neighbours": 2, **changes})
    model = TARGETS[kind] if draft == "itself" else DRAFTS[kind]
    about, noise = condition_of(kind, images), PairedDraws(seed, images)
    return finish(lantern(TARGETS[kind], about, chosen, noise, seed, draft=model, vq=VQ))


P = torch.tensor([0.40, 0.05, 0.15, 0.10, 0.30])
NEAREST = torch.tensor([[1, 2, 3, 4], [2, 0, 3, 4], [3, 1, 0, 4], [4, 2, 1, 0], [3, 2, 1, 0]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "k", "delta", "count", "lent"),
    [
        (1, 4, 0.1, 0.05, False),  # its nearest has 0.15 already
        (1, 4, 0.2, 0.20, True),
        (1, 4, 0.6, 0.60, True),
        (1, 1, 0.6, 0.20, True),
        (1, 0, 0.6, 0.05, False),
        (3, 4, 0.46, 0.55, True),
        (3, 4, 0.3, 0.40, True),
        (3, 4, 1.0, 1.0, True),
        (0, 4, 1.15, 0.45, True),  # 0.15 of its own 0.40 is 0.06
        (0, 4, 1.1, 0.40, False),
        (1, 4, 9.0, 0.20, True),
    ],
)
def test_neighbours_are_added_while_their_sum_is_within_delta(x, k, delta, count, lent):
    counted, any_lent = relaxed(P, torch.tensor(x), NEAREST[:, :k], delta)
    assert float(counted) == pytest.approx(count, abs=1e-6) and bool(any_lent) is lent
    batch = relaxed(P.expand(2, 3, -1), torch.full((2, 3), x), NEAREST[:, :k], delta)
    assert torch.equal(batch[0], counted.expand(2, 3)) and torch.equal(batch[1], any_lent.expand(2, 3))


def test_residual_distributions():
    x, yes, no = torch.tensor(1), torch.tensor(True), torch.tensor(False)
    assert torch.allclose(certain_rest(P, x, no, NEAREST[:, :2]), torch.tensor([0.40, 0, 0.15, 0.10, 0.30]) / 0.95)
    assert torch.allclose(certain_rest(P, x, yes, NEAREST[:, :2]), torch.tensor([0.0, 0, 0, 0.10, 0.30]) / 0.40)
    assert torch.allclose(certain_rest(P, x, yes, NEAREST), torch.full((5,), 0.2)), "uniform where nothing is left"
    q = torch.tensor([0.10, 0.50, 0.20, 0.20, 0.0])
    assert torch.allclose(drafted_rest(P, q, x, no, NEAREST[:, :2]), torch.tensor([0.30, 0, 0, 0, 0.30]) / 0.60)
    assert torch.allclose(drafted_rest(P, q, x, yes, NEAREST[:, :2]), torch.tensor([0.40, 0, 0.15, 0, 0.30]) / 0.85)
    assert likeliest(P.expand(3, -1), torch.tensor([0, 1, 4]), NEAREST, 0.0).tolist() == [True, False, False]
    assert likeliest(P.expand(3, -1), torch.tensor([0, 1, 4]), NEAREST, 0.6).tolist() == [True, True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["itself", "other"])
@pytest.mark.parametrize(
    "change", [{}, {"draft_length": 1}, {"draft_length": 20}, {"cfg_interval": 5}, {"drafts": CERTAIN}], ids=str
)
def test_greedy_without_neighbours_is_the_target(kind, draft, change):
    greedy = {**FEW, "temperature": 0.0, "cfg_interval": change.get("cfg_interval", -1)}
    draws = PairedDraws(5, (0, 1, 2))
    plain = finish(llamagen(TARGETS[kind], condition_of(kind), LlamaGenSettings(**greedy), draws)).codes
    assert torch.equal(run(kind, draft=draft, temperature=0.0, neighbours=0, **change).codes, plain)


def test_the_target_with_its_own_guidance_accepts_every_draft_of_its_own():
    counts = run(draft_cfg=2.5, draft_length=5).report.counts
    verified = counts["transformer_passes"] - counts["draft_passes"]
    assert counts["rejected"] == 0 and verified == 1 + 3  # 1 + 6 + 6 + 3 cells


@pytest.mark.parametrize("drafts", ["drafted", CERTAIN])
def test_without_neighbours_the_distribution_is_the_targets(drafts):
    """The first two cells of 3,000 pictures against the exact joint distribution of tokens: chi-square over those expected often."""
    target, other = tiny_gpt(grid=2), tiny_gpt(grid=2, seed=1)
    images, what = range(3000), condition_of("class", (1,) * 3000)
    chosen = LanternSettings(cfg=1.0, top_k=3, neighbours=0, draft_length=2, drafts=drafts)
    codes = finish(lantern(target, what, chosen, PairedDraws(3, images), draft=other, vq=VQ)).codes.flatten(1)
    net = target.net

    def probabilities(tokens):
        x = torch.cat([net.prefix(torch.tensor([4])), net.embed(torch.tensor([tokens], dtype=torch.int64))], 1)
        logits = net(x, torch.arange(-1, len(tokens)), net.positions(2, 1))[0, -1]
        return logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf).softmax(-1)

    with torch.no_grad():
        first = probabilities([])
        second = {a: probabilities([a]) for a in first.nonzero()[:, 0].tolist()}
        joint = {(a, b): float(first[a] * p[b]) for a, p in second.items() for b in p.nonzero()[:, 0].tolist()}
    assert len(joint) == 9 and abs(sum(joint.values()) - 1) < 1e-5
    seen = {pair: 0 for pair in joint}
    for pair in codes[:, :2].tolist():
        seen[tuple(pair)] += 1
    often = {pair: 3000 * p for pair, p in joint.items() if 3000 * p >= 5}
    chi = sum((seen[pair] - expected) ** 2 / expected for pair, expected in often.items())
    assert len(often) >= 4 and chi < 39.3, "8 degrees of freedom: 99.9995 % are below"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_an_image_does_not_depend_on_its_batch(kind, case):
    together = run(kind, **CASES[case])
    for i in range(3):
        alone = run(kind, (i,), **CASES[case])
        assert torch.equal(alone.codes[0], together.codes[i])
        assert np.array_equal(alone.report.maps["outcome"][0], together.report.maps["outcome"][i])


@pytest.mark.parametrize("case", CASES)
def test_reports_what_adds_up(case):
    result = run(**CASES[case])
    counts, outcome, step = result.report.counts, result.report.maps["outcome"], result.report.maps["step"]
    assert {*np.unique(outcome)} <= {ACCEPTED, REJECTED, PLAIN} and (outcome[:, 0, 0] == PLAIN).all()
    for value, name in ((ACCEPTED, "accepted"), (REJECTED, "rejected")):
        assert (outcome == value).sum() == counts[name]
    assert step.min() == 0 and step.max() == counts["transformer_passes"] - 1
    assert (np.diff(step.reshape(3, -1), axis=1) >= 0).all(), "in raster order"
    assert result.report.sampler == "lantern" and 0 <= int(result.codes.min()) and int(result.codes.max()) < 23


MISFITS = {"draft": [{"draft": other_vocabulary(DRAFTS["class"], 9)}, {"draft": tiny_gpt(grid=2)}]}
MISFITS |= {"decoder": [{"vq": tiny_vq(31)}], "model": [{"draft": tiny_gpt(special=3)}]}
MISFITS |= {"condition": [{"draft": DRAFTS["text"]}]}
MISFITS |= {"neighbours": [{"settings": LanternSettings(neighbours=22)}]}


@pytest.mark.parametrize(("field", "change"), [(f, c) for f, changes in MISFITS.items() for c in changes])
def test_what_does_not_fit_says_so_before_any_work(change, field):
    wired = {"target": TARGETS["class"], "condition": condition_of("class"), "settings": LanternSettings()}
    wired |= {"noise": PairedDraws(1, (0, 1, 2)), "draft": DRAFTS["class"], "vq": VQ, **change}
    with pytest.raises(UserError, match=f"^{field}: "):
        next(lantern(**wired))
