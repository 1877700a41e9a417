"""compare on token models and on several families at once, with random weights."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fastar_nodes.assembly import Ready
from fastar_nodes.cli.planning import Planned, measured_against
from fastar_nodes.model_loaders import text
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.samplers.registry import SAMPLERS, family_of
from PIL import Image
from tiny_files import GPT_SIZE, VQ_SIZE, write_gpt, write_vq

pytestmark = pytest.mark.usefixtures("one_thread")


def args(files, model, *more):
    return ("compare", "--model", model, "--decoder", files.vq, "--device", "cpu", *more)


def table(answer):
    assert answer.code == 0, answer.err
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in answer.out.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: dict(zip(rows[0], row, strict=False)) for row in rows[1:]}


def test_all_families_of_the_demo_in_one_run(cli, tiny_demo, tmp_path):
    answer = cli(
        *"compare --label boat --samplers zipar,par,fasthybrid,mar,llamagen --set window=2 --steps 3 --set diffusion_steps=4".split(),
        *"--device cpu --batch 2 --out c.png --json c.json --maps m.png".split(),
    )
    rows = table(answer)
    # Family by family in the order they are named, in each the baseline first.
    assert list(rows) == ["LlamaGen", "ZipAR", "PAR", "MAR", "FastHybrid"]
    assert rows["LlamaGen"]["speed-up"] == rows["MAR"]["speed-up"] == "1.00x"
    assert [rows[name]["passes"] for name in rows] == ["16", "12", "7", "3", "3"]
    numbers = {run["sampler"]: run for run in json.loads((tmp_path / "c.json").read_text())["runs"]}
    assert list(numbers) == ["llamagen", "zipar", "par", "mar", "fasthybrid"]
    for name, base in (("par", "llamagen"), ("zipar", "llamagen"), ("fasthybrid", "mar")):
        assert numbers[name]["speedup"] == pytest.approx(numbers[base]["seconds"] / numbers[name]["seconds"], rel=1e-3)
    # The PAR has one size; the LlamaGen of that size is compared with it.
    assert {name: numbers[name]["model"] for name in ("par", "zipar")} == {"par": "tiny par", "zipar": "tiny llamagen"}
    assert numbers["llamagen"]["tokens_per_pass"] == 1 and numbers["par"]["tokens_per_pass"] == pytest.approx(
        16 / 7, rel=1e-3
    )
    assert numbers["llamagen"]["counts"]["cache_bytes"] > 0 and set(numbers["par"]["phases"]) == {
        "transformer",
        "sampling",
        "decoder",
    }
    assert numbers["zipar"]["settings"]["cfg"] == 2.0 and numbers["zipar"]["settings"]["top_k"] == 0  # the file's own
    assert np.asarray(Image.open("c.png")).std() > 5 and Image.open("m.png").width > 4 * 320


def test_without_par_the_demo_is_the_larger_llamagen(cli, tiny_demo):
    rows = table(
        cli(
            *"compare --samplers llamagen,zipar,zipar:exact --set zipar.window=2 --set zipar:exact.preset=exact --device cpu".split()
        )
    )
    assert [row["passes"] for row in rows.values()] == ["64", "28", "64"]


def test_a_full_window_draws_llamagens_picture(cli, files):
    answer = cli(*args(files, files.llamagen, "--set", "window=4", "--set", "mask_undecoded=no", "--label", "cat"))
    assert list(table(answer)) == ["LlamaGen", "ZipAR"]  # what suits a LlamaGen
    picture = np.asarray(Image.open("compare.png")).astype(int)
    step = picture.shape[1] // 2 - 10
    left, right = picture[100:380, 40:340], picture[100:380, 40 + step : 340 + step]
    assert (left == right).all() and left.std() > 5


def test_a_par_file_is_sampled_by_par(cli, files):
    assert list(table(cli(*args(files, files.par, "--label", "3")))) == ["PAR"]


BAD = [
    ("model", "par", "--samplers llamagen"),
    ("grouping", "llamagen", "--samplers par"),
    ("samplers", "llamagen", "--samplers llamagen,fasthybrid"),
    ("samplers", "llamagen", "--samplers mar"),
    ("checkpoint", "vq", "--samplers zipar"),
    ("steps", "llamagen", "--steps 4"),
    ("grid", "llamagen", "--grid 8"),
    ("grid", "llamagen", "--grid many"),
    ("label", "llamagen", "--label 10"),
    ("text", "llamagen", "--text cat"),
    ("window", "llamagen", "--set window=0"),
    ("set", "llamagen", "--set llamagen.window=2"),
    ("grouping", "par", "--set par.grouping=mine"),
    ("samplers", "llamagen", "--draft x --samplers cspd"),
]


@pytest.mark.parametrize("field, model, more", BAD)
def test_bad_input_is_one_sentence(cli, files, sentence, tmp_path, field, model, more):
    message = sentence(cli(*args(files, getattr(files, model), *more.split(), "--models", tmp_path)))
    assert message.startswith(f"{field}: ") and not list(tmp_path.iterdir())


def test_a_catalogued_model_of_another_family_is_reported_before_it_is_downloaded(cli, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    message = sentence(
        cli("compare", "--model", "mar-base", "--samplers", "zipar", "--models", tmp_path, "--device", "cpu")
    )
    assert "zipar samples a LlamaGen or a PAR" in message and "mar-base is not one" in message


def test_two_families_cannot_share_a_decoder(cli, tiny_demo, files, sentence):
    assert "two families" in sentence(
        cli("compare", "--samplers", "mar,llamagen", "--decoder", files.kl, "--device", "cpu")
    )


def test_a_demo_that_is_not_there_is_reported(cli, tiny_demo, sentence):
    (tiny_demo / "par.safetensors").unlink()
    assert "the built-in demo-par is missing" in sentence(
        cli("compare", "--samplers", "llamagen,par", "--device", "cpu")
    )


def test_a_tokenizer_of_other_codes_is_named(cli, files, sentence, tmp_path):
    other = write_vq(tmp_path / "other.safetensors", replace(VQ_SIZE, codes=30))
    message = sentence(cli(*args(files, files.llamagen)[:4], other, "--device", "cpu"))
    assert "decoder: tiny vq has 30 codes, tiny llamagen writes 24" in message


def test_prompts_for_models_that_read_them(cli, files, sentence, tmp_path, monkeypatch):
    config = replace(GPT_SIZE, condition="text", condition_size=6, text_rows=8)
    model = write_gpt(tmp_path / "t2i.safetensors", 9, config=config, label_set="", defaults={})
    asked = []

    class Encoder:
        def encode(self, prompts):
            return [torch.ones(len(prompt.split()), 6) for prompt in prompts]

    monkeypatch.setattr(text, "load_text_encoder", lambda path, *more: asked.append((path, *more)) or Encoder())
    rows = table(
        cli(
            *args(
                files,
                model,
                "--text",
                "a red boat",
                "--text",
                "cat",
                "--batch",
                2,
                "--encoder",
                files.vq,
                "--json",
                "t.json",
            )
        )
    )
    assert list(rows) == ["LlamaGen", "ZipAR"] and asked == [(files.vq, "auto", torch.device("cpu"))]
    numbers = json.loads((tmp_path / "t.json").read_text())["runs"][0]
    assert numbers["images"] == 4 and numbers["settings"]["cfg"] == 7.5 and numbers["settings"]["top_k"] == 1000
    for more in (("--label", "cat"), ("--text", "  "), ()):
        assert "say what with --text" in sentence(cli(*args(files, model, *more)))


def test_families_in_the_registry():
    assert [name for name, entry in SAMPLERS.items() if entry.baseline] == ["mar", "llamagen", "tar"]
    names = ("zipar", "tar", "fasthybrid+lazymar", "mar+other", "nosuch")
    assert [family_of(name) for name in names] == ["llamagen", "tar", "mar", "mar", ""]


def test_speed_ups_are_measured_within_a_family_and_a_size(files):
    plain, par = (Ready("llamagen", load_llamagen(file)) for file in (files.llamagen, files.par))
    larger = Ready("llamagen", replace(plain.model, grid=8))
    planned = [
        Planned(SAMPLERS[name], SAMPLERS[name].settings(), {}, ready=on)
        for name, on in (("llamagen", plain), ("zipar", larger), ("par", par), ("zipar", larger))
    ]
    assert measured_against(planned) == [0, 1, 0, 1]
