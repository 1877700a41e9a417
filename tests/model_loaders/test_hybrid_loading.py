"""Loading of Harmon and UniPic: layouts of files, ignored weights, shapes, head counts, sizes, errors."""

from __future__ import annotations

import json

import pytest
import torch
from fastar_nodes import assembly
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import checkpoint as ck
from fastar_nodes.model_loaders.families import identify
from fastar_nodes.model_loaders.hybrid import load_hybrid, precision
from fastar_nodes.model_loaders.networks.hybrid import HybridConfig, resize_table
from hybrid_files import CONFIG, METADATA, TOKENIZER, weights
from safetensors.torch import save_file

UNUSED = {
    "llm.lm_head.weight": torch.zeros(13, 24),
    "siglip2.vision_model.embeddings.weight": torch.zeros(3, dtype=torch.int64),
    "siglip2_proj.0.weight": torch.zeros(2, 2),
    "vae.decoder.conv_in.weight": torch.zeros(2),
    "mar.class_emb.weight": torch.zeros(10, 16),
    "llm.model.rotary_emb.inv_freq": torch.zeros(3),
}


@pytest.fixture
def state():
    return weights()


def write(tmp_path, state, name="model.safetensors", **metadata):
    save_file(state, tmp_path / name, metadata={**METADATA, **metadata})
    return tmp_path / name


def test_one_file(tmp_path, state):
    model = load_hybrid(write(tmp_path, state, name="mine.safetensors", latent_scale="1.0", t_max="950"))
    assert (model.name, model.latent_scale, model.t_max, model.max_beta) == ("mine", 1.0, 950, 0.999)
    assert model.net.config.grid == model.trained == 8 and model.net.config.classes == 0
    assert model.hybrid.config.llm.heads == 4 and model.net.config.heads == 2
    assert model.prompt("a red boat") == [11, 1, 3, 4, 5, 9, 6, 7, 8, 12, 11, 2]
    assert model.instruction("Generate an image.") == [11, 1, 3, 4, 5, 10, 12, 11, 2]


def test_weights_that_no_picture_needs_are_ignored(tmp_path, state):
    plain = load_hybrid(write(tmp_path, state), grid=4)
    path = write(tmp_path, {**state, **UNUSED}, name="more.safetensors")
    more = load_hybrid(path, grid=4)
    assert more.max_beta == 0.2  # a SigLIP2 projection is UniPic's
    for (name, a), (other, b) in zip(plain.hybrid.state_dict().items(), more.hybrid.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    assert not any(name.startswith("siglip2.") for name in ck.read(path, skip=lambda n: n.startswith("siglip2.")).state)


@pytest.mark.parametrize("kind", ["shards", "pth", "bin"])
def test_other_layouts(tmp_path, state, kind):
    expected = load_hybrid(write(tmp_path, state)).hybrid.state_dict()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    names = sorted(state)
    if kind == "shards":
        for i, part in enumerate((names[:40], names[40:])):
            save_file({n: state[n] for n in part}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    else:
        nested = {"state_dict": state} if kind == "bin" else state
        torch.save(nested, folder / "pytorch_model.bin")
    model = load_hybrid(folder)
    assert all(torch.equal(t, expected[n]) for n, t in model.hybrid.state_dict().items())
    assert assembly.identify(folder) == "hybrid"


def test_files_that_do_not_fit_are_refused_in_one_sentence(tmp_path, state):
    without = {k: v for k, v in METADATA.items() if k != "config"}
    save_file(state, tmp_path / "x.safetensors", metadata=without)
    with pytest.raises(UserError, match="none of the official sizes"):
        load_hybrid(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="max_beta"):
        load_hybrid(write(tmp_path, state, max_beta="nan"))
    with pytest.raises(UserError, match="no <|im_start|>"):
        tokenizer = {**TOKENIZER, "added_tokens": []}
        load_hybrid(write(tmp_path, state, tokenizer=json.dumps(tokenizer)))


def test_head_counts_of_the_official_sizes(root):
    for family, size, heads, mar_heads in (
        ("harmon", "harmon_0_5b", 14, 12),
        ("harmon", "harmon_1_5b", 12, 16),
        ("unipic", "unipic_1_5b", 12, 16),
    ):
        shapes = json.loads((root / "tests" / "parity" / family / f"hybrid_shapes_{size}.json").read_text())
        found = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        config = HybridConfig.from_state_dict(found)
        assert (config.llm.heads, config.mar.heads) == (heads, mar_heads)
        assert config.llm.head_dim == (64 if size == "harmon_0_5b" else 128)
        assert identify(found) == "hybrid"
        assert config.mar.grid == (32 if family == "unipic" else 16)


def test_unipic_is_recognised_by_its_position_tables(tmp_path):
    path = write(tmp_path, weights(1024))
    assert load_hybrid(path, grid=4).max_beta == 0.2
    assert load_hybrid(write(tmp_path, weights(1024), max_beta="0.999"), grid=4).max_beta == 0.999
    assert load_hybrid(path, grid=4).trained == 64


def test_tables_are_resized_in_fp32_and_then_cast(tmp_path, state):
    model = load_hybrid(write(tmp_path, state), dtype="bf16", grid=6)
    name = "mar.diffusion_pos_embed_learned"
    expected = resize_table(state[name], 4, 6, 6)
    assert torch.equal(model.net.diffusion_pos_embed_learned, expected.bfloat16())
    assert model.note and model.net.config.grid == 6
    assert model.net.head.final_layer.linear.weight.dtype == torch.float32
    assert torch.equal(resize_table(expected, 6, 6, 6), expected)


def test_fp16_is_refused():
    with pytest.raises(UserError, match="fp16 overflows"):
        precision("fp16", "cpu")
    assert precision("auto", "cpu") == torch.float32
