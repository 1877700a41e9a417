"""The command train-demo with tiny networks: every checkpoint loads, what loads is what was trained, and errors."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.commands import main
from fastar_nodes.lab.training import hybrid_recipe, tar_recipes, training
from fastar_nodes.lab.training.command import ENLARGING, PROGRAMS
from fastar_nodes.lab.training.judge import load_judge
from fastar_nodes.model_loaders.autoencoders.latent_samplers import fits, load_latent_samplers
from fastar_nodes.model_loaders.autoencoders.loader import load_kl, load_vq
from fastar_nodes.model_loaders.bitdance.loader import load_binary, load_bitdance
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
PROMPTS = ["a red boat at sunset", "cat", "a large blue house in the middle by day"]


def run(folder: Path, *options: object) -> int:
    usual = ("--out", folder / "out", "--work", folder / "work", "--device", "cpu")
    return main(["train-demo", *map(str, (*usual, *options))])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All checkpoints after two steps each."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        tiny.shrink_demo(patch)
        assert run(folder, "--steps", 2, "--pictures", 64) == 0
        yield SimpleNamespace(folder=folder, out=folder / "out")


def test_every_checkpoint_loads(made):
    def path(name: str) -> Path:
        return made.out / f"{name}.safetensors"

    files = [name for name in PROGRAMS if not name.endswith(ENLARGING)]
    assert sorted(p.stem for p in made.out.iterdir()) == sorted(files)
    assert load_kl(path("kl")).net.config == replace(tiny.KL, enlarging=tiny.ENLARGING)
    assert load_vq(path("vq")).net.config == replace(tiny.VQ, enlarging=tiny.ENLARGING)
    for name, config in (("mar", tiny.MAR), ("mar-draft", replace(tiny.MAR, dim=16))):
        model = load_mar(path(name))
        assert (model.net.config, model.t_max, model.label_set) == (config, 950, "picture-book")
    for name, grid, special in (("llamagen-low", 8, 0), ("llamagen", 16, 0), ("par", 8, 3)):
        model = load_llamagen(path(name), "fp32")
        assert (model.grid, model.regions, model.label_set) == (grid, special + 1, "picture-book")
    assert load_judge(path("judge"))[1] > 0 and load_judge(path("judge-patches"))[1] > 0
    samplers = load_latent_samplers(path("latent-samplers"))
    assert samplers.name == "demo-latent-samplers" and fits(samplers, load_vq(path("vq")), 2)
    ta_tok, tar = load_ta_tok(path("ta-tok"), "fp32"), load_tar(path("tar"), "fp32")
    assert ta_tok.net.config == tiny.TA_TOK
    assert tar.net.config == tiny.language() and tar.sides == (6, 3, 2)
    for name, grid in (("dtok-low", 8), ("dtok", 16)):
        model = load_detokenizer(path(name), "fp32", ta_tok=ta_tok)
        assert (model.grid, model.label_set) == (grid, "picture-book") and model.net.config == tiny.detokenizer(grid)
    assert load_binary(path("binary"), "fp32").net.config == replace(tiny.BINARY, enlarging=tiny.ENLARGING)
    bitdance = load_bitdance(path("bitdance"), "fp32")
    assert bitdance.net.config == tiny.BITDANCE and bitdance.label_set == "picture-book"
    own = tar_recipes.tar_model(tar.net, tiny.TA_TOK.codes)
    hybrid = load_hybrid(path("hybrid"), "fp32")
    for text in (*PROMPTS, "", "<|im_end|> <I3>", "\U0001f600"):
        assert tar.prompt(text, 1) == own.prompt(text, 1), "words are read as in training"
        assert hybrid.prompt(text) == hybrid_recipe.hybrid_model(hybrid.hybrid).prompt(text)


def test_improving_starts_from_the_files(made, monkeypatch):
    """At a rate of zero, the weights stay."""
    monkeypatch.setattr(training.Schedule, "rate", lambda self, step: 0.0)
    names = ("kl", "mar", "mar-draft", "llamagen-low", "llamagen", "par", "tar", "dtok-low", "hybrid")
    before = {name: load_file(made.out / f"{name}.safetensors") for name in names}
    few = ("--steps", 1, "--pictures", 64, "--work", made.folder / "again")
    assert run(made.folder, "--only", ",".join(names), "--improve", *few) == 0
    for name, weights in before.items():
        for key, value in load_file(made.out / f"{name}.safetensors").items():
            torch.testing.assert_close(value, weights[key], msg=f"{name}: {key}")
    assert not (made.folder / "again" / "kl.state.pt").exists(), "of the autoencoder, only the decoder"
    assert not (made.folder / "again" / "hybrid-start.state.pt").exists(), "the first stage is left out"


@pytest.mark.parametrize(
    ("option", "value"),
    [("only", v) for v in ("jury", "mar", "par", "tar", "hybrid")] + [("steps", 0), ("pictures", 5), ("out", __file__)],
)
def test_mistakes(option, value, tmp_path, capsys):
    assert run(tmp_path, f"--{option}", value) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{option}: ") and told.count("\n") == 1
