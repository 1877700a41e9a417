"""compare and bench on Harmon and UniPic, end to end on random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fastar_nodes.model_loaders.networks.hybrid import Hybrid, HybridConfig
from fastar_nodes.model_loaders.networks.llama import qwen_config
from fastar_nodes.model_loaders.networks.mar import MARConfig
from PIL import Image
from tiny_files import write

QUICK = ("--set", "diffusion_steps=4", "--steps", "4", "--dtype", "fp32", "--device", "cpu", "--seed", "5")
WORDS = ["[UNK]", "user", "assistant", "generate", "an", "image", "a", "red", "boat", ":", "."]
TOKENIZER = {
    "added_tokens": [{"content": "<|im_start|>", "id": 11}, {"content": "<|im_end|>", "id": 12}],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(WORDS)}, "unk_token": "[UNK]"},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    mar = MARConfig(16, 1, 2, 2, 2, 16, 4, 0, 1, 16)
    net = Hybrid(HybridConfig(mar, qwen_config(dim=16, depth=1, heads=2, kv_heads=1, head_dim=8, hidden=24, vocab=13)))
    config = {"llm": {"num_attention_heads": 2}, "mar": {"encoder_num_heads": 2}}
    about = {
        "config": config,
        "tokenizer": TOKENIZER,
        "grid": 4,
        "latent_scale": 1.0,
        "t_max": 950,
        "name": "tiny hybrid",
    }
    return write(net, tmp_path_factory.mktemp("hybrid") / "hybrid.safetensors", 2, **about)


def compare(files, hybrid, *more):
    return ("compare", "--model", hybrid, "--decoder", files.kl, *QUICK, *more)


def test_samplers_of_masked_models_take_prompts(cli, files, hybrid, tmp_path):
    samplers = "mar,mar:disa,fasthybrid,lazymar,fasthybrid+lazymar"
    answer = cli(
        *compare(
            files,
            hybrid,
            "--samplers",
            samplers,
            "--set",
            "mar:disa.diffusion_steps_end=2",
            "--set",
            "lazymar.refresh_period=1",
        ),
        *("--prompt", "a red boat", "--prompt", "", "--out", "x.png", "--json", "x.json"),
    )
    assert answer.code == 0, answer
    runs = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert [run["sampler"] for run in runs] == ["mar", "mar", "fasthybrid", "lazymar", "fasthybrid+lazymar"]
    assert all(run["counts"]["llm_rows"] and run["images"] == 2 for run in runs)
    assert runs[0]["settings"]["cfg_schedule"] == "constant"
    assert np.array(Image.open(tmp_path / "x.png")).std() > 0


def test_a_prompt_is_needed_and_a_label_is_not(cli, files, hybrid):
    assert "say what with --prompt" in cli(*compare(files, hybrid)).err
    assert "say what with --text" in cli(*compare(files, hybrid, "--label", "cat")).err
    assert "--negative" in cli("compare", "--help").out


def test_the_negative_prompt_changes_the_picture(cli, files, hybrid, tmp_path):
    for name, more in (("a", ()), ("b", ("--negative", "a boat"))):
        answer = cli(
            *compare(files, hybrid, "--samplers", "mar", "--prompt", "a red boat", "--out", f"{name}.png", *more)
        )
        assert answer.code == 0, answer
    a, b = (np.array(Image.open(tmp_path / f"{name}.png")) for name in "ab")
    assert not np.array_equal(a, b)
