"""The ablation tables of every family, on tiny random checkpoints: what a row samples, counts and
prints, and errors.
"""

import json
import shutil

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.bench.initialise import initialise_mar
from fastar_nodes.cli.main import main
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, VQAutoencoder
from fastar_nodes.model_loaders.networks.llama import Llama
from fastar_nodes.model_loaders.networks.mar import MAR
from fastar_nodes.samplers.registry import SAMPLERS, find
from fastar_nodes.samplers.settings import make
from fastar_nodes.samplers.tokens.settings import TarPromptSettings
from fastar_nodes.tools import files
from fastar_nodes.tools.ablations import hybrid, mar, tables, tokens
from fastar_nodes.tools.ablations import tar as tar_tables
from fastar_nodes.tools.ablations.command import BENCHES
from fastar_nodes.tools.ablations.mulosd import LlamaGenRepairBench, forwards_alone
from fastar_nodes.tools.ablations.tables import Ground, Row, to_markdown
from fastar_nodes.tools.training import picture_book, recipes, ta_tok_recipe, tar_recipes
from fastar_nodes.tools.training.captions import UNSAID, wishes
from fastar_nodes.tools.training.judge import Judge
from fastar_nodes.tools.training.token_recipes import RECIPES
from PIL import Image

pytestmark = pytest.mark.slow

LOW, HIGH, PAR, DTOK_LOW, DTOK = "llamagen-low", "llamagen", "par", "dtok-low", "dtok"
FEW = {"steps": 4, "diffusion_steps": 3}
FEWEST = {"detail": "81"}
# MuLo-SD's pool leaves a few percent of the tokens below 0.001.
QUICK = {"cfg": 1.0, "draft_window": 1, "resample_window": 1, "neighbours": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    recipes.save_checkpoint(KLAutoencoder(tiny.KL), folder / "kl.safetensors", groups=4)
    about = {"heads": 2, "label_set": "picture-book", "t_max": 950}
    recipes.save_checkpoint(initialise_mar(MAR(tiny.MAR)), folder / "mar.safetensors", **about)
    recipes.save_checkpoint(Judge(), folder / "judge.safetensors", tolerance=0.05)
    recipes.save_checkpoint(tiny.scattered(VQAutoencoder(tiny.VQ), 1), folder / "vq.safetensors", groups=4)
    # lookahead is not a setting of a token sampler; defaults for other samplers are ignored.
    tiny.write_gpt(folder, LOW, 8, 2, cfg=1.5, top_k=20, lookahead=4)
    tiny.write_gpt(folder, HIGH, 16, 3, cfg=1.5, top_k=0)
    tiny.write_gpt(folder, PAR, 8, 4, special=3, cfg=2.0, top_k=0)
    trainer = ta_tok_recipe.build_ta_tok(tiny.TA_TOK)
    tiny.scattered(trainer.net, 2)
    ta_tok_recipe.save_ta_tok(trainer, folder / "ta-tok.safetensors")
    net = tiny.scattered(tar_recipes.build_language(tiny.language()), 3)
    tar_recipes.save_language(net, folder / "tar.safetensors", tiny.TA_TOK.codes, tiny.TA_TOK.side)
    for seed, (name, recipe) in enumerate(tar_recipes.DETOKENIZERS.items()):
        small = tiny.scattered(Llama(tiny.detokenizer(recipe.grid)), 4 + seed)
        tar_recipes.save_detokenizer(small, recipe, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def bench(folder):
    return mar.MARBench(Ground(100, folder))


@pytest.fixture(scope="module")
def token_bench(folder):
    return tokens.TokenBench(Ground(100, folder))


@pytest.fixture(scope="module")
def repairs(folder):
    return LlamaGenRepairBench(Ground(100, folder))


@pytest.fixture(scope="module")
def tar_bench(folder):
    return tar_tables.TarBench(Ground(100, folder))


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in BENCHES for name in kind.tables])
def test_every_table_has_valid_settings(kind, name):
    rows = kind.tables[name]
    assert len({row.title for row in rows}) == len(rows)
    assert tables.bench_of(name, BENCHES) is kind, "a name is one bench's"
    for row in rows:
        make(find(row.sampler).settings, {**kind.common, **row.settings})
        make(TarPromptSettings, {k: v for k, v in row.prompt.items() if k != "codes"})
        if row.model in RECIPES:  # a PAR has fixed groups; their ablations run on LlamaGen
            assert (row.model == PAR) == (row.sampler == "par" and "grouping" not in row.settings)


