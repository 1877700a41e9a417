"""LazyMAR: where it is plain MAR, that it is what the paper
says (against a slow copy), and what its caches may never do.
"""

import copy
import dataclasses
from functools import partial
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fastar_nodes.networks.mar import BUDGET
from fastar_nodes.networks.speed import Recordable
from fastar_nodes.reports.record import Report
from fastar_nodes.runs.baseline import no_gain
from fastar_nodes.samplers import chain, diffusion_steps
from fastar_nodes.samplers.chain import HeadSampler
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.lazy import LazyTransformer, lazymar, note_caches
from fastar_nodes.samplers.mar.lazy import transformer as transformer_module
from fastar_nodes.samplers.mar.lazy.head import (
    CachedHeadSampler,
    evaluate_cached,
    evaluate_full,
    head_schedule,
)
from fastar_nodes.samplers.mar.lazy.schedule import caches_to_fill, computed_ratios, measuring_block, spare_rows
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings, LazyMARSettings, head_period
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.prepare import mar_canvas
from fastar_nodes.samplers.mar.settings import MARBase, MARSettings
from fastar_nodes.samplers.mar.tables import respacing
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.settings import knobs
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_reference import TABLE, SlowLazy, share_of, slow_head
from tiny_models import tiny_mar

BASE = {"steps": 10, "diffusion_steps": 3, "cfg": 2.0}
STRETCHED = {"ratio_schedule": "stretched"}  # leaves rows out although there are few AR steps
QUICK = {"refresh_period": 4, "start_step": 1, "computed_ratio": 0.05, **STRETCHED}
NO_HEAD = {**QUICK, "head_cache": False}
CACHES = "encoder_cache", "token_cache", "condition_cache"
ALL_OFF = dict.fromkeys((*CACHES, "head_cache"), False)
LABELS, NOISE = from_ids((1, 4)), PairedNoise(5, (0, 1))
FEW = settings(max_examples=8)


@pytest.fixture(scope="module")
def deep():
    """Enough decoder blocks for rows to be left out of some, and every kind of head block."""
    return tiny_mar(2, tokens=25, decoder_depth=5, head_depth=6, buffer=3)


def lazy(model, base=BASE, labels=LABELS, noise=NOISE, **changes):
    return finish(lazymar(model, labels, LazyMARSettings(**{**base, **QUICK, **changes}), noise))


class Watched(LazyTransformer):
    """Writes down what it refreshes and chooses."""

    def __init__(self, canvas, settings):
        super().__init__(canvas, settings)
        self.refreshed, self.chosen = [], []
        self.row_selection.choice = partial(self.recorded_choice, self.row_selection.choice)

    def refresh_features(self, step, wanted):
        self.refreshed.append(step)
        return super().refresh_features(step, wanted)

    def recorded_choice(self, rows, step, known, must):
        choose = rows(step, known, must)
        if choose is None:
            self.chosen.append((step, None, must))
            return None

        def written_down(values, last):
            keep = choose(values, last)
            self.chosen.append((step, keep, must))
            return keep

        return written_down

    @property
    def computed(self):
        return {step: keep for step, keep, _ in self.chosen if keep is not None}


def as_slow(model, changed, edit=None):
    """The result and the slow look, after they were found equal."""
    plain = MARSettings(**{name: getattr(changed, name) for name in knobs(MARBase)})
    looks = []

    def fast(canvas):
        note_caches(canvas, changed)
        looks.append(Watched(canvas, changed))
        return looks[-1]

    def slowly(canvas):  # a quarter of 5 blocks stand before the chosen one
        looks.append(SlowLazy(canvas, changed, 1, spare=1, follow=looks[0].computed))
        return looks[-1]

    got = finish(mar(model, LABELS, plain, NOISE, make_transformer=fast, edit=edit))
    want = finish(mar(model, LABELS, plain, NOISE, make_transformer=slowly, edit=edit))
    _, slow = looks
    torch.testing.assert_close(got.latents, want.latents, rtol=1e-4, atol=1e-4 * float(want.latents.abs().max()))
    return got, slow


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("exact", [ALL_OFF, {"start_step": 9, "head_cache": False}], ids=("off", "start"))
@pytest.mark.fast_cases("off-2.0")
def test_computing_everything_is_plain_mar_bit_for_bit(deep, cfg, exact):
    base = {**BASE, "cfg": cfg, "diffusion_steps": 20}
    plain, ours = finish(mar(deep, LABELS, MARSettings(**base), NOISE)), lazy(deep, base, **exact)
    assert torch.equal(ours.latents, plain.latents)
    of_caches = ("cached_tokens", "cached_calls")
    assert {k: v for k, v in ours.report.counts.items() if k not in of_caches} == plain.report.counts
    assert not any(ours.report.counts.get(name) for name in (*of_caches, "cache_bytes"))


