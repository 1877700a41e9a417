"""MuLo-SD's tables, on tiny random checkpoints: passes of an image sampled alone, arguments of the samplers, shares of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from fastar_nodes.samplers.settings import make
from fastar_nodes.tools.ablations.mulosd import LlamaGenRepairBench, forwards_alone
from fastar_nodes.tools.ablations.tables import Ground, Row, to_markdown
from fastar_nodes.tools.lantern import find
from tiny_demo import new_folder, write_gpt

LOW, HIGH = "llamagen-low", "llamagen"
# Fast settings; the pool leaves a few percent of the tokens below 0.001.
QUICK = {"cfg": 1.0, "draft_window": 1, "resample_window": 1, "neighbours": 12}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = new_folder(tmp_path_factory)
    for name, grid, seed in ((LOW, 8, 2), (HIGH, 16, 3)):
        write_gpt(folder, name, grid, seed, cfg=1.5, top_k=0)
    return folder


@pytest.fixture(scope="module")
def bench(folder):
    return LlamaGenRepairBench(Ground(100, folder))


def row(sampler="mulosd", **settings):
    # LANTERN's drafts are unguided, so some are rejected.
    usual = {"mulosd": QUICK, "lantern": {"cfg": 3.0}}.get(sampler, {"cfg": 1.0})
    return Row("x", sampler, {**usual, **settings}, HIGH)


@pytest.mark.parametrize(
    "chosen",
    [
        row(tau=0.001),
        row(tau=0.01, expansion=0),
        row(tau=0.001, draft_rows=2),
        row(tau=0.001, draft_rows=3),
        row(tau=0.0),
        row("lantern", draft_length=3, delta=0.3, neighbours=6),
        row("lantern", draft_length=40, neighbours=8, delta=0.5, top_k=4),
        row("zipar", window=1),
        row("llamagen"),
    ],
    ids=lambda chosen: f"{chosen.sampler} {chosen.settings}",
)
def test_forwards_of_a_picture_are_what_it_takes_alone(bench, chosen):
    settings = make(find(chosen.sampler).settings, chosen.settings)
    _, together = bench.draw(chosen, settings, range(3))
    alone = [bench.draw(chosen, settings, range(i, i + 1))[1].counts["transformer_passes"] for i in range(3)]
    assert forwards_alone(together, settings, 8).tolist() == alone
    if chosen.sampler == "lantern" or 0 < chosen.settings.get("tau", 0):
        assert len(set(alone)) > 1, "nothing was told apart"


def test_a_line_says_what_was_kept_and_what_it_took(bench):
    result, rgb = bench.row(row(tau=0.001), {})
    counts, more = result.counts, result.more
    judged = counts["accepted"] + counts["rejected"]
    assert rgb.shape == (100, 64, 64, 3) and judged == 100 * 256 and 0 < counts["rejected"] < judged
    assert more["model"] == HIGH and more["again"] == (counts["rejected"] + counts["expanded"]) / judged
    # A row of eight, then the other rows, each one cell behind the row above.
    assert more["draft_forwards"] == counts["draft_passes"] == 8 + 6 + 8
    assert more["draft_forwards"] < more["forwards"] < counts["transformer_passes"]
    assert list(result.work) == ["accepted %", "drawn again %", "islands", "forwards", "of the draft", "s an image"]
    assert result.work["accepted %"] == f"{100 * counts['accepted'] / judged:.1f}"
    assert result.work["islands"] == f"{counts['islands'] / 100:.1f}"


def test_the_two_ends(bench):
    (plain, serial), (kept, draft), (redone, again) = (
        bench.row(chosen, {}) for chosen in (row("llamagen"), row(tau=0.0), row(tau=1.01, resample_window=0))
    )
    assert np.array_equal(serial, again) and redone.figures == plain.figures and not np.array_equal(serial, draft)
    # Where nothing can be accepted, nothing is drafted.
    assert [r.more["forwards"] for r in (plain, kept, redone)] == [256, 22 + 1, 256]
    assert [(r.acceptance, r.more["again"]) for r in (kept, redone)] == [(1.0, 0.0), (None, None)]
    assert plain.work["accepted %"] == plain.work["of the draft"] == ""
    table = to_markdown([plain, kept], {})
    assert [heading.strip() for heading in table.splitlines()[0].split("|")[6:-1]] == list(kept.work)


def test_lantern_drafts_with_the_target_itself(bench):
    done = bench.row(row("lantern", draft_length=4), {})[0]
    # Chains of four and their verification; the last chain is shorter.
    forwards = done.more["forwards"]
    assert forwards > 2 + 255 and done.more["draft_forwards"] == pytest.approx((forwards - 2) * 4 / 5 + 1, rel=0.02)
    assert done.more["again"] is None and 0 < done.acceptance < 1
