"""Speed-ups and seconds as they are told, on figures worked out by hand."""

import csv
import io
import json

import pytest
from fastar_nodes.reports.quality import Quality, closeness
from fastar_nodes.reports.record import Report, repeated, to_csv, to_json, to_table, to_text
from fastar_nodes.reports.summary import one_line
from fastar_nodes.reports.table import percent
from fastar_nodes.reports.timing import middle, shown_seconds, speedup_of, times_as_fast


def run(sampler="mar", seconds=1.0, images=1, model="tiny", **about) -> Report:
    return Report(sampler, model, {}, 7, images, "cpu", seconds, **about)


def in_repeats(*seconds: float, **about) -> Report:
    return repeated([run(seconds=one, **about) for one in seconds])


# Ratios of the pairs to what is said of them.
TOLD = {
    (1.4,): "about 1.40x (one run each)",
    (0.87,): "about 0.87x (one run each)",
    (1.5, 1.3, 1.4): "1.40x (1.30 to 1.50 in 3 repeats)",
    (0.7, 0.8): "0.75x (0.70 to 0.80 in 2 repeats)",
    (0.99, 1.94, 0.87): "no measurable difference (0.87 to 1.94 in 3 repeats)",
    # What would read "1.00 to 1.20" or "0.90 to 1.00" is no difference.
    (1.004, 1.1, 1.2): "no measurable difference (1.00 to 1.20 in 3 repeats)",
    (0.9, 0.9961): "no measurable difference (0.90 to 1.00 in 2 repeats)",
    (1.0, 1.0): "no measurable difference (1.00 to 1.00 in 2 repeats)",
}


@pytest.mark.parametrize("ratios", TOLD)
def test_what_is_said_of_ratios(ratios):
    found = speedup_of(ratios)
    assert found.text == TOLD[ratios]
    assert found.told == (len(ratios) > 1 and "no measurable" not in found.text)


def test_seeds_of_a_sweep_are_no_repeats_in_turn():
    found = speedup_of([1.2, 1.4], of="seeds")
    assert found.text == "about 1.30x (1.20 to 1.40 over 2 seeds)" and not found.told


def test_each_repeat_is_a_pair():
    """3, 5, 5 beside 2, 2, 4: ratios 1.5, 2.5, 1.25. The ratio of the medians would be 2.5."""
    base, own = in_repeats(3.0, 5.0, 5.0), in_repeats(2.0, 2.0, 4.0)
    found = own.speedup(base)
    assert (found.value, found.low, found.high, found.pairs) == (1.5, 1.25, 2.5, 3)
    assert (base.seconds, own.seconds, own.repeats) == (5.0, 2.0, 3)
    four = in_repeats(8.0, 8.0, 16.0, images=4)
    assert four.speedup(base).value == 1.5, "seconds an image"


def test_an_even_number_of_repeats_has_two_middle_pairs():
    """3, 8, 6, 9 beside 1, 2, 4, 9: ratios 3, 4, 1.5 and 1. The middle pairs took 3 + 6 and 1 + 4 seconds."""
    base, own = in_repeats(3.0, 8.0, 6.0, 9.0), in_repeats(1.0, 2.0, 4.0, 9.0)
    found = own.speedup(base)
    assert (found.value, found.low, found.high, found.pairs) == (9 / 5, 1.0, 4.0, 4)
    assert middle([(3.0, 1.0), (8.0, 2.0), (6.0, 4.0), (9.0, 9.0)]) == (4.5, 2.5)
    assert middle([(3.0, 1.0), (8.0, 2.0), (6.0, 4.0)]) == (3.0, 1.0)


def test_a_ratio_in_a_sentence_has_two_digits():
    told = {3.33: "3.3", 0.874: "0.87", 12.4: "12", 1.042: "1.04", 1.06: "1.1"}
    for ratio, text in told.items():
        assert times_as_fast(ratio) == f"about {text} times as fast"


def test_repeats_of_one_run_alone_are_no_pairs():
    found = run(seconds=2.0).speedup(in_repeats(3.0, 5.0))
    assert found.text == "about 2.00x (timed apart)"


# What differs between two runs, with what is said.
UNLIKE = {
    "other model": {"model": "small"},
    "other size": {"grid": (12, 12)},
    "other edit": {"edits": ("left half",)},
    "first run": {"first_run": True},
    "other dtype": {"dtype": "bf16"},
    "other threads": {"threads": 2},
    "other process": {"process": "b"},
}


@pytest.mark.parametrize("word", [*UNLIKE, "other device"])
def test_runs_that_differ_in_more_than_the_method_have_no_ratio(word):
    usual = {"dtype": "fp32", "threads": 1, "process": "a", "grid": (8, 8)}
    base = run(seconds=4.0, **usual)
    about = {**usual, **UNLIKE.get(word, {})}
    own = run("fasthybrid", 2.0, **about)
    if word == "other device":
        own.device = "cuda"

    assert own.speedup(base).text == f"not compared ({word})" == base.speedup(own).text
    _, row = to_table([base, own]).splitlines()[2:]
    assert f"not compared ({word})" in row and "2.00x" not in row and "2.00 (" in row, "the seconds stay"
    _, told = json.loads(to_json([base, own]))["runs"]
    assert "speedup" not in told and told["speedup_note"] == word
    remedy = "run again with a different seed" if word == "first run" else f"speed-up not compared ({word})"
    assert remedy in one_line(own, base)