def test_a_share_of_one_leaves_nothing_out(deep):
    whole, without = lazy(deep, computed_ratio=1.0), lazy(deep, token_cache=False)
    assert torch.equal(whole.latents, without.latents)
    assert whole.report.counts["cached_tokens"] == 0 and not whole.report.maps["cached"].any()
    assert "cached" not in without.report.maps


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({"refresh_period": 1}, False),
        ({"start_step": 10}, False),  # a head of 3 diffusion steps has no cache either
        ({"start_step": 9, "head_cache": False}, False),  # a refresh is the last AR step
        ({"start_step": 10, "diffusion_steps": 20}, True),  # the head
        (ALL_OFF, False),
        ({**ALL_OFF, "encoder_cache": True}, True),
        ({**ALL_OFF, "condition_cache": True}, True),
        ({**ALL_OFF, "condition_cache": True, "cfg": 1.0}, False),  # there is no null branch
        ({**ALL_OFF, "token_cache": True}, True),
        ({**ALL_OFF, "token_cache": True, "computed_ratio": 1.0}, False),
    ],
)
@pytest.mark.fast_cases(3)
def test_the_report_says_whether_anything_came_from_a_cache(deep, changes, used):
    report = lazy(deep, **changes).report
    assert (report.counts["cached_calls"] > 0) == used
    assert no_gain(report).startswith("Nothing came from the cache") != used


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.fast_cases("2.0")
def test_equals_the_slow_reference(deep, cfg):
    changed = LazyMARSettings(**{**BASE, "cfg": cfg}, **NO_HEAD)
    got, slow = as_slow(deep, changed)
    left_out = torch.stack([branch.left_out for branch in slow.cond]).view(2, 5, 5).numpy()
    assert np.array_equal(got.report.maps["cached"], left_out) and left_out.any()
    assert got.report.counts["cached_tokens"] == left_out.sum()
    plain = finish(mar(deep, LABELS, MARSettings(**{**BASE, "cfg": cfg}), NOISE))
    assert (plain.latents - got.latents).abs().max() > 1e-3, "the caches must matter for this to say anything"


@pytest.mark.parametrize("selection", ["least-similar", "undecided", "decided"])
def test_an_edit_equals_the_slow_reference(deep, selection):
    """By state, given tokens are decided from the start."""
    mask = torch.zeros(1, 5, 5)
    mask[:, 1:4, 1:5] = 1
    edit = Edit(torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1)), mask)
    got, _ = as_slow(deep, LazyMARSettings(**BASE, **NO_HEAD, selection=selection), edit)
    outside = (mask == 0).expand(2, 5, 5)[:, None].expand(-1, 4, -1, -1)
    assert torch.equal(got.latents[outside], edit.start.expand(2, -1, -1, -1)[outside])


@pytest.mark.parametrize("selection", ["most-similar", "random", "undecided", "decided"])
@pytest.mark.parametrize("condition_cache", [True, False])
def test_every_strategy_equals_the_slow_reference(deep, selection, condition_cache):
    """Strategies IV, III, II and I of the paper's Table 3; with both branches each chooses rows of its own."""
    changed = LazyMARSettings(**BASE, **NO_HEAD, selection=selection, condition_cache=condition_cache)
    got, slow = as_slow(deep, changed)
    left_out = torch.stack([branch.left_out for branch in slow.cond]).view(2, 5, 5).numpy()
    assert np.array_equal(got.report.maps["cached"], left_out) and left_out.any()
    usual = lazy(deep, head_cache=False, condition_cache=condition_cache)
    assert (usual.latents - got.latents).abs().max() > 1e-3, "the strategy must matter for this to say anything"


def chosen_rows(selection, numbers):
    """The transformer after 16 AR steps with some images of a seed; 18 rows."""
    model = tiny_mar(3, decoder_depth=4)
    base = LazyMARSettings(steps=16, cfg=2.0, **{**QUICK, "refresh_period": 99}, selection=selection)
    canvas = mar_canvas("mar", model, from_ids((1,) * len(numbers)), base, PairedNoise(7, numbers), None)
    look = Watched(canvas, base)
    with torch.no_grad():
        for step in range(16):
            look(step, canvas.order.positions_from(step))
    return look


