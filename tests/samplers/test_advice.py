"""The calibration on runs whose seconds and images are given, and the lines of the candidates."""

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports.quality import Quality
from fastar_nodes.reports.record import Report
from fastar_nodes.reports.sweep import Cell
from fastar_nodes.runs import advice as a
from fastar_nodes.runs.choice import choose
from fastar_nodes.runs.measured import AdviceSettings, Measured
from fastar_nodes.runs.registry import SAMPLERS
from stepping import stepped

PLAIN = choose("mar", {})
# Line to (seconds, error of every pixel, accepted of 10 drafts).
KNOWN = {
    "fasthybrid: preset=fast": (1.0, 60, 10),
    "fasthybrid: preset=balanced": (2.0, 4, 9),
    "lazymar: preset=balanced": (2.5, 0, None),
    "mar: speculation=8": (2.2, 90, None),
    "lazymar: preset=fast": (5.0, 0, None),
    "cspd: preset=fast": (None, 0, None),
}


class Bench:
    """Draws what is given, and counts the runs."""

    def __init__(self):
        self.runs: list[tuple[str, int]] = []

    def __call__(self, choice, seed):
        self.runs.append((choice.text, seed))
        seconds, error, accepted = KNOWN.get(choice.text, (4.0, 0, None))
        if seconds is None:
            raise UserError("steps: too many.")
        out = Report(choice.entry.name, "tiny", dict(choice.values), seed, 1, "cpu", seconds)
        if accepted is not None:
            out.add(accepted=accepted, rejected=10 - accepted)
        base = np.random.default_rng(seed).integers(0, 128, (1, 16, 16, 3))
        return (base + error).astype(np.uint8), out


def advise(seed=7, run=None, **settings):
    bench, tried = Bench(), [a.parse_choice(line, "sampler") for line in KNOWN]
    steps = a.calibrate(PLAIN, tried, run or bench, AdviceSettings(**settings), seed)
    seen, found = stepped(steps)
    return found, bench, seen


def ratios(measured):
    return [cell.report.speedup(cell.baseline).value for cell in measured.cells]


