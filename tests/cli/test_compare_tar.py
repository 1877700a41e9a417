"""compare and bench on Tar and with MuLo-SD, with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from fastar_nodes import assembly
from fastar_nodes.assembly import Ready
from fastar_nodes.cli import conditions
from fastar_nodes.cli.models import with_draft
from fastar_nodes.cli.options import source
from fastar_nodes.cli.planning import plan
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig
from fastar_nodes.model_loaders.tar import load_detokenizer
from PIL import Image
from qwen_reference import tiny_qwen
from safetensors.torch import load_file, save_file
from tar_files import CONFIG, IDS, OF_CODES, tiny_ta_tok, words
from tiny_files import GPT_SIZE, VQ_SIZE, write, write_gpt, write_vq

pytestmark = pytest.mark.usefixtures("one_thread")


class TarFiles(NamedTuple):
    tar: Path
    ta_tok: Path
    low: Path
    high: Path
    whole: Path
    vq: Path


READER = replace(OF_CODES, codes=20)


def drawer(grid: int) -> Llama:
    return Llama(
        LlamaConfig(
            **{**GPT_SIZE.__dict__, "condition": "features", "condition_size": 24, "absolute": 16 + grid**2 - 1}
        )
    )


@pytest.fixture(scope="session")
def tar(tmp_path_factory) -> TarFiles:
    """Tar's parts: 16 codes of 20, drawn at 4 x 4 and 8 x 8; and one file with all but the language model."""
    folder = tmp_path_factory.mktemp("tar")
    about = {"config": {**CONFIG, **IDS}, "tokenizer": words(), "name": "tiny tar", "defaults": {"top_k": 15}}
    metadata = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
    save_file(tiny_qwen().state_dict(), folder / "tar.safetensors", metadata)
    save_file(tiny_ta_tok(READER).state_dict(), folder / "ta-tok.safetensors", {"name": "tiny ta-tok"})
    shared = {"heads": 2, "label_set": "picture-book", "defaults": {"cfg": 2.0}}
    low = write(drawer(4), folder / "low.safetensors", 11, grid=4, name="tiny low", **shared)
    high = write(drawer(8), folder / "high.safetensors", 12, grid=8, name="tiny high", **shared)
    vq = write_vq(folder / "vq.safetensors")
    parts = {"ta_tok.": load_file(folder / "ta-tok.safetensors"), "vq.": load_file(vq)}
    state = load_file(low) | {prefix + name: t for prefix, part in parts.items() for name, t in part.items()}
    save_file(state, folder / "whole.safetensors", {"heads": "2", "grid": "4", "name": "whole", "groups": "4"})
    return TarFiles(
        folder / "tar.safetensors", folder / "ta-tok.safetensors", low, high, folder / "whole.safetensors", vq
    )


@pytest.fixture
def tar_demo(tiny_demo: Path, tar: TarFiles) -> Path:
    """The tiny demo with a Tar."""
    here = {"tar": tar.tar, "ta-tok": tar.ta_tok, "dtok": tar.high, "dtok-low": tar.low}
    for name, file in here.items():
        (tiny_demo / f"{name}.safetensors").write_bytes(file.read_bytes())
    return tiny_demo


def table(answer):
    assert answer.code == 0, answer.err
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in answer.out.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: dict(zip(rows[0], row, strict=False)) for row in rows[1:]}


def args(tar: TarFiles, *more):
    fixed = ("--tar", tar.tar, "--ta-tok", tar.ta_tok, "--decoder", tar.vq, "--device", "cpu", "--prompt", "a red boat")
    return ("compare", "--model", tar.high, *fixed, *more)


# ------------------------------------------------------------------------------------------------ the demo