def test_mistakes_are_sentences(bench, capsys):
    with pytest.raises(UserError, match="images: 5"):
        Ground(5)
    with pytest.raises(UserError, match="'nothing'"):
        tables.run_table(bench, "nothing")
    for options, field in ((["mar-settings,nothing"], "table: "), (["mar", "--images", "many"], "images: 'many'")):
        assert main(["ablation", *options]) == 2
        assert field in capsys.readouterr().err


def test_a_row_counts_and_judges_all_pictures(bench):
    result, rgb = bench.row(Row("x", "fasthybrid", {"threshold": 0.9, "guided_steps": 2}), FEW)
    assert rgb.shape == (100, 64, 64, 3) and result.figures.images == 100
    assert result.counts["transformer_passes"] == 4 and result.acceptance is not None
    plain, rgb = bench.row(Row("one", "mar", {}), FEW)
    # Guidance doubles the rows: 64 tokens x 3 steps x 2 branches x 100 images.
    assert plain.counts["head_rows"] == 64 * 3 * 2 * 100
    again, same = bench.row(Row("two", "mar", {"cfg": make(SAMPLERS["mar"].settings, {}).cfg}), FEW)
    assert same is rgb and again.title == "two" and again.figures == plain.figures, "sampled once"


def test_pictures_do_not_depend_on_the_batch(bench):
    row = Row("x", "mar", {})
    whole, once = bench.pictures(row, FEW)
    bench.batch = 40
    parts, reports = bench.pictures(row, FEW)
    bench.batch = tables.BATCH
    assert np.abs(whole.astype(int) - parts).max() <= 1 and [r.images for r in reports] == [40, 40, 20]
    total = tables.merged(reports)
    assert total.images == 100 and total.counts["head_rows"] == once[0].counts["head_rows"]
    assert reports[0].images == 40, "the parts are left as they are"


def test_the_hybrid_s_tables_run_on_held_out_prompts(folder, monkeypatch, tmp_path):
    """The shipped demo in few steps: every sampler of its tables, judged by what the prompts say."""
    for path in (folder / "judge.safetensors", files.checkpoint("hybrid"), files.checkpoint("kl")):
        shutil.copy(path, tmp_path)
    kinds = {row.sampler: row for row in reversed(hybrid.TABLES["hybrid"])}
    monkeypatch.setitem(hybrid.TABLES, "small", tuple(reversed(kinds.values())))
    made = hybrid.HybridBench(Ground(100, tmp_path, seed=777))
    made.common = {"steps": 6, "diffusion_steps": 2, "cfg": 3.0}
    made.expect("hybrid-presets")
    results = tables.run_table(made, "small", log=lambda text: None)
    assert [r.sampler for r in results] == ["mar", "fasthybrid", "lazymar", "fasthybrid+lazymar"]
    assert all(r.figures.images == 100 and "both %" in r.figures.cells() for r in results)
    assert results[2].counts["cache_bytes"] > 0 and len(set(made.ground.prompts)) > 50


def test_a_table_is_printed_with_its_floors(bench, monkeypatch):
    rows = (Row("plain", "mar", {}), Row("fast", "fasthybrid", {"threshold": 0.5}))
    monkeypatch.setitem(mar.TABLES, "small", rows)
    monkeypatch.setattr(bench, "common", FEW)
    kept: list[np.ndarray] = []
    results, floors = tables.run_table(bench, "small", log=lambda text: None, keep=kept), bench.floors("small")
    assert floors["real"].frechet < floors["rebuilt"].frechet, "real images are real"
    lines = tiny.cells_of(to_markdown(results, floors))
    heads = ["setting", "class %", "scene %", "whole %", "Frechet", "accepted %", "transformer rows an image"]
    assert lines[0] == [*heads, "head rows an image", "s an image", "head calls a batch"]
    assert [line[0] for line in lines[2:]] == ["*real images*", "*rebuilt images*", "plain", "fast"]
    assert lines[4][5] == "" and float(lines[5][5]) > 0 and float(lines[4][7]) == 64 * 3 * 2
    assert [k.shape for k in kept] == [(10, 64, 64, 3)] * 2
    cached = bench.row(Row("cached", "lazymar", {"start_step": 1, "refresh_period": 2}), FEW)[0]
    heads, _, plain, cached = tiny.cells_of(to_markdown([results[0], cached], {}))
    assert heads[-1] == "cache kB an image" and plain[-1] == "" and int(cached[-1]) > 0


