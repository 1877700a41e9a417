"""What sweeps of nodes and of the command line share: combinations of values, names, and counts of several runs."""

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports.work import Work
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.sweeps.keys import cell_key, cell_name
from fastar_nodes.sweeps.plan import combinations, distinct

FASTHYBRID = SAMPLERS["fasthybrid"]


def test_combinations_are_all_and_the_last_setting_changes_first():
    grid = {"preset": ["fast"], "steps": [8], "lookahead": ["2", "4"], "threshold": [0.5, "0.9"]}
    found = combinations(FASTHYBRID, grid, "ours")
    assert [(c.asked["lookahead"], c.asked["threshold"]) for c in found] == [
        ("2", 0.5),
        ("2", "0.9"),
        ("4", 0.5),
        ("4", "0.9"),
    ]
    assert [c.title for c in found[:2]] == [
        "FastHybrid, ours, lookahead 2, threshold 0.5",
        "FastHybrid, ours, lookahead 2, threshold 0.9",
    ]
    first = {"steps": 8, "lookahead": "2", "threshold": 0.5}
    assert found[0].choice.preset == "fast" and found[0].choice.values == first
    assert [c.title for c in combinations(SAMPLERS["mar"], {})] == ["MAR"]


def test_values_that_mean_the_same_are_one():
    assert distinct(FASTHYBRID, "threshold", [0.5, "0.50", "5e-1", 0.6]) == [0.5, 0.6]
    assert distinct(SAMPLERS["lazymar"], "head_cache", ["on", True, "false"]) == ["on", "false"]
    assert distinct(FASTHYBRID, "preset", ["exact", "fast", "exact"]) == ["exact", "fast"]
    found = combinations(FASTHYBRID, {"threshold": [0.5, "0.50"]})
    assert [c.title for c in found] == ["FastHybrid"], "one value does not vary"


@pytest.mark.parametrize("values", [{"threshold": [7]}, {"shininess": [1]}, {"preset": ["slow"]}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(UserError):
        combinations(FASTHYBRID, values)


# What a key is made of, each part changed.
PARTS = {
    "models": "other weights",
    "drawn": "a dog",
    "on": "cuda",
    "sampler": "lazymar",
    "settings": {"cfg": 2.0},
    "seed": 8,
}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_in_the_key(part):
    usual = {"models": "weights", "drawn": "a cat", "on": "cpu", "sampler": "mar", "settings": {"cfg": 3.0}, "seed": 7}
    assert cell_key(**usual) == cell_key(**usual) != cell_key(**{**usual, part: PARTS[part]})


def test_a_name_is_readable_and_fits_every_file_system():
    key = "0123456789abcdef" * 2
    assert cell_name("fasthybrid+lazymar seed 7", key, digits=8) == "fasthybrid+lazymar-seed-7-01234567"
    assert cell_name('mar: a/b\\c "d" ', key, digits=4) == "mar-a-b-c-d-0123"
    assert len(cell_name("x" * 500, key, digits=16)) == 80 + 1 + 16


def test_the_work_of_several_runs():
    """Two runs of 1 and 3 images: 10 + 20 passes, of which the draft's 4 + 6; 8 of 10 and 0 of 6 drafts kept."""
    first = {"transformer_passes": 10, "draft_passes": 4, "head_rows": 100, "accepted": 8, "rejected": 2}
    second = {"transformer_passes": 20, "draft_passes": 6, "head_rows": 300, "accepted": 0, "rejected": 6}
    work = Work.of([(1, first), (3, second)])

    assert (work.runs, work.images) == (2, 4)
    assert (work.a_run("transformer_passes"), work.own_a_run("transformer_passes")) == (15, 10)
    assert work.counts["head_rows"] == 400 and work.acceptance == 0.5, "8 of 16"
    assert work.a_run("head_calls") is work.own_a_run("head_calls") is None
    assert Work.of([]).acceptance is None
