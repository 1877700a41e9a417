"""Compare, Token Map and Report: cells, baselines, tables, maps, text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_comfy import state
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import compare, samplers
from tiny import a_gpt, a_report, sample


def compared(**about):
    return compare.Compare.execute(
        **{"labels": [""], "columns": [0], "baseline": [0], "differences": [False]} | about
    ).result


def table(**about) -> list[list[str]]:
    """Label and speed-up of every row, without the remark that it is of one run each."""
    lines = compared(**about)[1].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [[row[0], row[-1].removeprefix("about ").removesuffix(" (one run each)")] for row in rows]


def cells(reports) -> dict:
    """Sockets of Compare for reports."""
    pictures = {f"image_{i}": [torch.rand(1, 8, 8, 3)] for i in range(1, len(reports) + 1)}
    return pictures | {f"report_{i}": [one] for i, one in enumerate(reports, 1)}


def test_compare_measures_against_the_plain_sampler():
    pairs = {f"image_{i}": [torch.rand(1, 8, 8, 3)] for i in (1, 2, 3)}
    pairs |= {"report_2": [a_report("mar", 4.0)], "report_3": [a_report("x", 2.0)]}
    grid, table, images = compared(**pairs)
    assert all(one is pairs[f"image_{k}"][0] for k, one in enumerate(images, 1)) and len(images) == 3
    assert grid.shape[0] == 1 and grid.shape[3] == 3 and 0 <= grid.min() and grid.max() <= 1
    lines, below = (part.splitlines() for part in table.split("\n\n"))
    assert len(lines) == 4 and "MAR" in lines[2] and "baseline" in lines[2] and "2.00x" in lines[3]
    assert len(below) == 1 and "passes: " in below[0]
    with pytest.raises(UserError, match="^baseline: .*no report"):
        compared(**pairs, baseline=[1])
    with pytest.raises(UserError, match="^baseline: .*choose the number of a cell, 1 to 3"):
        compared(**pairs, baseline=[4])


def test_compare_without_reports_and_with_none_in_lists():
    grid, table, images = compared(image_1=[torch.rand(2, 8, 8, 1)], image_2=[None], report_2=[None], labels=["one\n"])
    assert grid.ndim == 4 and table.startswith("No reports") and len(images) == 1


def test_figures_of_an_earlier_run_are_marked(monkeypatch):
    """Reports of two runs; all of one run are comparable, whichever it was."""
    reports = [a_report("mar", 4.0), a_report("fasthybrid", 2.0)]
    for prompts, marked in {("a", "b"): [0], ("a", "a"): [], ("b", "b"): [], ("b", "a"): [1]}.items():
        for one, prompt in zip(reports, prompts, strict=True):
            one.prompt = prompt
        monkeypatch.setattr(state, "context", SimpleNamespace(prompt_id="b", node_id="1"))
        assert [i for i, (name, _) in enumerate(table(**cells(reports))) if compare.ELSEWHERE in name] == marked


def test_a_sampler_states_in_which_run_it_was_timed(monkeypatch):
    monkeypatch.setattr(state, "context", SimpleNamespace(prompt_id="x", node_id="1"))
    assert sample(samplers.MARSampler)[1].prompt == "x"


def test_compare_needs_as_many_reports_as_pictures():
    with pytest.raises(UserError, match="^report_1: .*2 reports"):
        compared(image_1=[torch.rand(1, 8, 8, 3)], report_1=[a_report("mar"), a_report("mar")])
    with pytest.raises(UserError, match="^image_1: .*64"):
        compared(image_1=[torch.rand(1, 8, 8, 3)] * 65)


def test_automatic_labels_tell_what_differs():
    fast = [a_report("fasthybrid", threshold=t, k=1) for t in (0.8, 0.9)]
    names = compare.automatic_labels([a_report("mar"), None, *fast, a_report("fasthybrid+lazymar")])
    assert names == ["MAR", "image 2", "FastHybrid threshold 0.8", "FastHybrid threshold 0.9", "FastHybrid + LazyMAR"]
    own, other = (a_report("mar", t_max=t) for t in (None, 950))
    assert compare.automatic_labels([own, other]) == ["MAR", "MAR t max 950"]
    # At 0 it is off, and the method is the plain one.
    runs = [a_report("llamagen", parallel=n) for n in (0, 16)]
    assert compare.automatic_labels(runs) == ["LlamaGen", "LlamaGen parallel 16"]
    assert compare.automatic_labels([a_report("mar", lookahead=n) for n in (0, 4)])[0] == "MAR lookahead 0"


def test_token_map_and_a_report():
    record = a_report("fasthybrid")
    record.images = 2
    record.maps["step"] = np.zeros((2, 4, 4), np.int32)
    record.maps["outcome"] = np.ones((2, 4, 4), np.uint8)
    (image,) = compare.TokenMap.execute(report=record, image=torch.rand(2, 8, 8, 3), what="outcome", opacity=0.5).result
    assert image.shape[0] == 2 and image.shape[2] == 384
    (bare,) = compare.TokenMap.execute(report=record, what="fixed at step", opacity=1.0).result
    assert bare.shape[0] == 2
    with pytest.raises(UserError, match="^opacity: "):
        compare.TokenMap.execute(report=record, what="outcome", opacity=float("nan"))
    assert compare.ReportToText.execute(report=record, format="csv").result[0].startswith("sampler,")
    rejected = compare.TokenMap.execute(report=record, what="rejected", opacity=1.0).result[0]
    assert rejected.shape[0] == 2
    with pytest.raises(UserError, match="^what: .*no map for 'cached'"):
        compare.TokenMap.execute(report=record, what="cached", opacity=1.0)
    with pytest.raises(UserError, match="^report: "):
        compare.ReportToText.execute(report={"x": 1}, format="csv")


def test_workflows_that_were_saved_with_drafted_show_all_outcomes():
    record = a_report("fasthybrid")
    record.maps["outcome"] = np.ones((1, 4, 4), np.uint8)
    old, new = (compare.TokenMap.execute(report=record, what=what).result[0] for what in ("drafted", "outcome"))
    assert torch.equal(old, new)

    assert compare.TokenMap.validate_inputs(what="drafted") is True
    assert compare.TokenMap.validate_inputs(what="outcome") is compare.TokenMap.validate_inputs() is True
    assert compare.TokenMap.validate_inputs(what="draft").startswith("'draft' is not one of fixed at step, outcome, ")


def test_every_family_is_compared_with_its_own_baseline():
    reports = [a_report(name) for name in ("mar", "zipar", "fasthybrid", "llamagen", "par")]
    for report, seconds in zip(reports, (4.0, 1.0, 2.0, 3.0, 0.5), strict=True):
        report.seconds = seconds
    pairs = cells(reports)
    ratios = {"MAR": "baseline", "FastHybrid": "2.00x", "LlamaGen": "baseline", "ZipAR": "3.00x", "PAR": "6.00x"}
    assert table(**pairs) == [[*pair] for pair in ratios.items()]
    assert table(**pairs, baseline=[4])[:2] == [["LlamaGen", "baseline"], ["MAR", "0.75x"]]
    alone = cells([reports[0], reports[3]])
    assert "baseline" not in compared(**alone)[1] and "speed-up" not in compared(**alone)[1]
    assert "baseline" not in compared(**cells(reports[:1]), baseline=[1])[1]
    fewer = {**pairs, "report_2": [None], "report_4": [None], "report_5": [None]}
    assert table(**fewer) == [["MAR", "baseline"], ["FastHybrid", "2.00x"]]


def as_connected(node, monkeypatch, output=None):
    """Let a node run with number 7 in a graph, its output of that number connected."""
    taker = {"8": {"class_type": "SaveImage", "inputs": {"images": ["7", output]}}}
    graph = {"7": {"class_type": "FastARCompare", "inputs": {}}, **({} if output is None else taker)}
    monkeypatch.setattr(node, "hidden", SimpleNamespace(unique_id="7", extra_pnginfo={}, prompt=graph), raising=False)


def test_a_result_that_goes_nowhere_else_is_shown_on_the_node(monkeypatch):
    """Both are output nodes: Run would skip them otherwise."""
    report = a_report("mar")
    report.maps["step"] = np.zeros((1, 4, 4), np.int32)
    runs = {
        compare.Compare: lambda: compare.Compare.execute(**cells([a_report("mar"), a_report("fasthybrid")])),
        compare.TokenMap: lambda: compare.TokenMap.execute(report=report, what="fixed at step", opacity=0.5),
    }
    for node, run in runs.items():
        assert node.define_schema().is_output_node
        for output, is_shown in ((None, True), (1, True), (0, False)):
            as_connected(node, monkeypatch, output)
            before = len(state.saved)
            made = run()
            assert ("images" in (made.ui or {})) == is_shown
            assert len(state.saved) - before == is_shown


def test_a_map_is_as_wide_as_its_image_within_limits():
    record = a_report("mar")
    record.maps["step"] = np.zeros((1, 4, 4), np.int32)
    for width, side in ((8, 384), (500, 500), (1500, 1024)):
        image = torch.zeros(1, width, width, 3)
        (made,) = compare.TokenMap.execute(report=record, image=image, what="fixed at step", opacity=0.5).result
        assert made.shape[2] == side


def test_images_of_another_size_have_no_speed_up():
    """4 and 36 tokens an image would differ by the number of passes. The report says how many there are."""
    reports = [sample(samplers.LlamaGenSampler, model=a_gpt(grid=side))[1] for side in (2, 6, 6)]
    assert [report.grid for report in reports] == [(2, 2), (6, 6), (6, 6)]
    for report in reports:
        report.first_run = False

    words = [row[-1].partition(" (")[2].rstrip(")") for row in table(**cells(reports), baseline=[2])]
    assert words == ["", "other size", ""]
    assert reports[0].speedup(reports[1]).note == "other size" and reports[2].speedup(reports[1]).value


def test_a_script_gets_images_that_save_image_can_save():
    """ComfyUI calls Save Image for each item of the list; an exported script passes the list on as the images."""
    images = [torch.rand(2, 8, 8, 3), torch.rand(1, 16, 16, 3)]
    in_graph, in_script = (
        compare.Compare.execute(image_1=given(images[0]), image_2=given(images[1])).result[2]
        for given in (lambda image: [image], lambda image: image)
    )

    assert all(torch.equal(a, b) for a, b in zip(in_graph, images, strict=True))
    singles = [*images[0], images[1][0]]
    assert all(torch.equal(a, b) for a, b in zip(in_script, singles, strict=True))
