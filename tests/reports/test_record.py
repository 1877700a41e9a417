"""The report's text forms and its arithmetic."""

import csv
import io
import json
import re

import pytest
import torch
from fastar_nodes.reports.record import (
    COUNTS,
    Report,
    compared,
    dtype_of,
    explain,
    to_csv,
    to_json,
    to_table,
    to_text,
)


def runs() -> list[Report]:
    slow = Report("mar", "tiny", {"cfg": 3.0}, 7, 2, "cpu", 8.0, {"transformer": 1.0, "head": 6.5})
    slow.add(transformer_passes=32, head_calls=3200)
    fast = Report("fasthybrid", "tiny", {"cfg": 3.0}, 7, 1, "cpu", 1.0)
    fast.add(head_calls=700, accepted=50, transformer_passes=32, rejected=10, restarts=3)
    return [slow, fast]


def test_speed_up_is_per_image_and_never_typed_in():
    slow, fast = runs()
    assert fast.speedup(slow).value == pytest.approx(4.0)  # 4 s an image against 1 s
    assert slow.speedup(slow).text == "baseline"
    assert Report("x", "", {}, 0, 1, "cpu").speedup(slow) is None


def test_counts_add_up_and_acceptance_is_of_what_was_judged():
    slow, fast = runs()
    assert fast.acceptance == pytest.approx(50 / 60) and slow.acceptance is None
    fast.add(accepted=5)
    assert fast.counts["accepted"] == 55


def test_json_is_the_documented_form(root):
    told = json.loads(to_json(runs()))
    assert list(told) == ["version", "device", "runs"]
    slow, fast = told["runs"]
    assert (slow["speedup"], slow["speedup_note"]) == (1.0, "baseline")
    assert (fast["speedup"], fast["speedup_note"], fast["repeats"]) == (4.0, "one run each", 1)
    assert list(fast["counts"]) == [name for name in COUNTS if name in fast["counts"]]
    assert "acceptance" not in slow and fast["acceptance"] == pytest.approx(0.833333)
    text = (root / "docs" / "report.md").read_text(encoding="utf-8")
    for name in (*told, *fast, *COUNTS):
        assert f"`{name}`" in text, f"docs/report.md does not explain `{name}`"


def test_table_leaves_out_what_nobody_has():
    lines = to_table(runs(), ["MAR", "FastHybrid"]).splitlines()
    heads = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert heads == ["sampler", "passes", "diffusion calls", "accepted", "restarts", "seconds", "speed-up"]
    assert "about 4.00x (one run each)" in lines[3] and "83.3 %" in lines[3] and "MAR" in lines[2]
    assert len({len(line) for line in lines}) == 1
    assert "accepted" not in to_table(runs()[:1])


def test_a_run_that_none_is_compared_with_is_no_baseline():
    """Alone, or beside runs of other families."""
    slow, fast = runs()
    assert compared([0]) == [None] and compared([0, 1]) == [None, None]
    assert compared([0, 0, 2, None]) == [0, 0, None, None] and compared([1, 1]) == [1, 1]
    for reports, baseline in (([slow], 0), ([slow, fast], [0, 1]), ([slow, fast], [None, None])):
        assert "baseline" not in to_table(reports, baseline=baseline)
        assert all("speedup" not in run for run in json.loads(to_json(reports, baseline))["runs"])
        assert "speed-up" not in explain(reports, baseline)
    assert to_table([slow, fast], baseline=1).count("baseline") == 1


def test_csv_and_text():
    rows = [row for run in runs() for row in csv.DictReader(io.StringIO(to_csv(run)))]
    assert [row["sampler"] for row in rows] == ["mar", "fasthybrid"] and rows[1]["head_calls"] == "700"
    baseline, fast = rows
    assert [baseline["seconds"], fast["seconds"]] == ["8.0", "1.0"], "numbers without units"
    assert float(fast["acceptance"]) == pytest.approx(5 / 6, abs=1e-6) and baseline["acceptance"] == ""
    for row in rows:
        assert all(re.fullmatch(r"[\d.]*", cell) for name, cell in row.items() if name != "sampler"), row
    text = to_text(runs()[1])
    assert str(runs()[1]) == text, "what Preview as Text shows"
    assert "acceptance: 83.3 %" in text and "seed 7" in text and "cfg=3.0" in text and "restarts: 3" in text


def test_a_count_of_a_methods_own_is_a_column_where_a_run_has_it(monkeypatch):
    monkeypatch.setitem(COUNTS, "previewed", "previewed tokens")
    slow, fast = runs()
    assert "previewed" not in to_table([slow, fast]) + to_csv(fast)

    fast.add(previewed=12)
    head, _, *rows = to_table([slow, fast]).splitlines()
    column = [title.strip() for title in head.split("|")].index("previewed tokens")
    assert [row.split("|")[column].strip() for row in rows] == ["", "12"]
    assert [row["previewed"] for row in csv.DictReader(io.StringIO(to_csv(fast)))] == ["12"]
    assert "previewed" not in to_csv(slow)
    assert json.loads(to_json([slow, fast]))["runs"][1]["counts"]["previewed"] == 12
    assert "previewed: 12" in to_text(fast)


@pytest.mark.parametrize("most", [torch.bfloat16, torch.float32])
def test_the_dtype_is_that_of_most_weights(most):
    """A head in fp32 within a bf16 model, say, or a bf16 part of an fp32 one: 2 of 3 tensors, or 3 of 103 numbers."""
    few = torch.float32 if most is torch.bfloat16 else torch.bfloat16
    net = torch.nn.ParameterList([torch.zeros(100, dtype=most), torch.zeros(1, dtype=few), torch.zeros(2, dtype=few)])
    assert dtype_of(net) == {torch.bfloat16: "bf16", torch.float32: "fp32"}[most]