def unevenness(look):
    """Chi-squared, 17 degrees of freedom, of how often each of the 18 rows was computed where it need not be."""
    seen, expected, variance = torch.zeros(3, 18)
    for step, keep, must in look.chosen:
        if step in look.computed:
            free = torch.ones(len(must), 18).scatter(1, must, 0.0)
            share = (keep.shape[1] - must.shape[1]) / float(free[0].sum())
            seen += torch.zeros_like(free).scatter(1, keep, 1.0).mul(free).sum(0)
            expected += share * free.sum(0)
            variance += share * (1 - share) * free.sum(0)
    assert expected.min() > 50
    return 17 / 18 * float(((seen - expected) ** 2 / variance).sum())


def test_random_rows_are_uniform():
    """Strategy III: 40.8 is the 99.9 % point. Rows chosen by similarity are beyond it."""
    images = tuple(range(60))
    assert unevenness(chosen_rows("random", images)) < 40.8 < unevenness(chosen_rows("least-similar", images))


def test_random_rows_are_of_the_image_and_the_ar_step():
    """They depend on an image's seed and number, not on its batch, and differ from step to step."""
    batch, pair = chosen_rows("random", (0, 1, 2, 3)).computed, chosen_rows("random", (3, 1)).computed
    assert pair.keys() == batch.keys()
    assert all(torch.equal(keep, batch[step][[3, 1]]) for step, keep in pair.items())
    lists = [tuple(keep[0, -2:].tolist()) for keep in batch.values()]
    assert len(set(lists)) > len(lists) / 2


def shares(steps, **changes):
    return computed_ratios(LazyMARSettings(**changes), steps)


def test_the_published_shares_are_the_authors_table_by_ar_step():
    assert shares(64) == TABLE and shares(32) == TABLE[:32]
    assert shares(70) == TABLE + [0.05] * 6, "behind its end the last share"
    assert shares(16) == [1.0] * 16, "it leaves nothing out in the first 20 AR steps"