def test_a_prompt_draws_with_the_demos_tar(cli, tar_demo, tmp_path):
    answer = cli(
        "compare",
        "--model",
        "demo",
        "--prompt",
        "a red boat at sunset",
        *"--samplers zipar,mulosd,tar --set zipar.window=2 --set acceptance_target=0.5 --batch 2".split(),
        *"--device cpu --json c.json --maps m.png".split(),
    )
    rows = table(answer)
    assert [name.split(" ")[0] for name in rows] == ["Tar", "ZipAR", "MuLo-SD"] and rows["Tar"]["speed-up"] == "1.00x"
    numbers = {run["sampler"]: run for run in json.loads((tmp_path / "c.json").read_text())["runs"]}
    assert {run["model"] for run in numbers.values()} == {"tiny high"} and numbers["tar"]["counts"][
        "transformer_passes"
    ] == 64
    assert numbers["zipar"]["counts"]["transformer_passes"] == 28 and numbers["mulosd"]["counts"]["draft_passes"] == 16
    assert numbers["mulosd"]["speedup"] == pytest.approx(
        numbers["tar"]["seconds"] / numbers["mulosd"]["seconds"], rel=1e-3
    )
    assert (
        numbers["tar"]["settings"]["top_k"] == 0
        and numbers["tar"]["settings"]["cfg"] == 2.0
        and numbers["mulosd"]["images"] == 2
    )
    assert 0.3 < numbers["mulosd"]["acceptance"] < 0.7
    assert np.asarray(Image.open("compare.png")).std() > 5 and Image.open("m.png").width > 3 * 320


def test_what_runs_if_nothing_is_named(cli, tar_demo):
    assert list(table(cli("compare", "--prompt", "a red boat", "--device", "cpu"))) == ["Tar", "ZipAR", "MuLo-SD"]


def test_exact_mulosd_draws_tars_picture(cli, tar_demo):
    cli("compare", "--prompt", "cat", "--samplers", "tar,mulosd", "--set", "mulosd.preset=exact", "--device", "cpu")
    picture = np.asarray(Image.open("compare.png")).astype(int)
    step = picture.shape[1] // 2 - 10
    left, right = picture[100:380, 40:340], picture[100:380, 40 + step : 340 + step]
    assert (left == right).all() and left.std() > 5


def test_llamagens_of_two_sizes_and_a_comparison(cli, tiny_demo, tmp_path):
    rows = table(cli(*"compare --label cat --samplers llamagen,zipar,mulosd --device cpu --json c.json".split()))
    assert [name.split(" ")[0] for name in rows] == ["LlamaGen", "ZipAR", "MuLo-SD"]
    numbers = {run["sampler"]: run for run in json.loads((tmp_path / "c.json").read_text())["runs"]}
    # The larger of the two is drafted by the smaller, and sets the size of all.
    assert {run["model"] for run in numbers.values()} == {"tiny llamagen"} and numbers["llamagen"]["counts"][
        "transformer_passes"
    ] == 64
    assert numbers["mulosd"]["counts"]["draft_passes"] == 16


def test_tar_and_llamagen_side_by_side_are_two_families(cli, tar_demo, tmp_path):
    rows = table(
        cli("compare", "--prompt", "cat", "--samplers", "tar,zipar,llamagen", "--device", "cpu", "--json", "c.json")
    )
    assert (
        list(rows) == ["Tar", "ZipAR", "LlamaGen"]
        and rows["Tar"]["speed-up"] == rows["LlamaGen"]["speed-up"] == "1.00x"
    )
    assert [run["model"] for run in json.loads((tmp_path / "c.json").read_text())["runs"]] == ["tiny high"] * 2 + [
        "tiny llamagen"
    ]


def test_bench_of_tar(cli, tar_demo, tmp_path):
    answer = cli(*"bench --samplers tar,mulosd,zipar --repeats 2 --device cpu --json times.json".split())
    assert answer.code == 0, answer.err
    runs = {run["sampler"]: run for run in json.loads((tmp_path / "times.json").read_text())["batches"][0]["runs"]}
    assert list(runs) == ["tar", "mulosd", "zipar"] and {run["model"] for run in runs.values()} == {"tiny high"}
    assert runs["tar"]["ratio"] == 1.0 and runs["mulosd"]["counts"]["draft_passes"] == 16


