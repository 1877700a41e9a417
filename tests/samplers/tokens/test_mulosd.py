"""MuLo-SD against an uncached reference, its two exact limits, and what its reports count."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import test_token_contract as contract
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.maps import token_map
from fastar_nodes.reports.record import ACCEPTED, EXPANDED, REJECTED
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.mulosd import islands as geometry
from fastar_nodes.samplers.tokens.mulosd import mulosd, verification
from fastar_nodes.samplers.tokens.mulosd.drafting import PixelUpSampling, draft_schedule
from fastar_nodes.samplers.tokens.mulosd.settings import ONE_BY_ONE, SUFFIX, MuLoSDSettings
from fastar_nodes.samplers.tokens.sampling import TokenDraw
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from fastar_nodes.samplers.tokens.zipar import ZipARSettings, zipar, zipar_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from islands_reference import plain_expansion, plain_islands, plain_waves
from test_token_contract import FEW
from test_token_contract import LARGE as TARGETS
from test_token_contract import SMALL as DRAFTS
from tiny_tokens import CODES, UP, VQ, other_vocabulary, tiny_vq
from token_numbers import gumbel_of
from tokens_reference import (
    KINDS,
    History,
    condition_of,
    entropy_factor,
    pick,
    prefix_rows,
    reference_codes,
    tiny_gpt,
    visible,
)

ALL = {"top_k": 0, "top_p": 1.0}
BY_ENTROPY = {"entropy_temperature": 1.0, "tau": 0.2}
GRID = 6


class DraftNoise(TokenNoise):
    """Draws of the draft model: all from its own stream."""

    def __init__(self, draws):
        self.draws = draws
        self.seed = draws.seed

    def __len__(self):
        return len(self.draws)

    def stream(self, name, values, device):
        return self.draws.stream("draft", values, device)


# One kind of condition in every run of the tests, all of them in `make test-all`.
SOME_KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "class")) for kind in KINDS]
CASES = [name for name in contract.CASES if name.startswith("mulosd") and "exact" not in name]


def start(kind="class", images=(0, 1, 2), seed=5, small=3, up=UP, **changes):
    _, target, chosen, draft = contract.scaled(kind, small, **changes)
    return mulosd(target, condition_of(kind, images), chosen, TokenNoise(seed, images), draft=draft, up_sampler=up)


def run(*args, **changes):
    return finish(start(*args, **changes))


def serial_run(kind="class", images=(0, 1, 2), seed=5, **changes):
    chosen = LlamaGenSettings(**{**FEW, **changes})
    return finish(llamagen(TARGETS[kind], condition_of(kind, images), chosen, TokenNoise(seed, images)))


def serial(*args, **changes):
    return serial_run(*args, **changes).latents


@torch.no_grad()
def plain_repair(model, condition, chosen, draws, drafts, above=None) -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows of B images whose drafts int64 [B, n] are verified and repaired without a cache, cell by cell.

    ``above``: what is final before them, int64 [B, first]; None for nothing.

    Returns:
        codes [B, n], and of every image how many drafts are rejected and how many waves there are.
    """
    net, grid = model.net, model.grid
    above = drafts[:, :0] if above is None else above
    first, last = above.shape[1], above.shape[1] + drafts.shape[1]
    table = verification.nearest_codes(VQ.net.quantize.unit(), chosen.neighbours_among(CODES))
    gumbel = gumbel_of(draws, "token", torch.arange(model.tokens), CODES)
    out, rejections, lengths = [], [], []
    for image in range(len(condition)):
        halves = [History(model, prefix_rows(net, condition, image, null)) for null in (False, True)]
        tokens, known = torch.cat([above[image], drafts[image]]).tolist(), {}

        def mixed(logits, cell):
            cond, null = logits
            guided = chosen.cfg_interval is None or cell - 1 <= chosen.cfg_interval
            return null + chosen.cfg * (cond - null) if guided else cond

        def feed(cells, tokens=tokens, halves=halves):
            rows = [{c: h.feed(net.tok_embeddings.weight[tokens[c]], c, c) for c in cells} for h in halves]
            for h, fed in zip(halves, rows, strict=True):
                for c, row in fed.items():
                    h.attend(row, c)
            return [{c: h.logits(row) for c, row in fed.items()} for h, fed in zip(halves, rows, strict=True)]

        after = feed(range(last - 1))
        for cell in range(first, last):
            pair = [h.logits(h.n - 1) if not cell else fed[cell - 1] for h, fed in zip(halves, after, strict=True)]
            known[cell] = mixed(pair, cell)
        down = np.zeros(((last - first) // grid, grid), bool)
        for cell, logits in known.items():
            scaled = logits / chosen.temperature
            if chosen.top_k:
                scaled = scaled.masked_fill(scaled < scaled.topk(chosen.top_k).values[-1], -torch.inf)
            order = scaled.softmax(-1).sort(descending=True)
            beyond = order.values.cumsum(-1) - order.values > chosen.top_p
            scaled = scaled.index_fill(0, order.indices[beyond], -torch.inf)
            factor = entropy_factor(logits[scaled.isfinite()].tolist(), chosen.entropy_temperature)
            p = (scaled / factor).softmax(-1)
            down.flat[cell - first] = float(p[table[tokens[cell]].long()].sum()) < chosen.tau
        cells = {first + c for c in plain_expansion(down, chosen.expansion)} if down.any() else set()
        islands, window = plain_islands(cells, grid), chosen.resample_window or None
        if chosen.resample_order == ONE_BY_ONE:
            waves = [[c] for c in sorted(cells)]
        else:
            waves = plain_waves(islands, grid, window)
        for k, wave in enumerate(waves):
            if k:
                fed = sorted({*(c - 1 for c in wave), *(c for c in waves[k - 1] if c < last - 1)})
                after = feed(fed)
                for c in wave:
                    known[c] = mixed([rows[c - 1] for rows in after], c)
            new = {c: pick(known[c], chosen, gumbel[image, c]) for c in wave}
            for c, token in new.items():
                tokens[c] = token
        out.append(tokens[first:])
        rejections.append(int(down.sum()))
        lengths.append(len(waves))
    return torch.tensor(out), rejections, lengths


@torch.no_grad()
def plain_loop(kind, chosen, draws, small=3) -> tuple[torch.Tensor, int, list[int]]:
    """The paper's loop until |x| = N, as its text says it: draft whole rows with M_q, enlarge, verify, expand, resample
    the islands, append to x, reduce to y = D_r(x), and draft on. The draft in raster order, every token from a whole
    uncached pass.

    Returns:
        codes [B, N], how many drafts are rejected, and the waves of every cycle.
    """
    target, draft, condition = TARGETS[kind], DRAFTS[kind, small], condition_of(kind)
    ratio, images = GRID // small, len(condition)
    rows = min(chosen.draft_rows or small, small)
    gumbel = gumbel_of(draws, "draft", torch.arange(small * small), CODES)
    interval = None if chosen.cfg_interval is None else chosen.cfg_interval // ratio**2

    def square(codes, side):
        """The first rows of an image and, below, the last of them again and again."""
        grid = codes.view(images, -1, side)
        while grid.shape[1] < side:
            grid = torch.cat([grid, grid[:, -1:]], dim=1)
        return grid

    x = torch.zeros(images, 0, dtype=torch.int64)
    y = x
    rejected, waves = 0, []
    while x.shape[1] < GRID**2:
        done = y.shape[1] // small
        more = min(rows, small - done)

        # 1. Whole rows of the draft.
        for cell in range(done * small, (done + more) * small):
            drawn = []
            for image in range(images):
                of_draft = SimpleNamespace(model=draft, grid=(small, small))
                cond, null = uncached(of_draft, condition, image, y[image])[:, -1]
                guided = interval is None or cell - 1 <= interval
                logits = null + chosen.cfg * (cond - null) if guided else cond
                drawn.append(pick(logits, chosen, gumbel[image, cell]))
            y = torch.cat([y, torch.tensor(drawn)[:, None]], dim=1)

        # 2. U_r.
        enlarged = UP.up(square(y, small), ratio)[:, done * ratio : (done + more) * ratio].flatten(1)

        # 3. to 5. Verify, expand, resample.
        block, down, lengths = plain_repair(target, condition, chosen, draws, enlarged, x)
        rejected += sum(down)
        waves.append(max(lengths))

        # 6. Append and reduce; rows that were reduced before stay.
        x = torch.cat([x, block], dim=1)
        reduced = UP.down(square(x, GRID), ratio)[:, done : done + more].flatten(1)
        y = torch.cat([y[:, : done * small], reduced], dim=1)
    return x, rejected, waves


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (1, {}),
        (0, {"expansion": 0, "tau": 0.05}),
        (2, {"resample_window": 0, "expansion": 0}),
        (2, {"resample_order": ONE_BY_ONE}),
        (1, {**ALL, "cfg_interval": 12, "tau": 0.15}),
        (1, BY_ENTROPY),
    ],
    ids=str,
)
@pytest.mark.fast_cases("change0-class", "1-change0-class")
def test_the_loop_equals_the_papers_text(kind, rows, change):
    draws = TokenNoise(5, (0, 1, 2))
    chosen = {"tau": 0.2, "resample_window": 2, "draft_window": 0, "draft_rows": rows, **change}
    result = run(kind, **chosen)
    slow, rejected, waves = plain_loop(kind, MuLoSDSettings(**{**FEW, **chosen}), draws)
    counts = result.report.counts
    assert counts["rejected"] == rejected and counts["waves"] == sum(waves) and len(waves) == -(-3 // (rows or 3))
    assert 0 < rejected < slow.numel(), "the case shows something"
    assert torch.equal(result.latents.flatten(1), slow)


def uncached(canvas, condition, image: int, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [2, 1 + n, V] behind the prefix and n tokens, condition's first, of whole uncached passes."""
    halves = []
    for null in (False, True):
        net = canvas.model.net
        prefix = prefix_rows(net, condition, image, null)
        x = torch.cat([prefix, net.tok_embeddings.weight[tokens]])[None]
        place = torch.arange(-len(prefix), len(tokens))
        halves.append(net(x, place, net.positions(canvas.grid[0], len(prefix)))[0, len(prefix) - 1 :])
    return torch.stack(halves)


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize(
    ("small", "rows", "change"),
    [
        (3, 0, {"cfg_interval": 7}),
        (2, 0, {"expansion": 2, "cfg": 1.0}),
        (3, 1, {"expansion": 0}),
        (3, 1, {"cfg_interval": 7}),
        (3, 2, {"temperature": 0.0}),
        (3, 2, {"expansion": 2, "cfg": 1.0}),
        (2, 1, {"cfg_interval": 20}),
    ],
)
@pytest.mark.fast_cases("2-0-change1-class", "3-1-change2-class", "3-1-change3-class")
def test_tau_above_one_in_raster_order_is_serial_decoding(kind, small, rows, change):
    result = run(kind, small=small, draft_rows=rows, tau=1.01, resample_window=0, **change)
    assert torch.equal(result.latents, serial(kind, **{k: v for k, v in change.items() if k != "expansion"}))
    counts = result.report.counts
    if rows in (0, small):  # a whole image costs what serial decoding costs
        plain = {k: v for k, v in change.items() if k != "expansion"}
        assert counts == serial_run(kind, **plain).report.counts and not result.report.maps["islands"].any()
        assert (result.report.maps["waves"] == -1).all() and result.report.settings["tau"] == 1.01
        return
    assert counts["rejected"] == 3 * GRID**2 and not counts["accepted"] and not counts["expanded"]
    assert counts["transformer_passes"] - counts["draft_passes"] == GRID**2  # the verification stands for the first


@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("small", [3, 2])
@pytest.mark.fast_cases("3-class")
def test_at_tau_zero_the_enlarged_draft_is_kept_after_one_pass(kind, small):
    result = run(kind, small=small, tau=0.0, draft_window=1)
    draft = DRAFTS[kind, small]
    own = DraftNoise(TokenNoise(5, (0, 1, 2)))
    drawn = finish(zipar(draft, condition_of(kind), ZipARSettings(**FEW, window=1), own)).latents
    slow = reference_codes(draft, condition_of(kind), ZipARSettings(**FEW), own, zipar_schedule(small, 1).passes)
    assert torch.equal(drawn, slow) and torch.equal(result.latents, UP.up(drawn, GRID // small))
    counts = result.report.counts
    assert counts["transformer_passes"] - 1 == counts["draft_passes"] == len(zipar_schedule(small, 1).passes)
    assert counts["accepted"] == 3 * GRID**2
    assert not any(counts[name] for name in ("rejected", "expanded", "islands", "waves"))


@pytest.mark.parametrize(
    ("rate", "rows", "kept"),
    [
        (0.7, 1, 25),  # of 12, 24 and 36 cells 8, 17 and 25
        (0.7, 2, 25),
        (0.55, 1, 20),  # of 12, 24 and 36 cells 7, 13 and 20
        (0.04, 1, 1),  # of 12 cells none, of 24 one
    ],
)
@pytest.mark.fast_cases("0.7-1-25", "0.04-1-1")
def test_the_share_to_accept_holds_for_the_blocks_so_far(rate, rows, kept):
    counts = run(draft_rows=rows, acceptance_target=rate, **ALL).report.counts
    assert counts["accepted"] == 3 * kept and counts["rejected"] == 3 * (GRID**2 - kept)


def test_the_share_of_a_block_counts_the_tokens_before_it():
    pool = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]])
    for before, kept in ((0, 2), (1, 3), (2, 3), (3, 2), (5, 3)):
        # round(0.5 (before + 5)) - round(0.5 before), where halves are rounded to even numbers.
        assert (~verification.reject_all_but_share(pool, 0.5, pool, tokens_before=before)).sum() == kept, before


def test_tau_and_neighbours_move_acceptance_as_said():
    assert run(neighbours=8).report.acceptance > run(neighbours=0).report.acceptance
    for rate in (0.25, 0.75):
        down = run(acceptance_target=rate, top_k=0, top_p=1.0).report.counts["rejected"]
        assert down == 3 * (GRID**2 - round(rate * GRID**2)), "every image alone, whatever tau"


@pytest.mark.parametrize(("small", "interval", "own"), [(3, 8, 2), (3, 7, 1), (3, 0, 0), (2, 13, 1), (3, None, None)])
@pytest.mark.fast_cases(2)
def test_guidance_ends_at_the_same_part_of_the_draft(small, interval, own):
    """A cfg_interval of 8 tokens is one of 8 / 4 on a grid of half the side, and of 13 / 9 on one of a third."""
    draws, chosen = DraftNoise(TokenNoise(5, (0, 1, 2))), LlamaGenSettings(**FEW | {"cfg": 6.0}, cfg_interval=own)
    drawn = finish(llamagen(DRAFTS["class", small], condition_of("class"), chosen, draws)).latents
    result = run(small=small, tau=0.0, draft_window=0, cfg_interval=interval, cfg=6.0)
    assert torch.equal(result.latents, UP.up(drawn, GRID // small))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cases("mulosd", "mulosd, rows in windows")
def test_a_draft_in_windows_is_the_draft(case):
    window = (2, 3, 20)[CASES.index(case) % 3]
    serially, parallel = (finish(contract.start(case, draft_parallel=n)) for n in (0, window))
    assert torch.equal(parallel.latents, serially.latents)
    assert parallel.report.counts["draft_passes"] <= serially.report.counts["draft_passes"]
    for name, values in serially.report.maps.items():
        assert name == "step" or np.array_equal(parallel.report.maps[name], values)


def test_padding_needs_no_position_of_its_own():
    """A table of additive positions ends before the last cell, which no sequence feeds but the padding of a batch."""
    target, what, draws = TARGETS["features"], condition_of("features"), TokenNoise(5, (0, 1, 2))
    chosen = MuLoSDSettings(**FEW, tau=0.1, expansion=0, resample_window=1)
    more = {"draft": DRAFTS["features", 3], "up_sampler": UP}
    wanted = finish(mulosd(target, what, chosen, draws, **more))
    assert len({int((waves >= 0).sum()) for waves in wanted.report.maps["waves"]}) > 1, "images differ"

    rows = len(what.features[0]) + GRID**2 - 1
    net = copy.deepcopy(target.net)
    net.abs_pe = torch.nn.Parameter(net.abs_pe[:, :rows].clone(), requires_grad=False)
    net.config = replace(net.config, absolute=rows)
    found = finish(mulosd(replace(target, net=net), what, chosen, draws, **more))
    assert torch.equal(found.latents, wanted.latents)


@pytest.mark.parametrize("kind", ["features", "class"])
def test_islands_are_numbered_from_block_to_block_in_every_image(kind):
    """Those of an image alone, whatever the others of its batch have; images of a batch differ in their islands."""
    result = run(kind, draft_rows=1, expansion=0, tau=0.1)
    maps = result.report.maps
    most = []
    for outcome, found in zip(maps["outcome"], maps["islands"], strict=True):
        wanted, count = np.zeros((GRID, GRID), int), 0
        for top in range(0, GRID, 2):
            again = np.flatnonzero(outcome[top : top + 2] != ACCEPTED)
            for island in plain_islands(set(again.tolist()), GRID):
                count += 1
                wanted[top : top + 2].flat[island] = count
        most.append(count)
        assert np.array_equal(found, wanted)
    assert len(set(most)) > 1 and result.report.counts["islands"] == sum(most)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cases("mulosd", "mulosd, rows in windows")
def test_report_adds_up(case):
    _, _, chosen, draft = contract.CASES[case]
    report = contract.whole(case)[1].report
    counts, maps = report.counts, report.maps
    cells = 3 * GRID**2
    assert counts["accepted"] + counts["rejected"] == cells and len(report.similarity) == cells
    outcome = maps["outcome"]
    found = [int((outcome == kind).sum()) for kind in (ACCEPTED, REJECTED, EXPANDED)]
    assert found == [counts["accepted"] - counts["expanded"], counts["rejected"], counts["expanded"]]
    again = outcome != ACCEPTED
    assert np.array_equal(maps["islands"] > 0, again) and np.array_equal(maps["waves"] >= 0, again)
    assert counts["islands"] == sum(int(m.max()) for m in maps["islands"])
    cycles = -(-draft.grid // (chosen.draft_rows or draft.grid))
    target = counts["transformer_passes"] - counts["draft_passes"]
    # The first wave of a cycle costs no pass of its own.
    assert max(cycles, counts["waves"]) <= target <= cycles + counts["waves"]
    if cycles == 1:
        assert target == 1 + max(0, counts["waves"] - 1)
        assert np.array_equal(maps["step"], counts["draft_passes"] + np.maximum(maps["waves"], 0))
    for what in ("islands", "waves", "expanded", "rejected", "outcome"):
        assert token_map(report, what, size=96).shape[0] == 3


@pytest.mark.parametrize(("images", "last"), [((0, 1, 2), 36), ((1,), 35)])
def test_the_caches_hold_both_grids(images, last):
    """256 bytes a row (2 blocks, keys and values, 2 heads of 8 numbers of 4 bytes), two branches, a condition row each.
    A draft in raster order never feeds its last cell; nor does the target, but for a batch's padding.
    """
    counts = run(images=images, draft_window=0).report.counts
    assert counts["cache_bytes"] == 256 * 2 * len(images) * (1 + last + 1 + 8)


def test_comparisons_draw_more_again():
    local, suffix, single = run(), run(repair=SUFFIX), run(resample_order=ONE_BY_ONE, resample_window=0)
    for image in range(3):
        down = local.report.maps["outcome"][image] == REJECTED
        again = suffix.report.maps["outcome"][image].ravel() != ACCEPTED
        assert np.array_equal(again, np.arange(GRID**2) >= np.flatnonzero(down)[0]) if down.any() else not again.any()
    assert np.array_equal(local.report.maps["islands"], single.report.maps["islands"])
    for wave, island in zip(single.report.maps["waves"], single.report.maps["islands"], strict=True):
        assert wave[island > 0].tolist() == list(range(int((island > 0).sum())))


@given(st.integers(1, 7), st.integers(0, 8), st.data())
def test_draft_schedules_decide_their_rows_once(grid, window, data):
    first = data.draw(st.integers(0, grid - 1))
    rows = data.draw(st.integers(1, grid - first))
    again = data.draw(st.integers(0, first))
    schedule = draft_schedule(grid, window, first, rows, again)
    cells = [c for p in schedule.passes for c in p.cells]
    assert sorted(cells) == list(range(first * grid, (first + rows) * grid))
    known = {*range(first * grid), *schedule.passes[0].cells}
    decided = len(known)
    for p, seen in zip(schedule.passes[1:], visible(schedule), strict=True):
        assert {row.cell for row in p.fed_rows} <= known and max(row.place for row in p.fed_rows) <= grid * grid - 2
        assert p.cfg_step == decided - 1
        for i, row in enumerate(p.fed_rows):
            assert set(range(min(first * grid, row.last_visible + 1))) <= set(seen[i].nonzero()[0].tolist())
        known |= set(p.cells)
        decided += len(p.cells)
    if first:
        positions = {row.position for row in schedule.passes[1].fed_rows}
        assert positions == {*range((first - again) * grid, first * grid), first * grid - 1}


@settings(max_examples=60)
@given(st.data())
def test_waves_feed_what_they_need_and_nothing_twice(data):
    rows, width, images = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    down = np.array(data.draw(st.lists(st.booleans(), min_size=images * rows * width, max_size=images * rows * width)))
    region = geometry.expand(down.reshape(images, rows, width), 1)
    window = data.draw(st.none() | st.integers(1, 3))
    wave = geometry.waves_of_islands(geometry.find_islands(region), window or width).reshape(images, -1)
    count = rows * width
    outcome = np.arange(1, wave.size + 1, dtype=np.uint8).reshape(wave.shape)  # a different one for each cell
    first, *later = geometry.waves_of_block(wave, outcome)
    drawn = [[c for c in row if c < count] for row in first.cells.tolist()]
    assert drawn == [np.flatnonzero(row == 0).tolist() for row in wave], "the first wave, in raster order"
    assert np.array_equal(first.predicted_by, np.where(first.cells < count, first.cells, 0)) and not first.fed.size
    for step in (first, *later):
        for image, row in enumerate(step.cells.tolist()):
            assert step.outcome[image].tolist() == [outcome[image, c] if c < count else 0 for c in row]
    for k, step in enumerate(later, 1):
        for image in range(images):
            cells = [c for c in step.cells[image].tolist() if c < count]
            assert cells == sorted(np.flatnonzero(wave[image] == k)), "in raster order"
            fed = [c for c in step.fed[image].tolist() if c < count]
            before = [c for c in np.flatnonzero(wave[image] == k - 1) if c < count - 1]
            want = sorted({*before, *(c - 1 for c in cells)}) if cells else []
            assert fed == want and (not fed or 0 <= min(fed) and max(fed) < step.end)
            assert [fed[row] + 1 for row in step.predicted_by[image][: len(cells)]] == cells
            drawn[image] += cells
    for image in range(images):
        assert sorted(drawn[image]) == np.flatnonzero(wave[image] >= 0).tolist()
    (nothing,) = geometry.waves_of_block(np.full((2, 4), -1, np.int32), np.zeros((2, 4), np.uint8))
    assert nothing.cells.shape == nothing.outcome.shape == nothing.predicted_by.shape == (2, 0)


class Pixels:
    """A tokenizer of 4 x 4 pixels a code: a code's pixels are half of its number less 1, and what is encoded is
    recorded.
    """

    def __init__(self):
        weight = torch.zeros(1)
        self.config = SimpleNamespace(stride=4)
        self.quantize = SimpleNamespace(embedding=SimpleNamespace(weight=weight))
        self.quant_conv = SimpleNamespace(weight=weight)
        self.decoded, self.encoded = [], []

    def decode_codes(self, codes):
        self.decoded.append(len(codes))
        large = (codes / 2 - 1).repeat_interleave(4, 1).repeat_interleave(4, 2)
        return large[:, None].expand(-1, 3, -1, -1)

    def encode(self, images):
        self.encoded.append(images)
        return None, images[:, 0, ::4, ::4].round().long()


def pixels(enlarge=None) -> tuple[Pixels, PixelUpSampling]:
    vq = Pixels()
    return vq, PixelUpSampling(SimpleNamespace(net=vq, name="pixels"), enlarge, "model x")


# Pixels -1, -0.5, 0 and 1.5; an autoencoder sees -1 to 1.
FOUR = torch.tensor([[[0, 1], [2, 5]]])


def test_codes_are_decoded_enlarged_bicubically_and_encoded():
    vq, sampling = pixels()
    assert sampling.up(FOUR, 3).shape == (1, 6, 6)
    small = torch.tensor([[-1.0, -0.5], [0.0, 1.5]]).repeat_interleave(4, 0).repeat_interleave(4, 1)
    large = torch.nn.functional.interpolate(small[None, None], scale_factor=3, mode="bicubic", antialias=True)
    torch.testing.assert_close(vq.encoded[0], large.clamp(-1, 1).expand(-1, 3, -1, -1))


@pytest.mark.parametrize("times", [2, 4])
def test_a_model_enlarges_pixels_of_0_to_1(times):
    """Other sizes than the one that is asked for are brought to it."""
    seen = []

    def enlarge(x):
        seen.append(x)
        return x.repeat_interleave(times, 2).repeat_interleave(times, 3)

    vq, sampling = pixels(enlarge)
    assert sampling.up(FOUR, 2).shape == (1, 4, 4) and sampling.name == "model x"
    assert seen[0][0, :, ::4, ::4].tolist() == [[[0.0, 0.25], [0.5, 1.0]]] * 3
    assert vq.encoded[0].shape == (1, 3, 16, 16)
    # The middle of every code's 8 x 8 pixels, where nothing mixes.
    assert vq.encoded[0][0, 0, 3::8, 3::8].flatten().tolist() == pytest.approx([-1, -0.5, 0, 1], abs=1e-5)


@pytest.mark.parametrize("enlarge", [lambda x: x[:, :1], lambda x: x[0]])
def test_what_enlarges_to_no_rgb_pictures_is_refused(enlarge):
    with pytest.raises(UserError, match="^upscale_model: "):
        pixels(enlarge)[1].up(FOUR, 2)


def test_reduction_averages_areas():
    vq, sampling = pixels()
    codes = torch.tensor([[[0, 0, 1, 2], [0, 0, 1, 2]]])
    assert sampling.down(codes, 2).shape == (1, 1, 2)
    # An area of 2 x 2 pixels lies in one code.
    assert vq.encoded[0][0, 0, 0].tolist() == [-1.0] * 4 + [-0.5] * 2 + [0.0] * 2


def test_reduction_averages_codes_that_share_an_area():
    """Pixels of 8 x 8 that lie in four codes each; an average above 1 is not cut before it is one."""
    vq, sampling = pixels()
    for four in torch.tensor([[[0, 1], [2, 1]]]), FOUR:
        assert sampling.down(four.repeat(1, 4, 4), 8).shape == (1, 1, 1)
    averages = [(-1 - 0.5 + 0 - 0.5) / 4, (-1 - 0.5 + 0 + 1.5) / 4]
    assert [x[0, 0].tolist() for x in vq.encoded] == [[[average] * 4] * 4 for average in averages]


@pytest.mark.parametrize(("room", "images", "parts"), [(1152, 4, [2, 2]), (1152, 5, [2, 2, 1]), (1, 3, [1, 1, 1])])
def test_the_tokenizer_decodes_as_many_pictures_as_fit(monkeypatch, room, images, parts):
    """An image of 6 x 6 codes of 4 x 4 pixels, or one that is enlarged to it, takes 576 pixels."""
    monkeypatch.setattr("fastar_nodes.samplers.tokens.mulosd.drafting._PIXELS_AT_ONCE", room)
    vq, sampling = pixels()
    down = sampling.down(torch.arange(images * 36).view(images, 6, 6) % 3, 2)
    up = sampling.up(torch.arange(images * 9).view(images, 3, 3) % 3, 2)
    assert vq.decoded == parts * 2 and down.shape == (images, 3, 3) and up.shape == (images, 6, 6)
    assert [len(x) for x in vq.encoded] == parts * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"draft": other_vocabulary(DRAFTS["class", 3], 9)}, "draft: .* 9 codes"),
        ({"up_sampler": PixelUpSampling(tiny_vq(31))}, "decoder: .* 31 codes"),
        *(({"draft": tiny_gpt(grid=side)}, f"draft: .* {side} x {side} tokens") for side in (4, 6, 12)),
        ({"draft": tiny_gpt(grid=2, special=3)}, "model"),
        ({"target": tiny_gpt(grid=6, special=3)}, "model"),
        ({"draft": tiny_gpt("text", 3)}, "condition: .* text"),
        *(({"settings": MuLoSDSettings(neighbours=k)}, f"neighbours: with {k} ") for k in (22, 1000)),
        ({"noise": TokenNoise(1, (0,))}, "condition: .* 3 images"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(change, field):
    wired = {"target": TARGETS["class"], "condition": condition_of("class"), "settings": MuLoSDSettings()}
    wired |= {"noise": TokenNoise(1, (0, 1, 2)), "draft": DRAFTS["class", 3], "up_sampler": UP}
    with pytest.raises(UserError, match=f"^{field}"):
        next(mulosd(**wired | change))


def test_neighbours_keep_lanterns_share_of_the_codebook():
    assert MuLoSDSettings().neighbours_among(16384) == 1000 and MuLoSDSettings().neighbours_among(512) == 31
    assert MuLoSDSettings(neighbours=0).neighbours_among(512) == 0


def test_a_draft_in_progress_is_shown_enlarged_behind_what_is_final():
    """A row of the draft's 3 x 3 at a time: its n-th token covers 2 x 2 cells; rows above it are the target's, not
    their reduction.
    """
    shown = []
    for step in start(tau=0.6, draft_window=0, draft_rows=1, resample_window=MuLoSDSettings().resample_window):
        codes = step.latents  # read now: the sampler continues
        if step.report.counts["draft_passes"] > len(shown):
            shown.append(step)
    assert len(shown) == 9
    for n, step in enumerate(shown):
        top, right = n // 3 * 2, n % 3 * 2 + 2
        assert torch.equal(step.latents[:, :top], codes[:, :top]) and step.decided[:, :top].all()
        assert step.decided[:, top : top + 2, :right].all() and not step.decided[:, top:, right:].any()
        assert not step.decided[:, top + 2 :].any() and not step.latents[~step.decided].any()
        block = step.latents[:, top : top + 2]
        assert torch.equal(block[:, ::2, ::2].repeat_interleave(2, 1).repeat_interleave(2, 2), block)
    reduced = codes[:, :4:2, ::2].repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert not torch.equal(reduced, codes[:, :4]), "a reduction must differ for this to say anything"


def test_logits_are_computed_in_pieces_of_the_cells_that_are_promised(monkeypatch):
    """Of two cells of three guided images, in the verification as in waves of more: the image is the same."""
    settings = {"expansion": 0, "tau": 0.05, "resample_window": 1}
    whole = run(**settings)
    waves = whole.report.maps["waves"][whole.report.maps["islands"] > 0]
    assert np.bincount(waves).max() > 3 * 2, "a wave of an image has more than two cells"
    seen = {"logits": [], "tokens": []}

    def watch(name):
        function = getattr(TokenDraw, name)

        def watched(self, hidden, *more):
            if self.stream == "token":
                seen[name].append(hidden.shape[1])
            return function(self, hidden, *more)

        monkeypatch.setattr(TokenDraw, name, watched)

    monkeypatch.setattr(verification, "_LOGITS_AT_ONCE", 2 * 6 * CODES)
    for name in seen:
        watch(name)
    pieces = run(**settings)
    assert [max(counts) for counts in seen.values()] == [2, 2] and torch.equal(pieces.latents, whole.latents)
    assert pieces.report.counts == whole.report.counts


def test_rows_of_the_target_are_counted():
    """Its first pass reads the prefix and all cells but the last, for both branches of three images."""
    counts, plain = run(tau=0.0, draft_window=0).report.counts, LlamaGenSettings(**FEW)
    drafted = finish(llamagen(DRAFTS["class", 3], condition_of("class"), plain, TokenNoise(5, range(3))))
    assert counts["transformer_tokens"] == 6 * GRID**2 + drafted.report.counts["transformer_tokens"]


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("parallel", [0, 4])
def test_progress_counts_the_cells_when_they_are_drafted_and_when_they_are_final(rows, parallel):
    """Each of the draft's 3 x 3 cells is 4 of the target's 36; its 3 or 9 cells of a block are drafted one by one."""
    steps = list(start(images=(0,), draft_rows=rows, draft_window=0, draft_parallel=parallel, tau=0.3))
    done = [step.done for step in steps]
    assert done[0] == 4 and done[-1] == 2 * 36 and done == sorted(set(done))
    assert {step.total for step in steps} == {2 * 36}
    first_block = 12 * rows or 36
    assert parallel or done[: first_block // 4] == list(range(4, first_block + 1, 4))
    assert 2 * first_block in done, "the first block is final"


def test_a_target_without_rejections_ends_a_block_in_one_pass():
    steps = list(start(images=(0,), draft_rows=1, draft_window=0, tau=0.0))
    assert [step.done for step in steps] == [4, 8, 12, 24, 28, 32, 36, 48, 52, 56, 60, 72]
