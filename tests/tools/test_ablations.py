"""The ablation tables, on tiny random checkpoints: they run, measure the right images, and report errors."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.bench.initialise import initialise_mar
from fastar_nodes.cli.main import main
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder
from fastar_nodes.model_loaders.networks.mar import MAR
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import make
from fastar_nodes.samplers.tokens.settings import TarPromptSettings
from fastar_nodes.tools import files
from fastar_nodes.tools.ablations import hybrid as hybrid_tables
from fastar_nodes.tools.ablations import mar as ablations
from fastar_nodes.tools.ablations import tables
from fastar_nodes.tools.ablations.command import BENCHES
from fastar_nodes.tools.ablations.tables import bench_of
from fastar_nodes.tools.lantern import find
from fastar_nodes.tools.training import recipes
from fastar_nodes.tools.training.judge import Judge
from fastar_nodes.tools.training.token_recipes import RECIPES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    recipes.save_checkpoint(KLAutoencoder(tiny.KL), folder / "kl.safetensors", groups=4)
    about = {"heads": 2, "label_set": "picture-book", "t_max": 950}
    recipes.save_checkpoint(initialise_mar(MAR(tiny.MAR)), folder / "mar.safetensors", **about)
    recipes.save_checkpoint(Judge(), folder / "judge.safetensors", tolerance=0.05)
    return ablations.MARBench(tables.Ground(100, folder))


FEW = {"ar_steps": 4, "diffusion_steps": 3}


def test_a_row_counts_and_judges_all_pictures(bench):
    result, rgb = bench.row(tables.Row("x", "fasthybrid", {"threshold": 0.9, "guided_steps": 2}), FEW)
    assert rgb.shape == (100, 64, 64, 3) and result.figures.images == 100
    assert result.counts["transformer_passes"] == 4 and result.acceptance is not None
    plain, _ = bench.row(tables.Row("x", "mar", {}), FEW)
    # Guidance doubles the rows: 64 tokens x 3 steps x 2 branches x 100 images.
    assert plain.counts["head_rows"] == 64 * 3 * 2 * 100


def test_pictures_do_not_depend_on_the_batch(bench):
    row = tables.Row("x", "mar", {})
    whole, once = bench.pictures(row, FEW)
    bench.batch = 40
    parts, reports = bench.pictures(row, FEW)
    bench.batch = tables.BATCH
    assert np.abs(whole.astype(int) - parts).max() <= 1 and [r.images for r in reports] == [40, 40, 20]
    total = tables.merged(reports)
    assert total.images == 100 and total.counts["head_rows"] == once[0].counts["head_rows"]
    assert reports[0].images == 40, "the parts are left as they are"


def test_the_hybrid_s_tables_run_on_held_out_prompts(bench, monkeypatch, tmp_path):
    """The shipped demo in few steps: every sampler of its tables, judged by what the prompts say."""
    for path in (bench.ground.file("judge"), files.checkpoint("hybrid"), files.checkpoint("kl")):
        shutil.copy(path, tmp_path)
    rows = hybrid_tables.TABLES["hybrid"]
    few = {"ar_steps": 6, "diffusion_steps": 2, "cfg": 3.0}
    kinds = {row.sampler: row for row in reversed(rows)}
    monkeypatch.setitem(hybrid_tables.TABLES, "small", tuple(reversed(kinds.values())))
    made = hybrid_tables.HybridBench(tables.Ground(100, tmp_path, seed=777))
    made.common = few
    made.expect("hybrid-presets")
    results = tables.run_table(made, "small", log=lambda text: None)
    assert [r.sampler for r in results] == ["mar", "fasthybrid", "lazymar", "fasthybrid+lazymar"]
    assert all(r.figures.images == 100 and "both %" in r.figures.cells() for r in results)
    assert results[2].counts["cache_bytes"] > 0 and len(set(made.ground.prompts)) > 50


def test_floors_see_that_real_pictures_are_real(bench):
    floors = bench.floors("mar")
    assert set(floors) == {"real", "rebuilt"} and floors["real"].frechet < floors["rebuilt"].frechet


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in BENCHES for name in kind.tables])
def test_every_table_has_valid_settings(kind, name):
    rows = kind.tables[name]
    assert len({row.title for row in rows}) == len(rows)
    assert bench_of(name, BENCHES) is kind, "a name is one bench's"
    for row in rows:
        make(find(row.sampler).settings, {**kind.common, **row.settings})
        make(TarPromptSettings, {k: v for k, v in row.prompt.items() if k != "codes"})
        if row.model in RECIPES:  # a PAR has fixed groups; their ablations run on LlamaGen
            assert (row.model == "par") == (row.sampler == "par" and "grouping" not in row.settings)


def test_a_table_is_printed_with_its_floors(bench, monkeypatch):
    rows = (tables.Row("plain", "mar", {}), tables.Row("fast", "fasthybrid", {"threshold": 0.5}))
    monkeypatch.setitem(ablations.TABLES, "small", rows)
    monkeypatch.setattr(bench, "common", FEW)
    kept: list[np.ndarray] = []
    results = tables.run_table(bench, "small", log=lambda text: None, keep=kept)
    lines = tiny.cells_of(tables.to_markdown(results, bench.floors("small")))
    heads = ["setting", "class %", "scene %", "whole %", "Frechet", "accepted %", "transformer rows an image"]
    assert lines[0] == [*heads, "head rows an image", "s an image", "head calls a batch"]
    assert [line[0] for line in lines[2:]] == ["*real pictures*", "*rebuilt pictures*", "plain", "fast"]
    assert lines[4][5] == "" and float(lines[5][5]) > 0 and float(lines[4][7]) == 64 * 3 * 2
    assert [k.shape for k in kept] == [(10, 64, 64, 3)] * 2
    cached = bench.row(tables.Row("cached", "lazymar", {"start_step": 1, "refresh_period": 2}), FEW)[0]
    heads, _, plain, cached = tiny.cells_of(tables.to_markdown([results[0], cached], {}))
    assert heads[-1] == "cache kB an image" and plain[-1] == "" and int(cached[-1]) > 0


def test_a_line_of_two_tables_is_drawn_once(bench, monkeypatch):
    first, rgb = bench.row(tables.Row("one", "mar", {}), FEW)
    monkeypatch.setattr(bench, "pictures", None)
    again, same = bench.row(tables.Row("two", "mar", {"cfg": make(SAMPLERS["mar"].settings, {}).cfg}), FEW)
    assert same is rgb and again.title == "two" and again.figures == first.figures


def test_mistakes_are_sentences(bench, capsys):
    with pytest.raises(UserError, match="images: 5"):
        tables.Ground(5)
    with pytest.raises(UserError, match="'nothing'"):
        tables.run_table(bench, "nothing")
    for options, field in ((["mar-settings,nothing"], "table: "), (["mar", "--images", "many"], "images: 'many'")):
        assert main(["ablation", *options]) == 2
        assert field in capsys.readouterr().err