ANSWERS = {
    "the fastest within the limit": ({"measure": "PSNR", "least_psnr": 30.0}, "fasthybrid: preset=balanced"),
    "a stricter limit: a lossless method passes": ({"measure": "PSNR", "least_psnr": 60.0}, "mar: speculation=8"),
    "no limit": ({"measure": "PSNR", "least_psnr": 0.0}, "fasthybrid: preset=fast"),
    "identical": ({"measure": "identical"}, "lazymar: preset=balanced"),
    "same distribution": ({"measure": "same distribution"}, "mar: speculation=8"),
    "acceptance": ({"measure": "acceptance", "least_acceptance": 95.0}, "fasthybrid: preset=fast"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer(name):
    settings, expected = ANSWERS[name]
    found, _, _ = advise(**settings)
    assert found.best.text == expected and expected in found.sentence
    line = next(row for row in found.table.splitlines() if row.startswith(f"| {expected} "))
    assert line.rstrip(" |").endswith("yes")
    assert "cspd: preset=fast was not run: steps: too many." in found.table


def test_nothing_that_is_slower_is_advised(monkeypatch):
    monkeypatch.setitem(KNOWN, "lazymar: preset=balanced", (4.5, 0, None))
    found, _, _ = advise(measure="identical")
    assert found.best is PLAIN and found.sentence == (
        "No candidate with identical images is measurably faster than MAR: keep MAR."
    )


# Seconds of the candidate in the first round and in two repeats, beside 4 s of the plain sampler, and what the sentence
# holds.
SPREADS = {
    "faster in every repeat": ([2.0, 1.6, 2.5], "about 2.0 times as fast as MAR (1.60 to 2.50 in 2 repeats)."),
    "faster in one of two repeats": ([2.0, 5.0, 1.6], "is measurably faster than MAR: keep MAR"),
    "faster in the first round only": ([1.0, 4.4, 4.2], "is measurably faster than MAR: keep MAR"),
}


@pytest.mark.parametrize("name", SPREADS)
def test_a_difference_within_the_spread_is_none(name):
    seconds, answer = SPREADS[name]
    bench = Bench()

    def varying(choice, seed):
        images, report = bench(choice, seed)
        if choice is not PLAIN:
            report.seconds = seconds[seed - 7]
        return images, report

    tried = [a.parse_choice("lazymar: preset=balanced", "sampler")]
    _, found = stepped(a.calibrate(PLAIN, tried, varying, AdviceSettings(measure="identical"), 7))
    assert answer in found.sentence
    assert (found.best is PLAIN) == ("keep MAR" in answer)
    low, high = sorted(4 / s for s in seconds[1:])
    assert f"{low:.2f} to {high:.2f}" in found.table
    assert ("no measurable difference" in found.table) == (low <= 1 <= high)


@pytest.mark.parametrize(("slower", "is_rival"), [([2.0, 2.4, 1.9], True), ([2.0, 2.6, 2.7], False)])
def test_the_answer_names_those_that_may_be_as_fast(slower, is_rival):
    """Their repeats overlap with the winner's, 1.60 to 2.50: another calibration may answer otherwise."""
    bench, seconds = Bench(), {"lazymar: preset=balanced": [2.0, 1.6, 2.5], "lazymar: preset=fast": slower}

    def varying(choice, seed):
        images, report = bench(choice, seed)
        if choice is not PLAIN:
            report.seconds = seconds[choice.text][seed - 7]
        return images, report

    tried = [a.parse_choice(line, "sampler") for line in seconds]
    _, found = stepped(a.calibrate(PLAIN, tried, varying, AdviceSettings(measure="identical"), 7))
    assert found.best.text == "lazymar: preset=balanced"
    rival = (
        "Not measurably slower than the fastest sampler: lazymar: preset=fast, about 1.9 times as fast. More repeats "
        "may tell them apart."
    )
    assert found.sentence.endswith(rival) == is_rival and ("Not measurably" in found.sentence) == is_rival


def test_what_is_shown_has_the_figures_of_the_table():
    """Seconds 2, 2, 1.6 and 2.5 beside 4: the first round is none of the repeats. Images of the first repeat."""
    bench = Bench()

    def varying(choice, seed):
        images, report = bench(choice, seed)
        if choice is not PLAIN:
            report.seconds = {7: 2.0, 8: 2.0, 9: 1.6, 10: 2.5}[seed]
        return images, report

    tried = [a.parse_choice("fasthybrid: preset=balanced", "sampler")]
    settings = AdviceSettings(measure="PSNR", repeats=3)
    _, found = stepped(a.calibrate(PLAIN, tried, varying, settings, 7))
    plain, best = found.shown
    told = best.report.speedup(plain.report)
    assert (told.value, told.low, told.high, told.pairs) == (2.0, 1.6, 2.5, 3) and told.told
    assert "about 2.0 times as fast as MAR (1.60 to 2.50 in 3 repeats)" in found.sentence and told.text in found.table
    assert best.quality.psnr == pytest.approx(20 * np.log10(255 / 4)) and f"{best.quality.psnr:.1f} dB" in found.table

    base = np.random.default_rng(8).integers(0, 128, (1, 16, 16, 3))
    assert (plain.images == base).all() and (best.images == base + 4).all()

    found, _, _ = advise(measure="PSNR", least_psnr=100.0, run=lambda choice, seed: bench(PLAIN, seed))
    assert found.best is PLAIN and len(found.shown) == 1, "without an answer the plain sampler alone"


@pytest.mark.parametrize("repeats", [2, 3])
def test_the_seconds_that_are_shown_belong_to_the_ratio(repeats):
    """On a machine that does other things too: ratios 1.39 and 5.27, and 4 in the third repeat."""
    timed = {"mar": [9.0, 0.75, 2.37, 6.0], "lazymar: preset=balanced": [1.0, 0.54, 0.45, 1.5]}
    bench = Bench()

    def varying(choice, seed):
        images, report = bench(choice, seed)
        report.seconds = timed[choice.text][seed - 7]
        return images, report

    tried = [a.parse_choice("lazymar: preset=balanced", "sampler")]
    _, found = stepped(a.calibrate(PLAIN, tried, varying, AdviceSettings(measure="identical", repeats=repeats), 7))
    plain, best = found.shown
    told = {2: (1.56, 0.495, "about 3.2 times"), 3: (6.0, 1.5, "about 4.0 times")}[repeats]
    assert (plain.report.seconds, best.report.seconds) == pytest.approx(told[:2]) and told[2] in found.sentence
    ratio = plain.report.seconds / best.report.seconds
    assert best.report.speedup(plain.report).value == found.measured[0].ratio == pytest.approx(ratio)


# Figures of a candidate as the table shows them, and whether it passes: (SSIM limit 0.9, PSNR 25 dB, acceptance 80 %).
ROUNDED = {
    ("SSIM", 0.8996): ("0.900", True),
    ("SSIM", 0.8994): ("0.899", False),
    ("PSNR", 24.96): ("25.0 dB", True),
    ("PSNR", 24.94): ("24.9 dB", False),
    ("acceptance", 0.7996): ("80.0 %", True),
    ("acceptance", 0.7994): ("79.9 %", False),
}


@pytest.mark.parametrize(("measure", "value"), ROUNDED)
def test_a_figure_is_judged_as_it_is_shown(measure, value):
    shown, passes = ROUNDED[measure, value]
    report = Report("fasthybrid", "tiny", {}, 7, 1, "cpu", 1.0)
    report.add(accepted=round(1e4 * value), rejected=round(1e4 * (1 - value)))
    quality = Quality(value if measure == "PSNR" else 20.0, value if measure == "SSIM" else 0.5)
    measured = Measured(PLAIN, [Cell(0, 0, 7, "", report, Report("mar", "tiny", {}, 7, 1, "cpu", 2.0), quality)])
    settings = AdviceSettings(measure=measure)
    assert measured.within_limit(settings) is passes
    row = a.advice_table("", [measured], settings).splitlines()[-1]
    assert f"| {shown} " in row and row.rstrip(" |").endswith("yes" if passes else "no")


def test_a_first_run_does_not_rule_a_candidate_out():
    """With speed compile the first round compiles: it takes 100 s, and says nothing."""
    bench = Bench()

    def compiling(choice, seed):
        images, report = bench(choice, seed)
        if seed == 7:
            report.seconds = 100.0
            report.first_run = True
        return images, report

    found, _, _ = advise(run=compiling, measure="identical", repeats=2)
    assert found.best.text == "lazymar: preset=balanced"
    assert "about 1.6 times as fast as MAR (1.60 to 1.60 in 2 repeats)" in found.sentence


def test_a_plain_sampler_that_fails_in_a_later_round_blames_no_candidate():
    bench = Bench()

    def run(choice, seed):
        if choice is PLAIN and seed == 8:
            raise UserError("memory: full.")
        return bench(choice, seed)

    with pytest.raises(UserError, match="memory: full"):
        advise(run=run)


def test_a_candidate_that_fails_in_a_later_round_is_not_advised():
    bench = Bench()

    def run(choice, seed):
        if choice.text == "fasthybrid: preset=fast" and seed == 8:
            raise UserError("memory: full.")
        return bench(choice, seed)

    found, _, _ = advise(run=run, measure="PSNR", least_psnr=0.0)
    assert found.best.text != "fasthybrid: preset=fast"
    assert next(m for m in found.measured if m.choice.text == "fasthybrid: preset=fast").problem == "memory: full."


def test_rounds_are_paired_and_only_what_can_win_runs_again():
    found, bench, seen = advise(measure="PSNR", least_psnr=30.0, repeats=2)
    times = {line: [seed for text, seed in bench.runs if text == line] for line in ["mar", *KNOWN]}
    assert times["fasthybrid: preset=balanced"] == [7, 8, 9]
    later = [run for run in bench.runs if run[1] > 7]
    assert len(later) == len(seen) - 1 - len(KNOWN) and len(later) % 2 == 0
    for one, other in zip(later[::2], later[1::2], strict=True):
        assert (one[0] == "mar") != (other[0] == "mar") and one[1] == other[1], "beside the plain sampler"
    orders = [[a == "mar" for a, seed in later[::2] if seed == at] for at in (8, 9)]
    assert all(a != b for a, b in zip(*orders, strict=True)), "before and behind it in turn"
    for order in orders:
        assert len(order) > 1 and all(a != b for a, b in zip(order, order[1:], strict=False)), "in a round, too"
    assert times["fasthybrid: preset=fast"] == [7], "too far from the limit"
    assert times["lazymar: preset=fast"] == times["cspd: preset=fast"] == [7], "slower than the baseline, not possible"
    assert all(at.done < at.planned for at in seen)
    best = next(m for m in found.measured if m.choice is found.best)
    assert ratios(best) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("plain", [*(name for name, entry in SAMPLERS.items() if entry.baseline), "par"])
def test_candidates_are_of_the_family_and_need_a_draft_only_with_one(plain):
    family = set(choose(plain, {}).entry.families)
    for draft in (False, True):
        found = a.candidates(plain, draft)
        assert all(family & set(c.entry.families) and (draft or not c.entry.needs_draft) for c in found)
        assert len({c.text for c in found}) == len(found) > 1


def test_seeds_stay_below_their_limit():
    _, bench, _ = advise(seed=a.SEEDS - 1, repeats=2, measure="PSNR", least_psnr=30.0)
    assert {seed for _, seed in bench.runs} == {a.SEEDS - 1, 0, 1}