@pytest.mark.parametrize("steps", [12, 32, 64, 100])
@pytest.mark.parametrize("lowest", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("schedule", ["published", "stretched", "constant"])
def test_the_shares_of_every_schedule(schedule, lowest, steps):
    found = shares(steps, ratio_schedule=schedule, computed_ratio=lowest)
    assert found == [share_of(k, steps, schedule, lowest) for k in range(steps)]
    assert all(lowest <= share <= 1 for share in found)


def drive(model, make, base, calls, reach=1, drawn=None):
    """Asks the look that ``make`` makes of a canvas at some AR steps only; tokens are random numbers. Gives the look
    and every call's conditions.
    """
    changed = dataclasses.replace(base, diffusion_steps=1)
    g = torch.Generator().manual_seed(3)
    c = model.net.config
    edit = None
    if drawn is not None:
        edit = Edit(torch.randn(1, c.channels, c.grid, c.grid, generator=g), drawn)
    canvas = mar_canvas("mar", model, LABELS, changed, NOISE, edit)
    look = make(canvas)
    made = torch.randn(len(LABELS), c.tokens, c.channels, generator=g)
    out = []
    with torch.no_grad():
        for step in calls:
            known = canvas.order.decided_before(step)[..., None].expand(-1, -1, c.channels)
            canvas.values = canvas.values.scatter(1, known, made.gather(1, known)) if edit is None else made
            out.append(look(step, canvas.order.positions_from(step, reach)))
    return look, out


def cached(settings):
    """LazyMAR's transformer of a canvas."""
    return partial(LazyTransformer, settings=settings)


SELECTIONS = knobs(CacheSettings)["selection"][1].choices
caches = st.fixed_dictionaries(
    {
        "refresh_period": st.integers(2, 8),
        "start_step": st.integers(0, 5),
        "computed_ratio": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "ratio_schedule": st.sampled_from(["stretched", "constant"]),
        "selection": st.sampled_from(SELECTIONS),
        "condition_cache": st.booleans(),
        "encoder_cache": st.booleans(),
        "token_cache": st.booleans(),
    }
)


@pytest.mark.parametrize("off", [subset for n in range(4) for subset in combinations(CACHES, n)], ids=str)
@settings(max_examples=5)
@given(
    st.integers(1, 20),
    st.integers(0, 9),
    st.sets(st.integers(0, 15), min_size=1),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from(SELECTIONS),
)
@pytest.mark.fast_cases(1)
def test_any_calls_equal_the_slow_reference(deep, off, period, start, calls, reach, block, selection):
    """Whichever caches are switched off and AR steps skipped; what is wanted or new is always computed."""
    period = {"refresh_period": period, "start_step": start}
    changed = {**period, **STRETCHED, "selection": selection}
    base, calls = LazyMARSettings(steps=16, cfg=2.0, **changed, **dict.fromkeys(off, False)), sorted(calls)
    with patch.object(transformer_module, "measuring_block", lambda depth: block):
        fast, got = drive(deep, partial(Watched, settings=base), base, calls, reach)
    slowly = partial(SlowLazy, settings=base, block=block - 1, spare=1, follow=fast.computed)
    slow, want = drive(deep, slowly, base, calls, reach)
    assert set(slow.refreshed) <= set(fast.refreshed)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


ONE = {"steps": 6, "diffusion_steps": 2, "cfg": 1.0, "refresh_period": 20, "start_step": 1, **STRETCHED}


def one(model, block=None, **changes):
    """``block``: the one that measures, in the place of the usual one."""
    chosen = measuring_block if block is None else lambda depth: block
    with patch.object(transformer_module, "measuring_block", chosen):
        return _one(model, changes)


def _one(model, changes):
    return finish(lazymar(model, from_ids((1,)), LazyMARSettings(**{**ONE, **changes}), PairedNoise(5, (0,))))


def test_spare_rows_by_hand():
    """15 of 320, as in the published code; 3.75 of 80, rounded to 4; one at least."""
    assert {rows: spare_rows(rows) for rows in (320, 80, 70, 4)} == {320: 15, 80: 4, 70: 3, 4: 1}


def test_the_fourth_block_of_the_official_decoders():
    """MAR-B, -L and -H have 12, 16 and 20."""
    assert [measuring_block(depth) for depth in (12, 16, 20)] == [4, 4, 4]
    assert [measuring_block(depth) for depth in (1, 3, 4, 8, 11)] == [1, 1, 2, 3, 3]


def test_rows_that_did_not_change_are_left_out_from_the_last_position_on():
    """Their cosines differ from 1 by rounding only, which must
    not order them: they are ties, and the lower row comes first.

    Without attention between the rows, decoder rows change only where the decoder's input does: at tokens decided since
    the last call, which are computed anyway, and at the 2 class rows.
    """
    model = tiny_mar(3, decoder_depth=4)
    net = copy.deepcopy(model.net)
    for block in net.decoder_blocks:
        block.attn.proj.weight.zero_()
    settings = {"order": "raster", "steps": 16, "start_step": 10, "refresh_period": 6, "computed_ratio": 0.5}
    report = one(dataclasses.replace(model, net=net), **settings).report
    # AR step s decides position s. Steps 0 to 10 compute all 18 rows, steps 11 to 15 half of them: the token decided
    # now, the one decided last, the 2 class rows, and 5 further ones, positions 0 to 4. The others come from the cache.
    cached = torch.zeros(16, dtype=torch.int32)
    for s in range(11, 16):
        left_out = torch.ones(16, dtype=torch.int32)
        left_out[[s, s - 1, 0, 1, 2, 3, 4]] = 0
        cached += left_out
    assert report.maps["cached"].flatten().tolist() == cached.tolist()


def test_only_blocks_before_the_last_leave_rows_out():
    model = tiny_mar(3, decoder_depth=4)
    assert [one(model, block=b).report.counts["cached_tokens"] > 0 for b in (1, 2, 3, 4)] == [True, True, True, False]


@FEW
@given(caches, st.sampled_from([1.0, 2.0]), st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_nothing_is_read_before_it_was_written(deep, cache, cfg, steps, reach, edited):
    """Memory that torch hands out is filled with NaN; none of it may reach a result."""
    base = LazyMARSettings(steps=steps, cfg=cfg, **cache)
    drawn = torch.ones(1, 5, 5)
    drawn[0, :2] = 0
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        _, out = drive(deep, cached(base), base, range(steps), reach, drawn if edited else None)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.isfinite(z).all() and len(z) == 1 + (cfg != 1) for z in out)


def test_rows_of_negative_similarity_cannot_push_out_what_must_be_computed(deep, monkeypatch):
    """The published code gives mandatory rows the score 0, which loses against negative cosines."""
    monkeypatch.setattr(transformer_module, "similarity", lambda values, last: torch.full(values.shape[::2][:2], -0.9))
    base = LazyMARSettings(**BASE, **QUICK)

    def sparing(canvas):
        look = Watched(canvas, base)
        look.row_selection.spare = 0
        return look

    look, _ = drive(deep, sparing, base, range(10))
    assert look.computed
    for step, keep, must in look.chosen:
        # The wanted tokens, and those decided by the AR step before.
        expected = (look.canvas.order.positions_from(step - 1, 2) + 3).repeat(len(must) // 2, 1)
        assert torch.equal(must.sort(1).values, expected.sort(1).values)
        assert keep is None or (keep[:, :, None] == must[:, None]).any(1).all()


def test_forgetting_computes_everything_anew(deep):
    base = LazyMARSettings(**BASE, refresh_period=50, start_step=0)
    look, _ = drive(deep, partial(Watched, settings=base), base, range(4))
    canvas = look.canvas
    canvas.values = canvas.values + 1  # decided anew
    wanted = canvas.order.positions_from(4)
    with torch.no_grad():
        look.discard_features()
        z, full = look(4, wanted), look.full(4, wanted)
        torch.testing.assert_close(z, full, rtol=1e-5, atol=1e-5)
        look(5, canvas.order.positions_from(5))
    assert look.refreshed == [0, 4]


def test_only_the_least_is_stored_and_none_of_it_is_a_view(deep):
    for cfg, cache, live in ((2.0, {}, 2), (1.0, {}, 2), (2.0, {"condition_cache": False}, 4)):
        base = LazyMARSettings(**{**BASE, "cfg": cfg, **QUICK}, **cache)
        look, _ = drive(deep, cached(base), base, range(6))
        canvas, cache, c = look.canvas, look.cache, deep.net.config
        tensors = cache.tensors
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() and t.is_contiguous() for t in tensors)
        rows = c.buffer + c.tokens
        # Keys and values behind the chosen block, its values, the
        # canvas; the encoder holds tokens until the next refresh.
        encoded = c.buffer + canvas.order.count_before[8]
        numbers = live * c.dim * (rows * (2 * 3 + 1 + 1) + 2 * c.encoder_depth * encoded)
        numbers += 2 * c.tokens * c.dim if cache.condition is not None else 0
        assert 4 * numbers == canvas.report.counts["cache_bytes"]


@pytest.mark.parametrize("encoder_cache", [True, False])
def test_computed_rows_are_counted_block_by_block(encoder_cache):
    """A refresh and two calls after it, at which only what must be is computed, and 15 of 320 rows: 3 of 64."""
    model = tiny_mar(2, tokens=49, decoder_depth=5, buffer=15)
    cache = {"refresh_period": 9, "start_step": 7, "computed_ratio": 0.0, "encoder_cache": encoder_cache}
    base = LazyMARSettings(**BASE, **cache, **STRETCHED)
    look, _ = drive(model, cached(base), base, (7, 8, 9))
    canvas = look.canvas
    count_before, sizes = canvas.order.count_before, canvas.order.sizes
    rows = 2 * 2 * (15 + count_before[7] + 64)  # both branches
    for step in (8, 9):
        rows += 2 * (15 + (sizes[step - 1] if encoder_cache else count_before[step]))
        # Two of five blocks compute all rows, three those that are wanted or new, and 3 more.
        rows += round(2 * (2 * 64 + 3 * (sizes[step] + sizes[step - 1] + 3)) / 5)
    assert canvas.report.counts["transformer_tokens"] == rows


def sampled(net, batch, period=1):
    """Sampled with LazyMAR's head and a period of so many diffusion steps; 1: by MAR's."""
    report = Report("mar", "tiny", {}, None, len(batch.x), "cpu")
    if period == 1:
        return HeadSampler(net, net.head, report, BUDGET).sample(batch)
    heads = CachedHeadSampler(net, report, CacheSettings())
    heads._schedules[len(batch.table)] = head_schedule(len(batch.table), period, batch.x.device)
    return heads.sample(batch)


def table_of(net, made):
    return diffusion_steps.step_table(made.without_last_noise, net.head.time_embed(made.timestep_map.flip(0)))


@pytest.mark.parametrize(
    ("depth", "steps", "period", "guided"),
    [(6, 20, 7, True), (6, 24, 5, False), (3, 50, 7, True), (1, 12, 4, True), (2, 5, 7, True)],
)
@pytest.mark.fast_cases(2)
def test_the_head_cache_equals_the_slow_reference(depth, steps, period, guided):
    model = tiny_mar(4, head_depth=depth)
    table = respacing(steps, 950)
    g = torch.Generator().manual_seed(1)
    n, c = 3, model.net.config
    z = torch.randn(1 + guided, n, c.dim, generator=g)
    scale, first = torch.tensor([[1.5], [2.0], [3.0]]), torch.randn(n, c.channels, generator=g)
    noise = torch.randn(len(table), n, c.channels, generator=g)
    times = table.timestep_map.tolist()
    with torch.no_grad():
        tokens = chain.DiffusionBatch(z, scale, first, noise, table_of(model.net, table), 0.9)
        got, full = sampled(model.net, tokens, period), sampled(model.net, tokens)
        rows = [
            slow_head(model.net, list(z[:, i]), float(scale[i]), first[i], noise[:, i], times, period, 0.9)
            for i in range(n)
        ]
    want = torch.stack(rows)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (full - got).abs().max() > 1e-3, "the cache must matter for this to say anything"


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.fast_cases("2.0")
def test_every_step_of_a_cached_head_may_be_compiled(deep, monkeypatch, cfg):
    """Else a report would say "speed: compile" of a head that ran plain."""
    calls = []
    own = {evaluate_full: "full", evaluate_cached: "cached"}

    def compiled(self, function, part):
        if function not in own:
            return function
        return lambda *args: calls.append(own[function]) or function(*args)

    monkeypatch.setattr(Recordable, "compiled", compiled)
    counts = lazy(deep, {**BASE, "diffusion_steps": 25, "cfg": cfg}).report.counts
    assert len(calls) == counts["head_calls"]
    # 25 steps are 24 up to t = 950; those with 23, 22, 20, 18, ... steps left are in full.
    assert calls[:5] == ["full", "full", "cached", "full", "cached"]


def test_when_the_head_is_cached(model):
    """A period of 7 of 100 steps is less than one of 6, and 2 of 20; none without caches between AR steps."""

    def period(steps, **changes):
        return head_period(CacheSettings(**changes), steps)

    assert (period(6), period(20), period(43), period(100)) == (1, 2, 4, 7)
    assert period(30, refresh_period=1) == period(30, head_cache=False) == 1


def test_drafts_pull_a_cached_head_too(model):
    """With a single diffusion step there is nothing to reuse; with more, the draft's weight of 1
    still gives the draft.
    """
    table, g = respacing(30, 950), torch.Generator().manual_seed(1)
    z, (first, draft) = torch.randn(2, 2, 16, generator=g), torch.randn(2, 2, 4, generator=g)
    noise = torch.randn(len(table), 2, 4, generator=g)
    weights = torch.tensor([0.0] * (len(table) - 1) + [1.0])
    pull = chain.MeanAdjustment(draft, weights)
    with torch.no_grad():
        made = table_of(model.net, table)
        tokens = chain.DiffusionBatch(z, torch.full((2, 1), 2.0), first, noise, made, mean_adjustment=pull)
        out = sampled(model.net, tokens, 3)
        free = sampled(model.net, dataclasses.replace(tokens, mean_adjustment=None), 3)
    torch.testing.assert_close(out, draft, rtol=1e-4, atol=1e-4)
    assert (out - free).abs().max() > 0.1


def test_reused_head_steps_compute_one_branch(deep):
    steps = len(respacing(25, 950))
    report = lazy(deep, {**BASE, "diffusion_steps": 25}).report
    full = len([i for i in range(steps) if i == steps - 1 or i % 2 == 0])  # 7 of 100
    assert report.counts["head_calls"] == 10 * steps
    assert report.counts["head_rows"] == 2 * 25 * (2 * full + steps - full)


def test_rows_are_skipped_where_a_later_call_may():
    """The token cache is kept if a call between this refresh and the next computes a share of the rows."""
    leaves_out_rows = [False, False, True, False, False, True, False]
    wanted = {(0, 2): False, (0, 3): True, (2, 5): False, (3, 5): False, (4, 6): True, (5, 7): False}
    for (step, until), skipped in wanted.items():
        made = CacheSettings(refresh_period=until - step, start_step=step)
        found = caches_to_fill(made, range(3, 10), leaves_out_rows, guided=True)[step]
        assert found is not None and (found.next_refresh, found.token_cache) == (until, skipped), (step, until)
