"""compare, end to end on random weights: the picture, the numbers, the messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fastar_nodes.assembly import Ready, defaults, find_file
from fastar_nodes.cli.planning import plan
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.reports.record import COUNTS
from PIL import Image

QUICK = ("--set", "diffusion_steps=6", "--steps", "6", "--dtype", "fp32", "--device", "cpu")


def args(files, *more):
    return ("compare", "--model", files.mar, "--decoder", files.kl, *QUICK, *more)


def test_picture_table_and_json(cli, files, tmp_path):
    answer = cli(
        *args(
            files,
            "--label",
            "Cat, 3",
            *"--batch 2 --seed 11 --set fasthybrid.threshold=0.5 --out made/here.png --json report.json --maps maps.png".split(),
        )
    )
    assert answer.code == 0, answer.err
    assert "| MAR " in answer.out and "| FastHybrid threshold 0.5 " in answer.out and "made/here.png" in answer.out

    picture, maps = Image.open("made/here.png"), Image.open("maps.png")
    assert picture.width > 2 * 320 and picture.height > 320
    assert maps.width > 2 * 320
    assert np.asarray(picture).std() > 5  # something is drawn

    numbers = json.loads((tmp_path / "report.json").read_text())
    assert list(numbers) == ["version", "device", "runs"]
    assert numbers["version"] == 1 and numbers["device"] == "cpu"
    mar, fast = numbers["runs"]
    for run in (mar, fast):
        keys = [
            "sampler",
            "model",
            "settings",
            "seed",
            "images",
            "seconds",
            "speedup",
            "counts",
            "acceptance",
            "tokens_per_pass",
            "phases",
        ]
        keys += ["peak_memory_bytes", "memory_estimate_bytes", *["quality"] * (run is fast)]
        assert list(run) == [k for k in keys if k != "acceptance" or run is fast]
        assert list(run["memory_estimate_bytes"]) == ["weights: MAR", "noise", "MAR", "head", "decode"]
        assert list(run["counts"]) == [name for name in COUNTS if name in run["counts"]]
        assert set(run["phases"]) == {"transformer", "head", "decoder"}
        assert run["seed"] == 11 and run["images"] == 4 and run["model"] == "tiny mar"
        assert run["counts"]["transformer_passes"] == 6 and run["counts"]["decoder_passes"] == 1
        assert run["seconds"] > 0 and run["peak_memory_bytes"] is None
    assert (mar["sampler"], fast["sampler"]) == ("mar", "fasthybrid")
    assert mar["speedup"] == 1.0
    assert fast["speedup"] == pytest.approx(mar["seconds"] / fast["seconds"], rel=1e-3)
    assert "accepted" not in mar["counts"]  # counts that do not apply are left out
    assert fast["settings"]["threshold"] == 0.5 and fast["settings"]["ar_steps"] == 6
    # Six steps decide 16 tokens of 4 images, and only the first step's have no draft.
    assert fast["counts"]["accepted"] + fast["counts"]["rejected"] <= 4 * 15


def test_one_seed_means_one_picture(cli, files):
    """With the lookahead off FastHybrid is MAR: the two halves show the same picture. Another seed shows another."""
    off = ("--set", "fasthybrid.lookahead=0", "--label", "boat")
    for seed in (1, 2):
        assert cli(*args(files, *off, "--seed", seed, "--out", f"{seed}.png")).code == 0
    one, two = (np.asarray(Image.open(f"{seed}.png")).astype(int) for seed in (1, 2))
    next_cell = one.shape[1] // 2 - 10
    left, right = one[100:380, 40:340], one[100:380, 40 + next_cell : 340 + next_cell]
    assert (left == right).all() and left.std() > 5
    assert (one[100:380] != two[100:380]).mean() > 0.2


def test_the_baseline_comes_first(cli, files):
    answer = cli(*args(files, "--samplers", "fasthybrid,mar"))
    rows = [line.split()[1] for line in answer.out.splitlines() if line.startswith("| ")]
    assert rows == ["sampler", "MAR", "FastHybrid"]


BAD = [
    ("samplers", "--samplers mar,fasthybrid+cspd"),
    ("samplers", "--samplers mar,tar"),
    ("samplers", "--samplers mar,zipar"),
    ("samplers", "--samplers mar,nosuch"),
    ("samplers", "--samplers ,"),
    ("text", "--text cat"),
    ("set", "--set threshold"),
    ("set", "--set fasthybrid.threshold="),
    ("set", "--set fasthybrid.nosuch=1"),
    ("set", "--set nosuch=1"),
    ("set", "--set mar.threshold=0.5"),
    ("set", "--set cspd.draft_length=4"),
    ("set", "--samplers mar --set fasthybrid.threshold=0.9"),
    ("threshold", "--set fasthybrid.threshold=abc"),
    ("threshold", "--set fasthybrid.threshold=7"),
    ("preset", "--set fasthybrid.preset=faster"),
    ("draft", "--samplers mar,cspd"),
    ("ar_steps", "--steps 17"),
    ("label", "--label dragon"),
    ("label", "--label 10"),
    ("label", "--label ,"),
    ("seed", "--seed -1"),
    ("seed", "--seed many"),
    ("batch", "--batch 0"),
    ("device", "--device abacus"),
    ("out", "--out picture.docx"),
    ("json", "--json numbers.txt"),
    ("decoder", "--decoder nosuch.safetensors"),
    ("python -m fastar_nodes compare", "--dtype int4"),
    ("python -m fastar_nodes compare", "--nosuch"),
]


@pytest.mark.parametrize("field, more", BAD)
def test_bad_input_is_one_sentence(cli, files, sentence, tmp_path, field, more):
    assert sentence(cli(*args(files, "--models", tmp_path, *more.split()))).startswith(f"{field}: ")
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_a_decoder_of_other_latents_is_named(cli, files, sentence, tmp_path):
    from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
    from tiny_files import write

    other = KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=6, groups=4))
    path = write(other, tmp_path / "other.safetensors", 5, groups=4, name="other kl")
    text = sentence(cli(*args(files, "--decoder", path)))
    assert "other kl decodes 6 latent channels" in text and "tiny mar makes 4" in text


def test_a_model_that_is_none_is_named(cli, files, sentence, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "notes.txt" in sentence(cli("compare", "--model", "notes.txt", *QUICK))
    assert "nosuch" in sentence(cli("compare", "--model", "nosuch", "--models", tmp_path, *QUICK))
    assert "holds a KL autoencoder, not a MAR" in sentence(cli("compare", "--model", files.kl, *QUICK))


def test_a_folder_called_demo_does_not_hide_the_demo(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "mine.safetensors").touch()
    built_in = root / "demo" / "checkpoints"
    assert find_file("demo", "mar", tmp_path / "models") == built_in / "mar.safetensors"
    assert find_file("demo-kl", "kl", tmp_path / "models") == built_in / "kl.safetensors"
    assert find_file("mine.safetensors", "mar", tmp_path / "models") == Path("mine.safetensors")


def test_latents_that_are_not_finite_are_reported(cli, files, sentence, monkeypatch):
    from fastar_nodes.cli import compare
    from fastar_nodes.samplers.mar.loop import Sampled

    draw = compare.draw

    def spoilt(*a):
        latents, report = draw(*a)
        return Sampled(latents * float("nan"), report)

    monkeypatch.setattr(compare, "draw", spoilt)
    assert "not finite" in sentence(cli(*args(files)))


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
    with pytest.raises(UserError, match="lookahead"):
        plan("mar", ["lookahead=4"], None, {})


def test_settings_of_all_and_of_one(files):
    mar, fast = plan("mar,fasthybrid", ["cfg=2", "fasthybrid.cfg=4", "fasthybrid.lookahead=3"], 9, {})
    assert (mar.settings.cfg, fast.settings.cfg, fast.settings.lookahead, fast.settings.ar_steps) == (2, 4, 3, 9)
    assert mar.label == "MAR" and fast.label == "FastHybrid cfg 4 lookahead 3"
    both, again = (
        plan(name, [f"{name}.threshold=0.9"], 9, {})[0] for name in ("fasthybrid+lazymar", "lazymar+fasthybrid")
    )
    assert both == again and both.settings.threshold == 0.9 and both.entry.name == "fasthybrid+lazymar"