def test_every_row_of_pars_table_can_be_drawn(token_bench):
    results = tables.run_table(token_bench, "par", log=lambda text: None)
    steps = {r.title: r.more["steps"] for r in results}
    ours, nearby = steps["PAR, 4 regions"], steps["ablation on LlamaGen: adjacent"]
    assert ours == nearby == steps["ablation on LlamaGen: non-local"] == 19, "compared at as many passes"
    assert steps["LlamaGen"] == 64 and steps["ablation on LlamaGen: adjacent, n = 2"] == 2 + 31
    lines = tiny.cells_of(to_markdown(results, token_bench.floors("par")))
    work = ["steps (forwards)", "tokens a forward", "transformer rows an image", "s an image", "cache kB an image"]
    assert lines[0] == ["setting", "class %", "scene %", "whole %", "Frechet", *work]
    row = next(line for line in lines if line[0] == "PAR, 4 regions")
    # The condition, four first tokens, three transition tokens and all groups but the last, in both branches.
    assert row[5:8] == ["19", "3.37", str(2 * (1 + 4 + 3 + 60 - 4))]
    # Keys and values of those rows, in fp32.
    assert row[9] == f"{2 * 64 * 16 * 4 * 2 / 1000:.0f}"


def test_the_command_runs_tables(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables.files, "checkpoint", lambda name, _=None: folder / f"{name}.safetensors")
    rows = (Row("plain", "llamagen", {}, LOW), Row("together", "par", {}, PAR))
    monkeypatch.setitem(tokens.TABLES, "small", rows)
    out, sheet = tmp_path / "f.json", tmp_path / "s.png"
    options = ["--out", str(out), "--sheet", str(sheet), "--images", "100", "--device", "cpu"]
    # CSpD's draft model is missing; this is reported before sampling.
    assert main(["ablation", "small,cspd", *options]) == 2
    told = capsys.readouterr()
    assert "mar-draft.safetensors is missing" in told.err and "plain" not in told.out
    assert main(["ablation", "small", *options]) == 0
    assert "| *VQ-rebuilt images* |" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert list(figures) == ["images", "seed", "batch", "floors", "tables"]
    assert set(figures["floors"]) == {"real", "VQ-rebuilt"}
    first, second = figures["tables"]["small"]
    assert (first["more"]["model"], first["more"]["steps"], second["more"]["steps"]) == (LOW, 64, 19)
    with Image.open(sheet) as picture:
        assert picture.size == (10 * 66 - 2, 2 * 66 - 2), "ten images a row, a line a row"


def high(sampler="mulosd", **settings):
    return Row("x", sampler, {**(QUICK if sampler == "mulosd" else {"cfg": 1.0}), **settings}, HIGH)


CHOSEN = [high(tau=0.001), high(tau=0.01, expansion=0), *(high(tau=0.001, draft_rows=n) for n in (2, 3)), high(tau=0.0)]
CHOSEN += [high("zipar", window=1), high("llamagen")]


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: f"{chosen.sampler} {chosen.settings}")
def test_forwards_of_a_picture_are_what_it_takes_alone(repairs, chosen):
    settings = make(find(chosen.sampler).settings, chosen.settings)
    _, together = repairs.draw(chosen, settings, range(3))
    alone = [repairs.draw(chosen, settings, range(i, i + 1))[1].counts["transformer_passes"] for i in range(3)]
    assert forwards_alone(together, settings, 8).tolist() == alone
    if 0 < chosen.settings.get("tau", 0):
        assert len(set(alone)) > 1, "nothing was told apart"


def test_a_line_says_what_was_kept_and_what_it_took(repairs):
    result, rgb = repairs.row(high(tau=0.001), {})
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
    rows = (high("llamagen"), high(tau=0.0), high(tau=1.01, resample_window=0))
    plain, kept, redone = (repairs.row(row, {})[0] for row in rows)
    # Where nothing can be accepted, nothing is drafted.
    assert [r.more["forwards"] for r in (plain, kept, redone)] == [256, 22 + 1, 256]
    assert [(r.acceptance, r.more["again"]) for r in (kept, redone)] == [(1.0, 0.0), (None, None)]
    assert plain.work["accepted %"] == plain.work["of the draft"] == ""