def test_a_draft_model_is_no_other_model():
    """CSpD names both in its report."""
    own = run("cspd", 2.0, model="tiny, drafted by small")
    assert own.speedup(run(seconds=4.0)).value == 2.0
    assert own.speedup(run(seconds=4.0, model="small")).note == "other model"


def test_par_has_a_model_of_its_own():
    """It adds embeddings to a LlamaGen: 102 beside 100 parameters. Beside a LlamaGen of half the size it is faster or
    slower by that.
    """
    own = run("par", 2.0, model="a par", parameters=102)
    assert own.speedup(run("llamagen", 4.0, parameters=100)).value == 2.0
    assert run("llamagen", 4.0, parameters=100).speedup(own).value == 0.5
    assert own.speedup(run("llamagen", 4.0, parameters=50)).note == "other model"
    assert run("zipar", 2.0, model="another", parameters=100).speedup(run(parameters=100)).note == "other model"


def test_a_repeat_without_time_divides_nothing():
    """A stranger's file may say so."""
    own = run(seconds=2.0, timings=(0.0, 2.0))
    assert own.speedup(in_repeats(4.0, 4.0)).value == 2.0


def test_an_earlier_run_of_the_graph_is_timed_apart():
    base, own = run(seconds=3.0), run(seconds=2.0)
    base.prompt, own.prompt = "one", "two"
    assert own.speedup(base).text == "about 1.50x (timed apart)"


def test_json_has_the_spread_and_csv_the_median():
    """Ratios 1.5, 2.5 and 1.25."""
    reports = [in_repeats(3.0, 5.0, 5.0), in_repeats(2.0, 2.0, 4.0)]
    _, told = json.loads(to_json(reports))["runs"]
    assert (told["seconds"], told["repeats"], told["timings"]) == (2.0, 3, [2.0, 2.0, 4.0])
    assert (told["speedup"], told["speedup_range"]) == (1.5, [1.25, 2.5]) and "speedup_note" not in told
    (row,) = csv.DictReader(io.StringIO(to_csv(reports[1])))
    assert [row[name] for name in ("seconds", "repeats", "first_run")] == ["2.0", "3", "0"]
    (row,) = csv.DictReader(io.StringIO(to_csv(run(seconds=2.0, first_run=True))))
    assert [row[name] for name in ("seconds", "repeats", "first_run")] == ["2.0", "1", "1"]


def test_the_report_of_repeats_has_medians_of_everything():
    """Otherwise the phases of the first run would add up to other seconds than those above them."""
    reports = [run(seconds=seconds, phases={"head": seconds - 1}, peak_memory_bytes=5) for seconds in (9.0, 2.0, 3.0)]
    reports[0].phases["decoder"] = 0.5  # only the first run's images are decoded
    reports[1].peak_memory_bytes = 8
    for report, calls in zip(reports, (10, 20, 60), strict=True):
        report.add(head_calls=calls)
    found = repeated(reports)
    assert (found.seconds, found.timings) == (3.0, (9.0, 2.0, 3.0))
    assert found.phases == {"head": 2.0, "decoder": 0.5} and found.counts == {"head_calls": 20}
    assert found.peak_memory_bytes == 8 and repeated(reports[:1]) is reports[0]


def test_a_report_as_text_says_how_it_was_timed():
    report = run(seconds=0.7104, threads=1, dtype="fp32", phases={"head": 0.7, "decoder": 0.9})
    lines = to_text(report).splitlines()
    assert lines[1] == "seconds: 0.710 (one run) on cpu, 1 thread, fp32"
    assert lines[2:4] == ["  head: 0.700 s", "  decoder: 0.900 s, not part of the seconds"]
    report.first_run, report.threads = True, 2
    assert to_text(report).splitlines()[1] == "seconds: 0.710 (first run) on cpu, 2 threads, fp32"


# Shares as text without and with a decimal.
SHARES = {
    0.0: ("0 %", "0.0 %"),
    0.0004: ("1 %", "0.1 %"),
    0.125: ("12 %", "12.5 %"),
    0.996: ("99 %", "99.6 %"),
    0.9996: ("99 %", "99.9 %"),
    1.0: ("100 %", "100.0 %"),
}


@pytest.mark.parametrize("share", SHARES)
def test_only_all_is_100_percent_and_only_nothing_is_0(share):
    """2,499 of 2,500 drafts kept are not all: the number of rejected ones is beside it."""
    assert (percent(share), percent(share, 1)) == SHARES[share]
    assert percent(None) == ""


def test_an_ssim_of_1_is_of_equal_images_only():
    assert closeness(Quality(60.0, 0.99996)) == ["60.0 dB", "0.999"]
    assert closeness(Quality(60.0, 0.9994)) == ["60.0 dB", "0.999"]
    assert Quality(90.0, 0.9999999).to_dict()["ssim"] < 1 == Quality(None, 1.0, "identical").to_dict()["ssim"]


def test_short_seconds_keep_digits():
    assert [shown_seconds(value) for value in (12.345, 1.0, 0.8612, 0.0041)] == ["12.35", "1.00", "0.861", "0.004"]
