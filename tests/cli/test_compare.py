"""compare, end to end on random weights of every family: pictures, numbers, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastar_nodes.assembly import Ready, defaults, find_file
from fastar_nodes.cli import compare as command
from fastar_nodes.cli import conditions
from fastar_nodes.cli.models import with_draft
from fastar_nodes.cli.options import source
from fastar_nodes.cli.planning import Planned, measured_against, plan
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import text
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.model_loaders.tar import load_detokenizer
from fastar_nodes.reports.record import COUNTS
from fastar_nodes.samplers.mar.loop import Sampled
from fastar_nodes.samplers.registry import SAMPLERS
from PIL import Image
from safetensors.torch import save_file
from tar_files import tiny_ta_tok
from tiny_files import GPT_SIZE, READER, VQ_SIZE, write, write_gpt, write_vq

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = "--set diffusion_steps=6 --steps 6 --dtype fp32"
# What every command line on a family's tiny file says, with {names} of files.
LINES = {
    "mar": f"--model {{mar}} --decoder {{kl}} {QUICK}",
    "hybrid": f"--model {{hybrid}} --decoder {{kl}} {QUICK}",
    "llamagen": "--model {llamagen} --decoder {vq}",
    "par": "--model {par} --decoder {vq}",
    "tar": "--model {high} --tar {tar} --ta-tok {ta_tok} --decoder {vq} --prompt 'a red boat'",
}


@pytest.fixture
def compare(cli, files):
    """compare on the tiny file of a family."""
    named = files._asdict()
    return lambda family, line="", *more: cli(
        f"compare --device cpu {LINES[family]} {line}".format(**named).replace("\\", "/"), *more
    )


def table(answer) -> dict[str, dict[str, str]]:
    assert answer.code == 0, answer.err
    rows = [[c.strip() for c in line.strip("| ").split("|")] for line in answer.out.splitlines() if line[:2] == "| "]
    return {row[0]: dict(zip(rows[0], row, strict=False)) for row in rows[1:]}


def runs(path="c.json") -> list[dict]:
    return json.loads(Path(path).read_text())["runs"]


def cells(path="compare.png") -> tuple[np.ndarray, np.ndarray]:
    """The insides of the two pictures of a grid."""
    picture = np.asarray(Image.open(path)).astype(int)
    step = picture.shape[1] // 2 - 10
    return picture[100:380, 40:340], picture[100:380, 40 + step : 340 + step]


# ------------------------------------------------------------------------------------------------ pictures and numbers


def test_picture_table_and_json(compare, tmp_path):
    more = "--batch 2 --seed 11 --set fasthybrid.threshold=0.5 --out made/here.png --json c.json --maps maps.png"
    answer = compare("mar", more, "--label", "Cat, 3")
    assert list(table(answer)) == ["MAR", "FastHybrid threshold 0.5"] and "made/here.png" in answer.out
    picture, maps = Image.open("made/here.png"), Image.open("maps.png")
    assert picture.width > 2 * 320 and picture.height > 320 and maps.width > 2 * 320
    assert np.asarray(picture).std() > 5

    numbers = json.loads((tmp_path / "c.json").read_text())
    assert list(numbers) == ["version", "device", "runs"] and numbers["version"] == 1 and numbers["device"] == "cpu"
    mar, fast = numbers["runs"]
    keys = "sampler model settings seed images seconds speedup counts acceptance tokens_per_pass phases".split()
    keys += ["peak_memory_bytes", "memory_estimate_bytes", "quality"]
    for run in (mar, fast):
        assert list(run) == [k for k in keys if k not in ("acceptance", "quality") or run is fast]
        assert list(run["memory_estimate_bytes"]) == ["weights: MAR", "noise", "MAR", "head", "decode"]
        assert list(run["counts"]) == [name for name in COUNTS if name in run["counts"]]
        assert set(run["phases"]) == {"transformer", "head", "decoder"}
        assert run["seed"] == 11 and run["images"] == 4 and run["model"] == "tiny mar"
        assert run["counts"]["transformer_passes"] == 6 and run["counts"]["decoder_passes"] == 1
        assert run["seconds"] > 0 and run["peak_memory_bytes"] is None
    assert (mar["sampler"], fast["sampler"], mar["speedup"]) == ("mar", "fasthybrid", 1.0)
    assert fast["speedup"] == pytest.approx(mar["seconds"] / fast["seconds"], rel=1e-3)
    assert "accepted" not in mar["counts"]  # counts that do not apply are left out
    assert fast["settings"]["threshold"] == 0.5 and fast["settings"]["ar_steps"] == 6
    # Six steps decide 16 tokens of 4 images, and only the first step's have no draft.
    assert fast["counts"]["accepted"] + fast["counts"]["rejected"] <= 4 * 15


@pytest.mark.parametrize(
    "family, line",
    [
        ("mar", "--set fasthybrid.lookahead=0 --label boat"),
        ("llamagen", "--set window=4 --set mask_undecoded=no --label cat"),
        ("tar", "--samplers tar,mulosd --draft {low} --set mulosd.preset=exact"),
    ],
)
def test_an_exact_setting_draws_the_baselines_picture_and_another_seed_another(compare, family, line):
    table(compare(family, line))
    left, right = cells()
    assert (left == right).all() and left.std() > 5
    if family == "mar":
        table(compare(family, f"{line} --seed 2"))
        assert (cells()[0] != left).mean() > 0.2


def test_all_families_of_the_demo_in_one_run(cli, tiny_demo):
    line = "compare --label boat --samplers zipar,par,fasthybrid,mar,llamagen --set window=2 --steps 3 --set diffusion_steps=4"
    rows = table(cli(f"{line} --device cpu --batch 2 --out c.png --json c.json --maps m.png"))
    # Family by family in the order they are named, in each the baseline first.
    assert list(rows) == ["LlamaGen", "ZipAR", "PAR", "MAR", "FastHybrid"]
    assert rows["LlamaGen"]["speed-up"] == rows["MAR"]["speed-up"] == "1.00x"
    assert [rows[name]["passes"] for name in rows] == ["16", "12", "7", "3", "3"]
    numbers = {run["sampler"]: run for run in runs()}
    assert list(numbers) == ["llamagen", "zipar", "par", "mar", "fasthybrid"]
    for name, base in (("par", "llamagen"), ("zipar", "llamagen"), ("fasthybrid", "mar")):
        assert numbers[name]["speedup"] == pytest.approx(numbers[base]["seconds"] / numbers[name]["seconds"], rel=1e-3)
    # The PAR has one size; the LlamaGen of that size is compared with it.
    assert {name: numbers[name]["model"] for name in ("par", "zipar")} == {"par": "tiny par", "zipar": "tiny llamagen"}
    assert numbers["par"]["tokens_per_pass"] == pytest.approx(16 / 7, rel=1e-3)
    assert numbers["llamagen"]["counts"]["cache_bytes"] > 0
    assert set(numbers["par"]["phases"]) == {"transformer", "sampling", "decoder"}
    assert numbers["zipar"]["settings"]["cfg"] == 2.0 and numbers["zipar"]["settings"]["top_k"] == 0  # the file's own
    assert np.asarray(Image.open("c.png")).std() > 5 and Image.open("m.png").width > 4 * 320


# Command lines on the demo: rows, their passes, models in the report.
DEMO = {
    "--samplers llamagen,zipar,zipar:exact --set zipar.window=2 --set zipar:exact.preset=exact": (
        "LlamaGen ZipAR ZipAR,",  # without PAR it is the larger one
        "64 28 64",
        ["tiny llamagen"] * 3,
    ),
    "--label cat --samplers llamagen,zipar:all,mulosd --set zipar:all.window=256": (
        "LlamaGen ZipAR, MuLo-SD",  # the smaller one drafts
        "64 64 *",
        ["tiny llamagen"] * 3,
    ),
    "--prompt 'a red boat'": ("Tar ZipAR MuLo-SD", "64 * *", ["tiny high"] * 3),
    "--prompt cat --samplers tar,zipar,llamagen": (
        "Tar ZipAR LlamaGen",
        "64 * 64",
        ["tiny high", "tiny high", "tiny llamagen"],
    ),
}


@pytest.mark.parametrize("line", DEMO)
def test_models_of_the_demo(cli, tiny_demo, line):
    names, passes, models = DEMO[line]
    rows = table(cli(f"compare --device cpu --json c.json {line}"))
    assert [name.split(" ")[0] for name in rows] == names.split()
    found = zip(rows.values(), passes.split(), strict=True)
    assert all(count in ("*", row["passes"]) for row, count in found)
    assert [run["model"] for run in runs()] == models
    baselines = ("llamagen", "tar")
    assert all(run["speedup"] == 1.0 for run in runs() if run["sampler"] in baselines)
    assert all(run["counts"]["draft_passes"] == 16 for run in runs() if run["sampler"] == "mulosd")


def test_a_prompt_draws_with_the_demos_tar(cli, tiny_demo):
    line = "compare --prompt 'a red boat at sunset' --samplers zipar,mulosd,tar --set zipar.window=2 --set acceptance_target=0.5"
    rows = table(cli(f"{line} --batch 2 --device cpu --json c.json --maps m.png"))
    assert [name.split(" ")[0] for name in rows] == ["Tar", "ZipAR", "MuLo-SD"] and rows["Tar"]["speed-up"] == "1.00x"
    tar, zipar, mulosd = runs()
    assert {run["model"] for run in runs()} == {"tiny high"} and mulosd["images"] == 2
    assert tar["counts"]["transformer_passes"] == 64 and zipar["counts"]["transformer_passes"] == 28
    assert mulosd["speedup"] == pytest.approx(tar["seconds"] / mulosd["seconds"], rel=1e-3)
    assert tar["settings"]["top_k"] == 0 and tar["settings"]["cfg"] == 2.0 and 0.3 < mulosd["acceptance"] < 0.7
    assert np.asarray(Image.open("compare.png")).std() > 5 and Image.open("m.png").width > 3 * 320


def test_samplers_of_masked_models_take_prompts(compare):
    more = "--samplers mar,mar:disa,fasthybrid,lazymar,fasthybrid+lazymar --set mar:disa.diffusion_steps_end=2"
    answer = compare("hybrid", f"{more} --set lazymar.refresh_period=1 --json c.json --prompt 'a red boat' --prompt ''")
    assert answer.code == 0, answer
    assert [run["sampler"] for run in runs()] == ["mar", "mar", "fasthybrid", "lazymar", "fasthybrid+lazymar"]
    assert all(run["counts"]["llm_rows"] and run["images"] == 2 for run in runs())
    assert runs()[0]["settings"]["cfg_schedule"] == "constant"
    pictures = []
    for negative in ("", "--negative 'a boat'"):
        table(compare("hybrid", f"--samplers mar --prompt 'a red boat' {negative}"))
        pictures.append(np.asarray(Image.open("compare.png"))[100:380, 40:340])
    assert pictures[0].std() > 0 and not np.array_equal(*pictures)


def test_prompts_for_models_that_read_them(compare, sentence, files, tmp_path, monkeypatch):
    config = replace(GPT_SIZE, condition="text", condition_size=6, text_rows=8)
    model = write_gpt(tmp_path / "t2i.safetensors", 9, config=config, label_set="", defaults={})
    asked = []

    class Encoder:
        def encode(self, prompts):
            return [torch.ones(len(prompt.split()), 6) for prompt in prompts]

    monkeypatch.setattr(text, "load_text_encoder", lambda path, *more: asked.append((path, *more)) or Encoder())
    line = f"--model {model.as_posix()} --encoder {{vq}} --json c.json"
    assert list(table(compare("llamagen", f"{line} --text 'a red boat' --text cat --batch 2"))) == ["LlamaGen", "ZipAR"]
    assert asked == [(files.vq, "auto", torch.device("cpu"))]
    assert runs()[0]["images"] == 4 and runs()[0]["settings"]["cfg"] == 7.5 and runs()[0]["settings"]["top_k"] == 1000
    for more, field in (("--label cat", "label"), ("--text '  '", "text"), ("", "text")):
        assert sentence(compare("llamagen", f"{line} {more}")).startswith(f"{field}: ")


def test_files_of_par_and_tar(compare, cli, files):
    assert list(table(compare("par", "--label 3"))) == ["PAR"]
    assert list(table(compare("tar", "--draft {low} --json c.json"))) == ["Tar", "ZipAR", "MuLo-SD"]
    assert runs()[0]["settings"]["top_k"] == 0 and {run["model"] for run in runs()} == {"tiny high"}
    # A file that holds TA-Tok and decoder.
    whole = cli("compare --prompt cat --device cpu", "--model", files.whole, "--tar", files.tar)
    assert list(table(whole)) == ["Tar", "ZipAR"]


# ------------------------------------------------------------------------------------------------ mistakes

BAD = [
    ("samplers", "mar", "--samplers mar,fasthybrid+cspd"),
    ("samplers", "mar", "--samplers mar,tar"),
    ("samplers", "mar", "--samplers mar,zipar"),
    ("samplers", "mar", "--samplers mar,nosuch"),
    ("samplers", "mar", "--samplers ,"),
    ("text", "mar", "--text cat"),
    ("set", "mar", "--set threshold"),
    ("set", "mar", "--set fasthybrid.threshold="),
    ("set", "mar", "--set fasthybrid.nosuch=1"),
    ("set", "mar", "--set nosuch=1"),
    ("set", "mar", "--set mar.threshold=0.5"),
    ("set", "mar", "--set cspd.draft_length=4"),
    ("set", "mar", "--samplers mar --set fasthybrid.threshold=0.9"),
    ("threshold", "mar", "--set fasthybrid.threshold=abc"),
    ("threshold", "mar", "--set fasthybrid.threshold=7"),
    ("preset", "mar", "--set fasthybrid.preset=faster"),
    ("draft", "mar", "--samplers mar,cspd"),
    ("ar_steps", "mar", "--steps 17"),
    ("label", "mar", "--label dragon"),
    ("label", "mar", "--label 10"),
    ("label", "mar", "--label ,"),
    ("seed", "mar", "--seed -1"),
    ("seed", "mar", "--seed many"),
    ("batch", "mar", "--batch 0"),
    ("device", "mar", "--device abacus"),
    ("out", "mar", "--out picture.docx"),
    ("json", "mar", "--json numbers.txt"),
    ("decoder", "mar", "--decoder nosuch.safetensors"),
    ("checkpoint", "mar", "--model nosuch"),
    ("checkpoint", "mar", "--model {kl}"),
    ("python -m fastar_nodes compare", "mar", "--dtype int4"),
    ("python -m fastar_nodes compare", "mar", "--nosuch"),
    ("prompt", "hybrid", ""),
    ("label", "hybrid", "--label cat"),
    ("model", "par", "--samplers llamagen"),
    ("grouping", "llamagen", "--samplers par"),
    ("samplers", "llamagen", "--samplers llamagen,fasthybrid"),
    ("samplers", "llamagen", "--samplers mar"),
    ("samplers", "llamagen", "--model mar-base --samplers zipar"),  # known before it is downloaded
    ("checkpoint", "llamagen", "--model {vq} --samplers zipar"),
    ("steps", "llamagen", "--steps 4"),
    ("grid", "llamagen", "--grid 8"),
    ("grid", "llamagen", "--grid many"),
    ("label", "llamagen", "--label 10"),
    ("text", "llamagen", "--text cat"),
    ("window", "llamagen", "--set window=0"),
    ("set", "llamagen", "--set llamagen.window=2"),
    ("grouping", "par", "--set par.grouping=mine"),
    ("samplers", "llamagen", "--draft x --samplers cspd"),
    ("set", "llamagen", "--samplers llamagen --set prompt.detail=81"),
    ("draft", "tar", "--samplers mulosd"),
    ("draft", "tar", "--samplers mulosd --draft {high}"),
    ("draft", "tar", "--samplers mulosd --draft {llamagen}"),
    ("samplers", "tar", "--samplers llamagen"),
    ("samplers", "tar", "--samplers tar,par"),
    ("label", "tar", "--label cat --samplers tar"),
    ("detail", "tar", "--set prompt.detail=5"),
    ("colour", "tar", "--set prompt.colour=5"),
    ("set", "tar", "--set prompt.detail"),
    ("set", "tar", "--set mulosd.tau=0"),
    ("set", "tar", "--set tau=0"),
    ("checkpoint", "tar", "--tar nowhere.safetensors"),
    ("text", "tar", f"--prompt '{'cat ' * 100}'"),
    ("model", "tar", "--model tar-1.5b"),
]


@pytest.mark.parametrize("field, family, line", BAD)
def test_bad_input_is_one_sentence(compare, sentence, tmp_path, monkeypatch, field, family, line):
    monkeypatch.setattr("socket.socket.connect", None)
    assert sentence(compare(family, line, "--models", tmp_path)).startswith(f"{field}: ")
    assert not list(tmp_path.iterdir()), "nothing was written"


def kl_of_6_channels(path):
    write(KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=6, groups=4)), path, 5, groups=4)


PARTS = {
    "other latents": ("decoder", "mar", "--decoder", kl_of_6_channels),
    "other codes": ("decoder", "llamagen", "--decoder", lambda path: write_vq(path, replace(VQ_SIZE, codes=30))),
    "other codes of Tar": ("decoder", "tar", "--decoder", lambda path: write_vq(path, replace(VQ_SIZE, codes=30))),
    "a wider TA-Tok": (
        "ta_tok",
        "tar",
        "--ta-tok",
        lambda path: save_file(tiny_ta_tok(replace(READER, width=36)).state_dict(), path),
    ),
    "more semantic codes": (
        "condition",
        "tar",
        "--ta-tok",
        lambda path: save_file(tiny_ta_tok(replace(READER, codes=30)).state_dict(), path),
    ),
    "a text": ("checkpoint", "mar", "--model", lambda path: path.write_text("hello")),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_fit(compare, sentence, tmp_path, name):
    field, family, option, make = PARTS[name]
    make(tmp_path / "other.safetensors")
    assert sentence(compare(family, "", option, tmp_path / "other.safetensors")).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "field, line, gone",
    [
        ("checkpoint", "compare --samplers llamagen,par", "par"),
        ("checkpoint", "compare --prompt cat", "dtok"),
        ("decoder", "compare --samplers mar,llamagen --decoder {kl}", ""),
        ("decoder", "compare --prompt cat --samplers tar,llamagen --decoder {vq}", ""),
        ("samplers", "bench --random LlamaGen-B --samplers tar", ""),
    ],
)
def test_what_the_demo_cannot_do(cli, tiny_demo, files, sentence, field, line, gone):
    if gone:
        (tiny_demo / f"{gone}.safetensors").unlink()
    assert sentence(cli(f"{line} --device cpu".format(**files._asdict()))).startswith(f"{field}: ")


def test_latents_that_are_not_finite_are_reported(compare, sentence, monkeypatch):
    draw = command.draw

    def spoilt(*a):
        latents, report = draw(*a)
        return Sampled(latents * float("nan"), report)

    monkeypatch.setattr(command, "draw", spoilt)
    assert "not finite" in sentence(compare("mar"))


# ------------------------------------------------------------------------------------------------ models and settings


def test_a_folder_called_demo_does_not_hide_the_demo(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "mine.safetensors").touch()
    built_in = root / "demo" / "checkpoints"
    assert find_file("demo", "mar", tmp_path / "models") == built_in / "mar.safetensors"
    assert find_file("demo-kl", "kl", tmp_path / "models") == built_in / "kl.safetensors"
    assert find_file("mine.safetensors", "mar", tmp_path / "models") == Path("mine.safetensors")


def test_defaults_come_from_the_file_and_suit_the_model(files):
    model = load_mar(files.mar, "fp32")
    assert defaults(Ready("mar", model)) == {"ar_steps": 16}  # never more than it has tokens
    stated = Ready("mar", model, metadata={"defaults": '{"ar_steps": 8, "threshold": 0.95}'})
    assert defaults(stated) == {"ar_steps": 8, "threshold": 0.95}
    ready = dict.fromkeys(("mar", "fasthybrid"), stated)
    mar, fast = plan("mar,fasthybrid", [], None, ready)
    assert (mar.settings.ar_steps, fast.settings.threshold) == (8, 0.95)
    assert plan("mar", ["ar_steps=4"], 5, ready)[0].settings.ar_steps == 4  # --set takes precedence over --steps
    assert defaults(Ready("mar", model, metadata={"defaults": "nonsense"})) == {"ar_steps": 16}


def test_settings_of_all_and_of_one():
    mar, fast = plan("mar,fasthybrid", ["cfg=2", "fasthybrid.cfg=4", "fasthybrid.lookahead=3"], 9, {})
    assert (mar.settings.cfg, fast.settings.cfg, fast.settings.lookahead, fast.settings.ar_steps) == (2, 4, 3, 9)
    assert mar.label == "MAR" and fast.label == "FastHybrid cfg 4 lookahead 3"
    names = ("fasthybrid+lazymar", "lazymar+fasthybrid")
    both, again = (plan(name, [f"{name}.threshold=0.9"], 9, {})[0] for name in names)
    assert both == again and both.settings.threshold == 0.9 and both.entry.name == "fasthybrid+lazymar"


def options(**more) -> SimpleNamespace:
    return SimpleNamespace(models=None, dtype="auto", speed="plain", device="cpu", **more)


def test_settings_of_the_prompt(files, monkeypatch):
    seen = []
    monkeypatch.setattr(
        conditions,
        "drive",
        lambda sampler, *_: seen.append(next(sampler).report.settings) or SimpleNamespace(condition="codes"),
    )
    sets, asked = conditions.of_prompt(["cfg=2", "prompt.detail=81", "prompt.temperature=0.5"])
    assert sets == ["cfg=2"]
    on = Ready("tar", load_detokenizer(files.high), choice=str(files.high), path=files.high)
    assert conditions.Builder(source(options()), tar=str(files.tar), asked=asked).codes(on, ["cat"]) == "codes"
    # Settings of the command line take precedence over the file's defaults.
    wanted = {"detail": "81", "temperature": 0.5, "top_k": 15, "top_p": 0.95}
    assert {name: seen[0][name] for name in wanted} == wanted


def test_random_weights_have_no_tokenizer(files):
    ready = Ready("llamagen", load_llamagen(files.llamagen))
    with pytest.raises(UserError, match="^random: "):
        with_draft(plan("mulosd", [], None, {"mulosd": ready}), options(model="demo", draft="auto"))


def test_speed_ups_are_measured_within_a_family_and_a_size(files):
    plain, par = (Ready("llamagen", load_llamagen(file)) for file in (files.llamagen, files.par))
    larger = Ready("llamagen", replace(plain.model, grid=8))
    planned = [
        Planned(SAMPLERS[name], SAMPLERS[name].settings(), {}, ready=on)
        for name, on in (("llamagen", plain), ("zipar", larger), ("par", par), ("zipar", larger))
    ]
    assert measured_against(planned) == [0, 1, 0, 1]
