"""Loading of Harmon and UniPic: layouts of files, ignored weights, shapes, head counts, sizes, errors."""

import json

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.files import checkpoint as ck
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.kinds import choose_dtype, identify
from fastar_nodes.networks.hybrid import HybridConfig, resize_table
from fastar_nodes.runs import loading
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


@pytest.fixture(scope="module")
def state():
    return weights()


def write(folder, state, name="model.safetensors", **metadata):
    save_file(state, folder / name, metadata={**METADATA, **metadata})
    return folder / name


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


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
    assert equal(plain.hybrid.state_dict(), more.hybrid.state_dict())
    assert not any(name.startswith("siglip2.") for name in ck.read(path, skip=lambda n: n.startswith("siglip2.")).state)


@pytest.mark.parametrize("kind", ["shards", "pth", "bin"])
@pytest.mark.fast_cases(1)
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
        torch.save({"state_dict": state} if kind == "bin" else state, folder / "pytorch_model.bin")
    assert equal(load_hybrid(folder).hybrid.state_dict(), expected)
    assert loading.identify(folder)[0] == "hybrid"


def test_a_tokenizer_is_looked_for_only_where_there_is_none(tmp_path, state):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    load_hybrid(write(tmp_path, state), find_tokenizer=lambda: pytest.fail("it has one"))
    save_file(state, tmp_path / "x.safetensors", metadata={"config": METADATA["config"]})
    assert load_hybrid(tmp_path / "x.safetensors", find_tokenizer=lambda: tmp_path / "other").turn == (11, 12)
    with pytest.raises(UserError, match="has no tokenizer"):
        load_hybrid(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="does not have both <|im_start|>"):
        load_hybrid(write(tmp_path, state, tokenizer=json.dumps({**TOKENIZER, "added_tokens": []})))


@pytest.mark.parametrize(
    ("family", "size", "heads", "mar_heads", "head_dim", "grid"),
    [
        ("harmon", "harmon_0_5b", 14, 12, 64, 16),
        ("harmon", "harmon_1_5b", 12, 16, 128, 16),
        ("unipic", "unipic_1_5b", 12, 16, 128, 32),
    ],
)
def test_official_sizes(root, family, size, heads, mar_heads, head_dim, grid):
    shapes = json.loads((root / "tests" / "parity" / family / f"hybrid_shapes_{size}.json").read_text())
    found = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = HybridConfig.from_state_dict(found)
    assert (config.llm.heads, config.mar.heads, config.llm.head_dim) == (heads, mar_heads, head_dim)
    assert identify(found) == "hybrid" and config.mar.grid == grid


def test_unipic_is_recognised_by_its_position_tables(tmp_path):
    state = weights(1024)
    model = load_hybrid(write(tmp_path, state), grid=4)
    assert model.max_beta == 0.2 and model.trained == 64
    assert load_hybrid(write(tmp_path, state, max_beta="0.999"), grid=4).max_beta == 0.999


def test_the_largest_beta_of_the_metadata_goes_before_that_of_the_configuration(tmp_path, state):
    config = json.dumps({**CONFIG, "diffusion": {"max_beta": 0.5}})
    assert load_hybrid(write(tmp_path, state, config=config), grid=4).max_beta == 0.5
    assert load_hybrid(write(tmp_path, state, config=config, max_beta="0.25"), grid=4).max_beta == 0.25


def test_the_size_of_the_images_that_it_was_trained_for(tmp_path, state):
    """Twice the side of the tables, as the official models, unless the file states it; the user may choose another."""
    assert load_hybrid(write(tmp_path, state)).trained == 8

    path = write(tmp_path, state, grid="6")
    stated = load_hybrid(path)
    assert stated.trained == stated.net.config.grid == 6
    assert stated.net.diffusion_pos_embed_learned.shape[1] == 36

    chosen = load_hybrid(path, grid=4)
    assert (chosen.trained, chosen.net.config.grid) == (6, 4)
    for side in (1, 129):
        with pytest.raises(UserError, match=f"^grid: {side} tokens per side are not possible; choose 2 to 128"):
            load_hybrid(path, grid=side)


def test_tables_are_resized_in_fp32_and_then_cast(tmp_path, state):
    """Also those of a file in bf16, in which new positions would have eight bits although the network has more."""
    table = state["mar.diffusion_pos_embed_learned"].bfloat16()
    expected = resize_table(table.float(), 4, 6, 6)
    assert not torch.equal(resize_table(table, 4, 6, 6).float(), expected), "the two differ, so that this can fail"

    halves = {name: tensor.bfloat16() for name, tensor in state.items()}
    whole = load_hybrid(write(tmp_path, halves), grid=6)
    assert torch.equal(whole.net.diffusion_pos_embed_learned, expected)

    model = load_hybrid(write(tmp_path, halves), dtype="bf16", grid=6)
    assert torch.equal(model.net.diffusion_pos_embed_learned, expected.bfloat16())
    assert model.note and model.net.config.grid == 6
    assert model.net.head.final_layer.linear.weight.dtype == torch.float32
    assert torch.equal(resize_table(expected, 6, 6, 6), expected)


def test_fp16_is_refused():
    with pytest.raises(UserError, match="^dtype: .* numbers that are too large for fp16"):
        choose_dtype("fp16", "cpu", "hybrid")