def dtok(model: str = DTOK_LOW, prompt=FEWEST, sampler="tar", **settings):
    return Row("x", sampler, {"cfg": 1.0, **settings}, model, prompt)


def test_real_pictures_show_what_the_prompts_ask_for():
    wanted = wishes(200, 3)
    shown, own = tar_tables.fulfilling_scenes(wanted, 5), picture_book.scenes(5, 200, labels=wanted.label.tolist())
    assert all(bool(right.all()) for right in wanted.fulfilled(shown).values())
    for name in ("colour", "place", "size", "time"):
        left = getattr(wanted, name) == UNSAID
        assert name == "colour" or 0 < left.sum() < 200
        assert np.array_equal(getattr(shown, name)[left], getattr(own, name)[left])
    # Places are those of the book, within its jitter.
    assert np.abs(shown.x - (shown.place - 1) * picture_book.PLACE_STEP).max() <= picture_book.JITTER + 1e-6
    assert np.abs(shown.scale - np.array(picture_book.SCALES)[shown.size]).max() <= picture_book.JITTER + 1e-6


def test_figures_are_of_prompts_beside_real_pictures_of_them(tar_bench):
    ground = tar_bench.ground
    assert ground.prompts == wishes(100, tables.SEED).captions() and len(set(ground.prompts)) > 50
    same = ground.figures(ground.real(tables.TEST_SEED))
    assert same.frechet == pytest.approx(0, abs=1e-6) and same.images == 100 and 0 <= same.shares["both"] <= 1
    names = ["thing", "colour", "both", "place", "size", "time", "all", "whole"]
    assert list(same.cells()) == [*(f"{name} %" for name in names), "Frechet"]
    assert list(tar_bench.floors("tar")) == ["real", "VQ-rebuilt", "real 128-pixel", "VQ-rebuilt 128-pixel"]


def test_codes_are_written_once_for_all_that_draw_them(tar_bench, monkeypatch):
    calls, written = [], tar_tables.tar_prompt
    monkeypatch.setattr(tar_tables, "tar_prompt", lambda *a: calls.append(a[2]) or written(*a))
    few, rgb = tar_bench.row(dtok(), {})
    other, hot = tar_bench.row(dtok(temperature=0.0), {})
    assert len(calls) == 1 and not np.array_equal(rgb, hot), "another sampler's setting, the same codes"
    assert few.more["codes"] == other.more["codes"] == 4 and few.more["steps"] == 64
    assert few.more["prompt_seconds"] == other.more["prompt_seconds"] > 0
    assert few.settings["top_p"] == tar_recipes.token_defaults(8)["top_p"], "the file's own settings"
    assert list(few.work) == ["codes", "prompt s an image", "steps (forwards)", "s an image"]
    assert few.work["codes"] == "4" and f"| x       | {few.figures.cells()['thing %']}" in to_markdown([few], {})
    cold, _ = tar_bench.row(dtok(prompt={**FEWEST, "temperature": 0.0}), {})
    assert len(calls) == 2 and calls[1].temperature == 0 and cold.more["prompt"]["temperature"] == 0
    assert tar_bench.row(dtok(prompt={"detail": "169"}), {})[0].more["codes"] == 9
    own = dtok(prompt={**FEWEST, "codes": tar_tables.OF_PICTURES})
    done, drawn = tar_bench.row(own, {})
    x = torch.from_numpy(tar_bench.ground.real(tables.TEST_SEED + 1)).permute(0, 3, 1, 2) / 255
    assert torch.equal(torch.stack(tar_bench.codes(own)[0].codes), tar_bench.ta_tok.codes(x, 3).cpu())
    assert done.more["prompt_seconds"] is None and done.work["prompt s an image"] == "" and done.more["codes"] == 4
    assert not np.array_equal(rgb, drawn)


def test_the_small_de_tokenizer_drafts_for_the_large_one(folder):
    repairs = tar_tables.TarRepairBench(Ground(100, folder))
    fast = dtok(DTOK, sampler="mulosd", tau=0.0, draft_window=1)
    assert repairs.needs(fast) == ("vq", DTOK, "ta-tok", "tar", DTOK_LOW)
    done, _ = repairs.row(fast, {})
    assert (done.more["forwards"], done.more["draft_forwards"]) == (23, 22)
    assert (done.acceptance, done.more["model"]) == (1.0, DTOK)
    assert done.figures.images == 100 and "both %" in done.figures.cells()