def test_bench_draws_prompts(cli, tar_demo, sentence, tmp_path):
    """Acceptance, and so how many passes there are, depends on what is drawn."""
    both = (
        "bench",
        "--prompt",
        "a red boat",
        *"--prompt cat --batch 1,3 --repeats 1 --device cpu --json t.json".split(),
    )
    assert cli(*both, "--samplers", "tar,mulosd,llamagen", "--set", "prompt.detail=81").code == 0
    numbers = json.loads((tmp_path / "t.json").read_text())["batches"]
    assert [group["batch"] for group in numbers] == [1, 3]
    assert all([run["sampler"] for run in group["runs"]] == ["tar", "mulosd", "llamagen"] for group in numbers)
    # One code of the fewest in front of the tokens, in both halves of the guidance.
    assert [group["runs"][0]["counts"]["transformer_tokens"] for group in numbers] == [2 * (1 + 63), 3 * 2 * (1 + 63)]
    assert numbers[0]["runs"][2]["model"] == "tiny llamagen", "classes as before"
    assert "draw classes" in sentence(cli("bench", "--prompt", "cat", "--samplers", "llamagen", "--device", "cpu"))
    assert "name one with --prompt" in sentence(
        cli("bench", "--samplers", "tar", "--set", "prompt.detail=81", "--device", "cpu")
    )


# ------------------------------------------------------------------------------------------------ files


def test_files_of_tar(cli, tar, tmp_path):
    rows = table(cli(*args(tar, "--draft", tar.low, "--json", "c.json")))
    assert list(rows) == ["Tar", "ZipAR", "MuLo-SD"]
    assert list(table(cli(*args(tar)))) == ["Tar", "ZipAR"]
    numbers = json.loads((tmp_path / "c.json").read_text())["runs"]
    assert numbers[0]["settings"]["top_k"] == 0 and {run["model"] for run in numbers} == {"tiny high"}
    lone = ("compare", "--model", tar.whole, "--tar", tar.tar, "--prompt", "a red boat", "--device", "cpu")
    assert list(table(cli(*lone))) == ["Tar", "ZipAR"]  # its TA-Tok and decoder are in it


def test_settings_of_the_prompt(tar, monkeypatch):
    seen = []

    def drive(sampler, title, unit):
        seen.append(next(sampler).report.settings)
        return SimpleNamespace(condition="codes")

    monkeypatch.setattr(conditions, "drive", drive)
    sets, asked = conditions.of_prompt(["cfg=2", "prompt.detail=81", "prompt.temperature=0.5"])
    assert sets == ["cfg=2"]
    on = Ready("tar", load_detokenizer(tar.high), choice=str(tar.high), path=tar.high)
    options = SimpleNamespace(models=None, dtype="auto", speed="plain", device="cpu")
    build = conditions.Builder(source(options), tar=str(tar.tar), asked=asked)
    assert build.codes(on, ["cat"]) == "codes"
    # Settings of the command line take precedence over the file's defaults.
    assert {name: seen[0][name] for name in ("detail", "temperature", "top_k", "top_p")} == {
        "detail": "81",
        "temperature": 0.5,
        "top_k": 15,
        "top_p": 0.95,
    }


BAD = [
    ("draft", "--samplers mulosd"),
    ("samplers", "--samplers llamagen"),
    ("samplers", "--samplers tar,par"),
    ("label", "--label cat --samplers tar"),
    ("detail", "--set prompt.detail=5"),
    ("colour", "--set prompt.colour=5"),
    ("set", "--set prompt.detail"),
    ("set", "--set mulosd.tau=0"),
    ("set", "--set tau=0"),
    ("checkpoint", "--tar nowhere.safetensors"),
]


