"""What settings in a report promise, and which run of a comparison is the baseline."""

from dataclasses import asdict

import numpy as np
import pytest
from fastar_nodes.reports.record import Report
from fastar_nodes.runs.baseline import ComparedRun, baselines, is_lossless, run_of_report
from fastar_nodes.runs.registry import SAMPLERS

# Runs to whether they are exact. What settings promise alone: test_exact_settings.py, test_tokens_decoding.py.
EXACT = [
    ("mar", {}, True),
    ("fasthybrid", {"lookahead": 0}, True),
    ("fasthybrid", {"lookahead": "none", "threshold": 0.8}, False),
    ("fasthybrid+lazymar", {"lookahead": 1, "refresh_period": 1}, True),
    ("fasthybrid+lazymar", {"lookahead": 2, "refresh_period": 1}, False),
    ("fasthybrid", {"lookahead": 8, "lookahead_start": 64}, True),
    ("llamagen", {"parallel": 16}, True),
    ("tar", {}, True),
    ("zipar", {"window": 3}, False),
    ("zipar", {"window": 4}, True),
    ("zipar", {"window": 256}, True),
    ("par", {}, False),
    ("mulosd", {"tau": 1.01, "acceptance_target": 0.5}, False),
    ("mulosd", {"tau": 1.01, "resample_window": 0}, True),
    ("nosuch", {}, False),
    ("mar+nosuch", {}, False),
]


def run(sampler: str, own: dict, side: int = 4, **more) -> ComparedRun:
    """A run as reports record it: all settings."""
    settings = asdict(SAMPLERS[sampler].settings()) if sampler in SAMPLERS else {}
    return ComparedRun("family", sampler, {**settings, **own}, side, **more)


@pytest.mark.parametrize("sampler, own, exact", EXACT)
def test_which_runs_are_exact(sampler, own, exact):
    assert run(sampler, own).exact is exact
    assert not is_lossless(sampler, run(sampler, own).settings), "the same image, not only the same distribution"


@pytest.mark.parametrize(
    "sampler, own, wanted",
    [("mar", {"speculation": 8}, True), ("cspd", {"mode": "lossless"}, True), ("nosuch", {}, False)],
)
def test_what_lossless(sampler, own, wanted):
    assert is_lossless(sampler, run(sampler, own).settings) is wanted


def test_the_plain_sampler_is_the_baseline_then_an_exact_accelerator_then_the_slowest_run():
    fast, exact = run("fasthybrid", {}, seconds=1.0), run("lazymar", {"refresh_period": 1}, seconds=2.0)
    slow, plain = run("fasthybrid", {"lookahead": 0, "diffusion_steps_end": 5}, seconds=9.0), run("mar", {})
    assert baselines([fast, exact, slow, plain]) == [3] * 4
    assert baselines([fast, exact, slow]) == [1] * 3, "an approximate run is not the baseline of an exact one"
    assert baselines([fast, slow]) == [1] * 2
    assert baselines([]) == []


def test_without_a_plain_run_the_work_decides_whatever_the_seconds_of_this_run():
    """Two accelerators, of which now the one and now the other is slower."""
    for first, second in ((1.0, 2.0), (2.0, 1.0)):
        few = run("fasthybrid", {}, work=(32, 700), seconds=first)
        many = run("fasthybrid", {"threshold": 0.99}, work=(32, 900), seconds=second)
        assert baselines([few, many]) == [1, 1]


def test_of_several_plain_runs_the_one_with_most_work():
    few, many = run("mar", {"steps": 8}, work=(8, 80)), run("mar", {"steps": 64}, work=(64, 640))
    own = run("fasthybrid", {"steps": 8})
    assert baselines([few, many, own]) == [1, 1, 1]


def test_groups_have_baselines_of_their_own():
    runs = [
        ComparedRun(group, "zipar", {"window": 2}, 4, seconds=s) for group, s in (("a", 1.0), ("b", 2.0), ("a", 3.0))
    ]
    assert baselines(runs) == [2, 1, 2]


def test_a_run_is_compared_with_one_of_its_model_and_size():
    """The larger LlamaGen does most work, but ratios to it would be of another network. PAR has a model of its own."""
    large, small = run("llamagen", {}, 16, work=(256, 0), model="a"), run("llamagen", {}, 8, work=(64, 0), model="b")
    mulosd, par = run("mulosd", {}, 16, model="a"), run("par", {}, 8, model="trained for it")
    assert baselines([large, small, mulosd, par]) == [0, 1, 0, 1]
    assert baselines([large, mulosd, par]) == [0, 0, 0], "PAR has none to be compared with, and is told so"

    other = run("mar", {}, model="b", seconds=9.0)
    assert baselines([run("mar", {}, model="a"), run("lazymar", {}, model="a"), other]) == [0, 0, 2]


def test_a_report_says_what_a_run_needs():
    report = Report("zipar", "tiny", asdict(SAMPLERS["zipar"].settings(window=6)), 7, 2, "cpu", 3.0)
    report.add(transformer_passes=5, head_calls=7)
    assert run_of_report(report, "x") == ComparedRun("x", "zipar", report.settings, 1 << 16, (5, 7), 1.5, "tiny")
    report.maps["step"] = np.zeros((2, 6, 6), np.int32)
    assert run_of_report(report, "x").exact and run_of_report(report, "x").side == 6
