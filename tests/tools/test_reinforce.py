"""Policy gradients on own samples: rewards, credit assignment, and that a GPT learns."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder
from fastar_nodes.model_loaders.networks.llama import Llama, TokenModel
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.tools.training import picture_book, reinforce, token_recipes
from fastar_nodes.tools.training.judge import Judge, Verdict, redraw_error
from fastar_nodes.tools.training.training import Job, Schedule, seeded
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
TINY = replace(token_recipes.GPT_LOW, name="tiny", count=64, config=replace(tiny.GPT_CONFIG, dim=32, hidden=32))


def gpt(seed: int = 0) -> Llama:
    """A GPT with a non-uniform distribution; at initialisation all codes are equally likely."""
    net, g = Llama(TINY.config).eval(), torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=g) * (0.3 if p.ndim > 1 else 0.1) + (p.ndim < 2)
    return net


@pytest.fixture(scope="module")
def vq() -> VQAutoencoder:
    return seeded(0, lambda: VQAutoencoder(tiny.VQ)).eval().requires_grad_(False)


@given(st.integers(0, 2**32), st.integers(1, 16))
@settings(max_examples=30)
def test_a_token_answers_for_its_row_those_below_and_the_one_above(seed: int, rows: int) -> None:
    errors = torch.rand(3, rows, generator=torch.Generator().manual_seed(seed))
    want = torch.stack([errors[:, max(0, r - 1) :].sum(1) for r in range(rows)], 1)
    torch.testing.assert_close(reinforce.from_row_on(errors), want)


@given(st.integers(0, 2**32), st.integers(1, 20))
@settings(max_examples=30)
def test_pictures_are_compared_with_the_others_of_their_class(seed: int, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    labels, returns = torch.randint(10, (count,), generator=g), torch.randn(count, 4, generator=g)
    got = reinforce.minus_class_mean(returns, labels)
    for i in range(count):
        others = (labels == labels[i]) & (torch.arange(count) != i)
        want = returns[i] - returns[others].mean(0) if others.any() else torch.zeros(4)
        torch.testing.assert_close(got[i], want, atol=1e-5, rtol=1e-5)


def test_marks_find_the_rows_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    s = picture_book.scenes(5, 40)
    rgb, cover = picture_book.render(s)
    monkeypatch.setattr(reinforce, "read", lambda critic, rgb: Verdict(np.zeros((40, 64)), s, np.ones(40)))
    labels = torch.from_numpy(s.label)
    assert reinforce.marks(Judge(), rgb, labels, 8).errors.abs().max() < 1e-5
    spoilt = rgb.copy()
    spoilt[:, 34:38] = 255 - spoilt[:, 34:38]
    m = reinforce.marks(Judge(), spoilt, labels, 8)
    there = torch.from_numpy((cover[:, 32:40] > 0).any((1, 2)))
    assert there.float().mean() > 0.8
    assert (m.errors[there, 4] > 0).all() and m.errors[:, [0, 1, 2, 3, 5, 6, 7]].max() < 1e-5
    assert m.errors.sum(1).max() <= reinforce.MOST + 1e-4
    want = torch.from_numpy(redraw_error(spoilt, s)) / reinforce.UNIT
    torch.testing.assert_close(m.errors.sum(1), want.clamp(max=reinforce.MOST))
    reached = torch.from_numpy(cover.reshape(40, 8, -1).astype(np.float32).sum(2) / 255 > 1)
    for live, rows in zip(m.live, reached, strict=True):
        last = int(rows.nonzero().max())
        assert live.tolist() == [r <= last + 1 for r in range(8)], "rows under the thing have nothing to answer for"


def test_what_is_better_or_rarer_than_others_gains() -> None:
    learner = reinforce.Learner(Llama(TINY.config))
    s = picture_book.scenes(7, 6, labels=np.full(6, 3))
    same = {name: getattr(s, name) * 0 for name in ("parts", "place", "size", "time")}
    s = replace(s, colour=np.array([0, 0, 0, 0, 0, 1]), **same)
    errors, labels = torch.full((6, 8), 0.1), torch.full((6,), 3)
    errors[1, 5] = 0.9
    live = torch.ones(6, 8, dtype=torch.bool)
    live[:, 7] = False
    m = reinforce.Marks(errors, live, torch.ones(6, dtype=torch.bool), torch.ones(6), s)
    advantage = learner.advantages(m, labels)
    assert (advantage[1, :7] < advantage[0, :7] - 0.5).all(), "it answers for what comes, and for the row above"
    torch.testing.assert_close(advantage[5], advantage[0], msg="nothing was counted yet")
    apart = [learner.count(labels, s) for _ in range(200)]
    assert apart[0] < 0.2 < 0.5 < apart[-1]
    advantage = learner.advantages(m, labels)
    assert (advantage[5, :7] > advantage[0, :7] + 0.2).all(), "a colour seldom drawn"
    assert (advantage[:, 7] == 0).all()
    wrong = replace(m, right=torch.tensor([False, True, True, True, True, True]))
    assert (learner.advantages(wrong, labels)[0, :7] < advantage[0, :7]).all()
    doubtful = replace(m, whole=torch.tensor([0.0, 1, 1, 1, 1, 1]))
    assert (learner.advantages(doubtful, labels)[0, :7] < advantage[0, :7]).all()


def test_slips_are_what_the_model_would_draw() -> None:
    net, layout = gpt(), token_recipes.Layout.of(8)
    g, labels = torch.Generator().manual_seed(1), torch.arange(60) % 10
    codes = torch.full((60, 64), 31)
    places = net.positions(8, 1)
    assert torch.equal(reinforce.resampled(net, layout, places, labels, codes, 0.0, g), codes)
    with torch.no_grad():
        net.output.weight[:] = 0  # all codes equally likely
    changed = reinforce.resampled(net, layout, places, labels, codes, 0.4, g) != codes
    # Mean rate 0.2, less 1/32 draws of the old code; 3,840 draws, correlated by image: four std are 0.06.
    assert float(changed.float().mean()) == pytest.approx(0.19, abs=0.06)
    assert changed.float().mean(1).std() > 0.05, "some pictures many, some few"


def test_a_block_comes_from_another_picture_of_the_class() -> None:
    labels = torch.arange(40) % 10
    codes = torch.arange(40)[:, None, None].expand(40, 16, 16)
    out = reinforce.with_exchanged_block(codes, labels, torch.Generator().manual_seed(0))
    for i, picture in enumerate(out):
        rows, columns = (picture != i).nonzero(as_tuple=True)
        source = int(picture[rows[0], columns[0]])
        assert source != i and labels[source] == labels[i] and rows.min() >= 2
        block = picture[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (block == source).all() and len(rows) == block.numel() and 3 <= len(block) <= 10


def rewarded(token: int):
    """Marks with an error in every row without ``token``; the scenes are those of the book."""

    def marks(critic, rgb, labels, grid):
        codes = critic.pop()
        errors = (codes != token).float().mean(2) / grid
        full, ones = torch.ones(len(labels), grid, dtype=torch.bool), torch.ones(len(labels))
        scenes = picture_book.scenes(1, len(labels), labels=labels.numpy())
        return reinforce.Marks(errors, full, full[:, 0], ones, scenes)

    return marks


def test_a_gpt_learns_what_is_rewarded(tmp_path, vq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewarded tokens become more frequent; the initial model does not change, and the file can be loaded."""
    start, seen = gpt(), []
    before = {k: v.clone() for k, v in start.state_dict().items()}
    blank = torch.zeros(40, 3, 64, 64)
    monkeypatch.setattr(reinforce, "decoded", lambda vq, codes: seen.append(codes) or blank[: len(codes)])
    monkeypatch.setattr(reinforce, "marks", rewarded(5))
    monkeypatch.setattr(reinforce, "REAL", 0.0)
    schedule = Schedule(steps=12, batch=40, lr=2e-2, warmup=1, ema=0.0, weight_decay=0.0)
    monkeypatch.setattr(reinforce, "SCHEDULE", schedule)
    net = reinforce.reinforce(Job(tmp_path, images=64), tmp_path / "gpt.safetensors", TINY, start, vq, seen)
    for name, value in before.items():
        assert torch.equal(start.state_dict()[name], value), name
    settings, condition = LlamaGenSettings(cfg=1.0, top_k=0), from_ids([i % 10 for i in range(40)])
    drawn = (llamagen(TokenModel(n, "", 8), condition, settings, PairedDraws(1, range(40))) for n in (start, net))
    share = [float((finish(steps).codes == 5).float().mean()) for steps in drawn]
    assert share[1] > 2 * share[0] + 0.05, share


def test_real_pictures_are_not_forgotten(tmp_path, vq, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal rewards, only the real images are learned."""
    critic, start = Judge().eval(), gpt()
    monkeypatch.setattr(reinforce.Learner, "advantages", lambda self, m, labels: torch.zeros(len(labels), 8))
    schedule, job = Schedule(steps=30, batch=10, lr=2e-2, warmup=1, ema=0.0, weight_decay=0.0), Job(tmp_path, images=64)
    monkeypatch.setattr(reinforce, "SCHEDULE", schedule)
    net = reinforce.reinforce(job, tmp_path / "gpt.safetensors", TINY, start, vq, critic)
    book, labels = token_recipes.code_book(job, vq, 64, 8)
    layout = token_recipes.Layout.of(8)

    @torch.no_grad()
    def nats(n: Llama) -> float:
        logits = token_recipes.sequence_logits(n, layout, n.positions(8, 1), labels, book.long())
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), book.long().flatten()))

    assert nats(net) < nats(start) - 0.3
