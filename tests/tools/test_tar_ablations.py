"""Tar's tables, on tiny random checkpoints: one set of codes for all samplers, and agreement with the prompts."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.model_loaders.networks.llama import Llama
from fastar_nodes.tools.ablations import tables
from fastar_nodes.tools.ablations import tar as tar_ablations
from fastar_nodes.tools.ablations.tables import Ground, Row, to_markdown
from fastar_nodes.tools.ablations.tar import OF_PICTURES, TarBench, TarRepairBench, fulfilling_scenes
from fastar_nodes.tools.training import picture_book, ta_tok_recipe, tar_recipes
from fastar_nodes.tools.training.captions import UNSAID, wishes
from fastar_nodes.tools.training.tar_recipes import DETOKENIZERS
from tiny_demo import TA_TOK, new_folder, scattered

LOW, HIGH = "dtok-low", "dtok"
FEWEST = {"detail": "81"}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = new_folder(tmp_path_factory)
    trainer = ta_tok_recipe.build_ta_tok(TA_TOK)
    scattered(trainer.net, 2)
    ta_tok_recipe.save_ta_tok(trainer, folder / "ta-tok.safetensors")
    net = scattered(tar_recipes.build_language(tiny.language()), 3)
    tar_recipes.save_language(net, folder / "tar.safetensors", TA_TOK.codes, TA_TOK.side)
    for seed, (name, recipe) in enumerate(DETOKENIZERS.items()):
        small = Llama(tiny.detokenizer(recipe.grid))
        tar_recipes.save_detokenizer(scattered(small, 4 + seed), recipe, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def bench(folder):
    return TarBench(Ground(100, folder))


def row(model: str = LOW, prompt=FEWEST, sampler="tar", **settings):
    return Row("x", sampler, {"cfg": 1.0, **settings}, model, prompt)


def test_real_pictures_show_what_the_prompts_ask_for():
    wanted = wishes(200, 3)
    shown, own = fulfilling_scenes(wanted, 5), picture_book.scenes(5, 200, labels=wanted.label.tolist())
    assert all(bool(right.all()) for right in wanted.fulfilled(shown).values())
    for name in ("colour", "place", "size", "time"):
        left = getattr(wanted, name) == UNSAID
        assert name == "colour" or 0 < left.sum() < 200
        assert np.array_equal(getattr(shown, name)[left], getattr(own, name)[left])
    # Places are those of the book, within its jitter.
    assert np.abs(shown.x - (shown.place - 1) * picture_book.PLACE_STEP).max() <= picture_book.JITTER + 1e-6
    assert np.abs(shown.scale - np.array(picture_book.SCALES)[shown.size]).max() <= picture_book.JITTER + 1e-6
    assert shown.x.dtype == shown.scale.dtype == np.float32


def test_figures_are_of_prompts_beside_real_pictures_of_them(bench):
    ground = bench.ground
    assert ground.prompts == wishes(100, tables.SEED).captions() and len(set(ground.prompts)) > 50
    same = ground.figures(ground.real(tables.TEST_SEED))
    assert same.frechet == pytest.approx(0, abs=1e-6) and same.images == 100 and 0 <= same.shares["both"] <= 1
    names = ["thing", "colour", "both", "place", "size", "time", "all", "whole"]
    assert list(same.cells()) == [*(f"{name} %" for name in names), "Frechet"]
    assert list(bench.floors("tar")) == ["real", "VQ-rebuilt", "real 128-pixel", "VQ-rebuilt 128-pixel"]


def test_codes_are_written_once_for_all_that_draw_them(bench, monkeypatch):
    calls, written = [], tar_ablations.tar_prompt
    monkeypatch.setattr(tar_ablations, "tar_prompt", lambda *a: calls.append(a[2]) or written(*a))
    bench._codes.clear()
    few, rgb = bench.row(row(), {})
    other, hot = bench.row(row(temperature=0.0), {})
    assert len(calls) == 1 and not np.array_equal(rgb, hot), "another sampler's setting, the same codes"
    assert few.more["codes"] == other.more["codes"] == 4
    assert few.more["prompt_seconds"] == other.more["prompt_seconds"] > 0
    cold, _ = bench.row(row(prompt={**FEWEST, "temperature": 0.0}), {})
    assert len(calls) == 2 and calls[1].temperature == 0 and cold.more["prompt"]["temperature"] == 0
    assert bench.row(row(), {})[1] is rgb and len(calls) == 2
    assert bench.row(row(prompt={"detail": "169"}), {})[0].more["codes"] == 9


def test_a_pictures_own_codes_are_ta_toks(bench):
    own = row(prompt={**FEWEST, "codes": OF_PICTURES})
    done, rgb = bench.row(own, {})
    x = torch.from_numpy(bench.ground.real(tables.TEST_SEED + 1)).permute(0, 3, 1, 2) / 255
    assert torch.equal(torch.stack(bench.codes(own)[0].codes), bench.ta_tok.codes(x, 3).cpu())
    assert done.more["prompt_seconds"] is None and done.work["prompt s an image"] == "" and done.more["codes"] == 4
    assert not np.array_equal(rgb, bench.row(row(), {})[1])


def test_a_row_says_what_it_took(bench):
    low = bench.row(row(), {})[0]
    assert low.more["steps"] == 64
    assert low.settings["top_p"] == tar_recipes.token_defaults(8)["top_p"], "the file's own settings"
    assert list(low.work) == ["codes", "prompt s an image", "steps (forwards)", "s an image"]
    assert low.work["codes"] == "4" and f"| x       | {low.figures.cells()['thing %']}" in to_markdown([low], {})


def test_the_small_de_tokenizer_drafts_for_the_large_one(folder):
    repairs = TarRepairBench(Ground(100, folder))
    fast = row(HIGH, sampler="mulosd", tau=0.0, draft_window=1)
    assert repairs.needs(fast) == ("vq", HIGH, "ta-tok", "tar", LOW)
    done, _ = repairs.row(fast, {})
    assert (done.more["forwards"], done.more["draft_forwards"]) == (23, 22)
    assert (done.acceptance, done.more["model"]) == (1.0, HIGH)
    assert done.figures.images == 100 and "both %" in done.figures.cells()
