"""The token models' tables, on tiny random checkpoints: model, default settings, image size and counts."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from fastar_nodes.cli.main import main
from fastar_nodes.errors import UserError
from fastar_nodes.tools.ablations import tables
from fastar_nodes.tools.ablations import tokens as token_ablations
from fastar_nodes.tools.ablations.tables import Ground, Row
from PIL import Image
from tiny_demo import cells_of, new_folder, write_gpt

pytestmark = pytest.mark.slow

LOW, HIGH, PAR = "llamagen-low", "llamagen", "par"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = new_folder(tmp_path_factory)
    # lookahead is not a setting of a token sampler; defaults for other samplers are ignored.
    write_gpt(folder, LOW, 8, 2, cfg=1.5, top_k=20, lookahead=4)
    write_gpt(folder, HIGH, 16, 3, cfg=1.0, top_k=0)
    write_gpt(folder, PAR, 8, 4, special=3, cfg=2.0, top_k=0)
    return folder


@pytest.fixture(scope="module")
def bench(folder):
    return token_ablations.TokenBench(Ground(100, folder))


def test_a_row_takes_its_settings_from_the_models_file(bench):
    plain, rgb = bench.row(Row("x", "llamagen", {}, LOW), {})
    assert plain.settings == {"cfg": 1.5, "top_k": 20} and plain.more["model"] == LOW
    assert rgb.shape == (100, 64, 64, 3) and plain.figures.images == 100
    # One pass per token, both branches of guidance.
    assert (plain.more["steps"], plain.more["tokens_a_step"]) == (64, 1.0)
    assert plain.counts["transformer_tokens"] == 64 * 2 * 100
    free, other = bench.row(Row("x", "llamagen", {"cfg": 1.0}, LOW), {"cfg": 3.0, "temperature": 0.5})
    assert free.settings == {"cfg": 1.0, "top_k": 20, "temperature": 0.5}
    assert free.counts["transformer_tokens"] == 64 * 100 and not np.array_equal(rgb, other)


def test_par_decides_a_cell_of_every_region_in_a_pass(bench):
    par, _ = bench.row(Row("x", "par", {}, PAR), {})
    hasty, _ = bench.row(Row("x", "par", {"sequential_start": False}, PAR), {})
    assert (par.more["steps"], hasty.more["steps"]) == (4 + 15, 1 + 15)
    assert par.more["tokens_a_step"] == pytest.approx(64 / 19)


def test_a_window_of_a_whole_row_is_the_raster(bench):
    rows = token_ablations.TABLES["zipar"]
    made = {row.title: bench.row(row, {}) for row in (rows[0], rows[1], next(r for r in rows if r.title == "window 2"))}
    (raster, a), (whole, b), (narrow, c) = made.values()
    assert np.array_equal(a, b) and whole.figures == raster.figures and whole.more["steps"] == 256
    assert not np.array_equal(a, c) and narrow.more["steps"] == 2 * 16 + 14 * 2


def test_every_size_has_its_floors(bench):
    small, large, both = (bench.floors(name) for name in ("par", "zipar", "llamagen"))
    assert list(small) == ["real", "VQ-rebuilt"] and list(large) == ["real 128-pixel", "VQ-rebuilt 128-pixel"]
    assert both == {**small, **large}
    assert all(
        f["real" + size].frechet < f["VQ-rebuilt" + size].frechet for f, size in ((small, ""), (large, " 128-pixel"))
    )
    assert small["real"].frechet > 0, "real pictures beside other real pictures"


def test_every_row_of_pars_table_can_be_drawn(bench):
    results = tables.run_table(bench, "par", log=lambda text: None)
    steps = {r.title: r.more["steps"] for r in results}
    ours, nearby = steps["PAR, 4 regions"], steps["ablation on LlamaGen: adjacent"]
    assert ours == nearby == steps["ablation on LlamaGen: non-local"] == 19, "compared at as many passes"
    assert steps["LlamaGen"] == 64 and steps["ablation on LlamaGen: adjacent, n = 2"] == 2 + 31
    lines = cells_of(tables.to_markdown(results, bench.floors("par")))
    work = ["steps (forwards)", "tokens a forward", "transformer rows an image", "s an image", "cache kB an image"]
    assert lines[0] == ["setting", "class %", "scene %", "whole %", "Frechet", *work]
    assert [line[0] for line in lines[2:4]] == ["*real pictures*", "*VQ-rebuilt pictures*"]
    row = next(line for line in lines if line[0] == "PAR, 4 regions")
    # The condition, four first tokens, three transition tokens and all groups but the last, in both branches.
    assert row[5:8] == ["19", "3.37", str(2 * (1 + 4 + 3 + 60 - 4))]
    # Keys and values of those rows, in fp32.
    assert row[9] == f"{2 * 64 * 16 * 4 * 2 / 1000:.0f}"


def test_only_the_files_that_a_table_needs_have_to_be_there(folder, tmp_path):
    for name in ("vq", "judge", LOW):
        shutil.copy(folder / f"{name}.safetensors", tmp_path)
    bench = token_ablations.TokenBench(Ground(100, tmp_path))
    bench.expect("llamagen-settings")
    assert bench.row(token_ablations.TABLES["llamagen-settings"][0], {})[0].more["steps"] == 64
    for name, file in (("zipar", "llamagen"), ("par", "par")):
        with pytest.raises(UserError, match=f"^tables: .*{file}.safetensors.*train-demo --only {file}"):
            bench.expect(name)


def test_the_command_runs_tables_of_both_families(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables.files, "checkpoint", lambda name, _=None: folder / f"{name}.safetensors")
    rows = (Row("plain", "llamagen", {}, LOW), Row("together", "par", {}, PAR))
    monkeypatch.setitem(token_ablations.TABLES, "small", rows)
    out, sheet = tmp_path / "f.json", tmp_path / "s.png"
    files = ["--out", str(out), "--sheet", str(sheet), "--images", "100", "--device", "cpu"]
    # The MAR's files are missing; this is reported before sampling.
    assert main(["ablation", "small,mar", *files]) == 2
    told = capsys.readouterr()
    assert "mar.safetensors is missing" in told.err and "plain" not in told.out
    assert main(["ablation", "small", *files]) == 0
    assert "| *VQ-rebuilt pictures* |" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert list(figures) == ["images", "seed", "batch", "floors", "tables"]
    assert set(figures["floors"]) == {"real", "VQ-rebuilt"}
    first, second = figures["tables"]["small"]
    assert (first["more"]["model"], first["more"]["steps"], second["more"]["steps"]) == (LOW, 64, 19)
    assert first["figures"]["images"] == 100
    with Image.open(sheet) as picture:
        assert picture.size == (10 * 66 - 2, 2 * 66 - 2), "ten pictures a row, a line a row"