@pytest.mark.parametrize("field, more", BAD)
def test_bad_input_is_one_sentence(cli, tar, sentence, field, more):
    assert sentence(cli(*args(tar, *more.split()))).startswith(f"{field}: ")


def test_parts_that_do_not_fit(cli, tar, sentence, tmp_path):
    assert sentence(cli(*args(tar, "--prompt", "cat " * 100))).startswith("text: ")
    same = sentence(cli(*args(tar, "--samplers", "mulosd", "--draft", tar.high)))
    assert "draft: tiny high draws 8 x 8 tokens" in same and "no whole multiple" in same
    wide = tmp_path / "wide.safetensors"
    save_file(tiny_ta_tok(replace(READER, width=36)).state_dict(), wide, {"name": "wide"})
    assert "ta_tok: wide has features of width 36, tiny high needs 24" in sentence(cli(*args(tar, "--ta-tok", wide)))
    more = tmp_path / "more.safetensors"
    save_file(tiny_ta_tok(replace(READER, codes=30)).state_dict(), more, {"name": "more"})
    assert "a codebook of 20, more has 30" in sentence(cli(*args(tar, "--ta-tok", more)))
    other = write(
        VQAutoencoder(replace(VQ_SIZE, codes=30)), tmp_path / "other.safetensors", 7, groups=4, name="other vq"
    )
    assert "decoder: other vq has 30 codes" in sentence(cli(*args(tar, "--decoder", other)))
    message = sentence(
        cli(*args(tar, "--samplers", "mulosd", "--draft", write_gpt(tmp_path / "llamagen.safetensors", 3)))
    )
    assert message.startswith("draft: llamagen.safetensors holds a LlamaGen, not a Tar de-tokenizer")


def test_prompts_and_files_that_do_not_match(cli, tar, files, sentence, tar_demo):
    lone = (
        "compare",
        "--model",
        tar.high,
        "--tar",
        tar.tar,
        "--ta-tok",
        tar.ta_tok,
        "--decoder",
        tar.vq,
        "--device",
        "cpu",
    )
    assert "prompt: tiny high draws from text; say what with --prompt" in sentence(cli(*lone))
    plain = ("compare", "--model", files.llamagen, "--decoder", files.vq, "--device", "cpu", "--samplers", "llamagen")
    assert "no sampler of this run draws from Tar's codes" in sentence(cli(*plain, "--set", "prompt.detail=81"))
    message = sentence(cli("compare", "--model", "tar-1.5b", "--prompt", "cat"))
    assert "model: tar-1.5b writes the codes" in message and "--tar" in message
    both = ("compare", "--prompt", "cat", "--samplers", "tar,llamagen", "--device", "cpu")
    assert "two families" in sentence(cli(*both, "--decoder", tar.vq))
    message = sentence(cli("bench", "--random", "LlamaGen-B", "--samplers", "tar", "--device", "cpu"))
    assert "tar samples a Tar de-tokenizer" in message


def test_without_the_demos_tar(cli, tiny_demo, sentence):
    assert "the built-in demo-dtok is missing" in sentence(cli("compare", "--prompt", "cat", "--device", "cpu"))


def test_random_weights_have_no_tokenizer(sentence, files):
    ready = Ready("llamagen", load_llamagen(files.llamagen))
    options = SimpleNamespace(model="demo", draft="auto", models=None, dtype="auto", speed="plain", device="cpu")
    with pytest.raises(UserError, match="^random: mulosd needs a tokenizer"):
        with_draft(plan("mulosd", [], None, {"mulosd": ready}), options)


def test_demo_entries_are_catalogued():
    ids = {e.id for family in ("tar", "ta-tok", "dtok") for e in hub.entries(family) if e.built_in}
    assert ids == {"demo-tar", "demo-ta-tok", "demo-dtok", "demo-dtok-low"}
    assert assembly.DEMO_TAR in ids
