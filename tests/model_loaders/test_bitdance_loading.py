"""BitDance's loaders: layouts, shards, pickles, what is not read, and every refusal with its remedy."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from block_models import BINARY, FOLDER, bits, one_file, tiny_bitdance
from fastar_nodes import load
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.bitdance.loader import autoencoder_path, load_binary, load_bitdance
from fastar_nodes.model_loaders.kinds import identify
from fastar_nodes.networks.binary import BinaryAutoencoder, BinaryConfig
from safetensors.torch import load_file, save_file
from tiny_models import drawn

NATIVE = FOLDER / "native"
DIFFUSERS = FOLDER / "diffusers"
IMAGENET = FOLDER / "imagenet"


def same(a: Path, b: Path) -> bool:
    """Whether two folders or files give equal networks."""
    mine, other = load_bitdance(a).net.state_dict(), load_bitdance(b).net.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A copy of the recorded model in the authors' layout."""
    return Path(shutil.copytree(NATIVE, tmp_path / "native"))


def change(path: Path, **values) -> None:
    """Change entries of a JSON file; None removes one."""
    settings = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def edit(path: Path, change) -> None:
    """Change the weights of a file."""
    state = load_file(path)
    change(state)
    save_file(state, path)


# ------------------------------------------------------------------------------------------------ layouts


def test_the_layout_of_diffusers_is_the_authors_under_other_file_names(tmp_path, native):
    moved = tmp_path / "moved"
    places = {
        "vision_head": "diffusion_head/diffusion_pytorch_model",
        "projector": "projector/diffusion_pytorch_model",
        "ae": "autoencoder/diffusion_pytorch_model",
    }
    shutil.copytree(NATIVE, moved / "text_encoder")
    (moved / "tokenizer").mkdir()
    shutil.move(moved / "text_encoder" / "tokenizer.json", moved / "tokenizer" / "tokenizer.json")
    for ours, theirs in places.items():
        (moved / theirs).parent.mkdir()
        shutil.move(moved / "text_encoder" / f"{ours}.safetensors", moved / f"{theirs}.safetensors")
        config = moved / "text_encoder" / f"{ours}_config.json"
        if config.exists():
            shutil.move(config, (moved / theirs).parent / "config.json")

    assert same(moved, native) and same(moved / "text_encoder", native)
    model = load_bitdance(moved)
    assert (model.name, model.stride, model.net.block) == ("moved", 2, 16)
    assert autoencoder_path(moved) == moved / "autoencoder" / "diffusion_pytorch_model.safetensors"
    assert autoencoder_path(native) == native / "ae.safetensors"


def scaled(state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Weights in fp8 with a scale beside each, as in the files for ComfyUI."""
    found = {}
    for name, tensor in state.items():
        if tensor.ndim < 2:
            found[prefix + name] = tensor
            continue

        scale = tensor.float().abs().max() / 448
        found[prefix + name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        found[f"{prefix}{name}_scale"] = scale
    return found


@pytest.mark.parametrize("prefixes", [("diffusion_head.", "projector."), ("vision_head.", "projector."), ("", "")])
def test_three_fp8_files_for_comfyui_are_refused_by_name_with_what_to_choose(tmp_path, native, prefixes):
    head = scaled(load_file(native / "vision_head.safetensors"), prefixes[0])
    projector = scaled(load_file(native / "projector.safetensors"), prefixes[1])
    save_file({**head, **projector}, tmp_path / "BitDance_14B_MainModel_FP8.safetensors")
    with pytest.raises(UserError, match="holds a part of a BitDance in fp8.* entry bitdance-14b-64x, and dtype"):
        load_bitdance(tmp_path / "BitDance_14B_MainModel_FP8.safetensors")

    language = {}
    for shard in native.glob("model-*.safetensors"):
        language |= scaled(load_file(shard))
    save_file(language, tmp_path / "BitDance_TextEncoder_FP8.safetensors")
    with pytest.raises(UserError, match="^checkpoint: .* holds quantised weights with scales beside them"):
        load_bitdance(tmp_path / "BitDance_TextEncoder_FP8.safetensors")


def test_the_time_shift_is_that_of_the_heads_configuration(native):
    assert load_bitdance(native).time_shift == 1.0
    for stated, shift in ((2.5, 2.5), (None, 1.0)):
        change(native / "vision_head_config.json", time_shift=stated)
        assert load_bitdance(native).time_shift == shift


def test_a_shard_and_the_index_stand_for_the_folder(native):
    assert same(native / "model-00002-of-00002.safetensors", native)
    assert same(native / "model.safetensors.index.json", native)
    (native / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="^checkpoint: native .* 1 of 2 shards"):
        load_bitdance(native)


def test_the_output_layer_for_words_is_not_read(native):
    """Its weights are NaN here, which every weight that is read would be refused for."""

    def spoil(state):
        state["lm_head.weight"].fill_(torch.nan)

    edit(native / "model-00001-of-00002.safetensors", spoil)
    assert same(native, NATIVE)
    assert not any("lm_head" in name for name in load_bitdance(native).net.state_dict())
    edit(native / "model-00001-of-00002.safetensors", lambda state: state.pop("lm_head.weight"))
    assert same(native, NATIVE)


def test_imagenet_files_pickles_and_prefixes_are_the_same(tmp_path):
    path = one_file(tmp_path / "x.safetensors")
    state = load_file(path)
    torch.save({"ema": state, "args": {"n_head": 2}}, tmp_path / "x.pt")
    save_file({f"runtime_model.{name}": t for name, t in state.items()}, tmp_path / "p.safetensors", {"heads": "2"})
    folder = tmp_path / "BitDance_B" / "transformer"
    folder.mkdir(parents=True)
    shutil.copy(path, folder / "diffusion_pytorch_model.safetensors")

    for other in (tmp_path / "x.pt", tmp_path / "p.safetensors", folder.parent, folder):
        assert same(other, path), other
        assert identify(load_file(path)) == "bitdance"
        assert load_bitdance(other).stride == 2
    assert load_bitdance(path).net.head_config.bounded and not load_bitdance(tmp_path / "x.pt").net.head_config.bounded

    vae = load_binary(path).net.state_dict()
    for other in (tmp_path / "x.pt", tmp_path / "p.safetensors", folder.parent):
        found = autoencoder_path(other)
        assert found is not None
        assert all(torch.equal(tensor, vae[name]) for name, tensor in load_binary(found).net.state_dict().items())


def test_the_recorded_imagenet_files_hold_their_autoencoders():
    for name, expected in (("1x.pt", True), ("1x.safetensors", False), ("4x.safetensors", True)):
        path = IMAGENET / f"BitDance_tiny_{name}"
        assert (autoencoder_path(path) == path) == expected
    assert load_bitdance(IMAGENET / "BitDance_tiny_1x.pt", heads=4).stride == 1
    assert load_bitdance(IMAGENET / "BitDance_tiny_1x.safetensors", heads=4).stride == 16


def test_an_autoencoder_of_a_training_beside_other_networks(tmp_path):
    """The published file of the ImageNet models has further ones, which the reference ignores."""
    state = drawn(BinaryAutoencoder(BINARY), 0, 0.1, 0.1).state_dict()
    more = {**state, "loss.discriminator.weight": torch.ones(3), "quantize.weight": torch.ones(2)}
    torch.save({"state_dict": more, "epoch": 3}, tmp_path / "ae_d16c32.pt")
    model = load_binary(tmp_path / "ae_d16c32.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.net.state_dict().items())


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: (p / "vision_head.safetensors").unlink(), "the folder .*native has no vision_head.safetensors"),
        (lambda p: (p / "projector.safetensors").unlink(), "the folder .*native has no projector.safetensors"),
        (
            lambda p: change(p / "vision_head_config.json", parallel_num=15),
            "states parallel_num = 15 tokens per block, which is not a square",
        ),
        (
            lambda p: change(p / "vision_head_config.json", parallel_num=64),
            r"states parallel_num = 64, which requires the tokens <\|query_1\|> to <\|query_63\|>, "
            "but the last such token in its tokenizer is number 15; replace the tokenizer, .* blocks of 16",
        ),
        (lambda p: change(p / "vision_head_config.json", ch_cond=65), "states ch_cond = 65 .* weights have 64"),
        (lambda p: change(p / "config.json", rope_scaling={"rope_type": "yarn"}), "states rope_scaling.rope_type"),
        (lambda p: change(p / "config.json", head_dim=20), "states head_dim = 20"),
        (lambda p: (p / "tokenizer.json").unlink(), "has no tokenizer"),
        (
            lambda p: edit(p / "vision_head.safetensors", lambda s: s.pop("net.input_proj.bias")),
            "1 weight missing .head.net.input_proj.bias",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
@pytest.mark.fast_cases(every=3)
def test_a_text_model_that_does_not_fit_says_so(native, spoil, words):
    spoil(native)
    with pytest.raises(UserError, match=f"^checkpoint: .*{words}"):
        load_bitdance(native)


def test_parts_of_two_models_are_refused_with_both_numbers_and_files(native):
    """The other model's head reads rows of 48 numbers; both files are named."""
    shutil.copy(
        DIFFUSERS / "diffusion_head" / "diffusion_pytorch_model.safetensors", native / "vision_head.safetensors"
    )
    (native / "vision_head_config.json").unlink()
    expected = "^checkpoint: vision_head.safetensors reads conditions of 48 numbers, .* in native computes 64 "
    with pytest.raises(UserError, match=expected):
        load_bitdance(native)
    shutil.copy(NATIVE / "vision_head.safetensors", native / "vision_head.safetensors")
    assert load_bitdance(native).net.block == 16, "the tokenizer has 15 query tokens"


def test_a_small_table_of_words_is_refused(native):
    def cut(state):
        state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:350].clone()

    edit(native / "model-00001-of-00002.safetensors", cut)
    change(native / "config.json", vocab_size=350)
    with pytest.raises(UserError, match="^checkpoint: native has 350 token ids, .* special tokens with ids up to 356"):
        load_bitdance(native)


@pytest.mark.parametrize("name", ["<|im_start|>", "<|vision_start|>"])
def test_a_tokenizer_without_a_mark_is_refused(native, name):
    tokenizer = json.loads((native / "tokenizer.json").read_text())
    for entry in tokenizer["added_tokens"]:
        if entry["content"] == name:
            entry["content"] = "<|other|>"
    (native / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="^checkpoint: native has a tokenizer that lacks the token"):
        load_bitdance(native)


def test_a_head_alone_names_the_folder_to_choose():
    with pytest.raises(UserError) as error:
        load_bitdance(NATIVE / "vision_head.safetensors")
    assert str(error.value) == (
        "checkpoint: vision_head.safetensors holds only the diffusion head of a BitDance, not a BitDance; "
        "choose the folder with config.json and the shards of the language model"
    )
    load_bitdance(NATIVE)


def test_fp16_is_refused(tmp_path):
    path = one_file(tmp_path / "x.safetensors")
    with pytest.raises(UserError) as error:
        load_bitdance(path, "fp16")
    assert str(error.value) == (
        "dtype: a BitDance was trained in bf16, and nobody has tested it in fp16; choose bf16, fp32 or auto"
    )
    assert load_bitdance(path, "bf16").net.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update({"pos_for_diff.weight": torch.ones(15, 32)}), "its 15 tokens do not form a square"),
        (lambda s: s.update({"query_token": torch.ones(1, 2, 32)}), "do not form a square of square blocks of 3"),
        (lambda s: s.update({"cls_embedding.weight": torch.ones(6, 40)}), "its classes have 40 numbers"),
        (lambda s: s.pop("head.net.ada_ln_blocks.0.weight"), ""),
        (lambda s: s.pop("query_token"), "its head is not made for blocks of 1 tokens"),
    ],
)
@pytest.mark.fast_cases(every=3)
def test_an_imagenet_model_that_does_not_fit_says_so(tmp_path, change, words):
    path = one_file(tmp_path / "x.safetensors")
    state = load_file(path)
    change(state)
    save_file(state, path, {"heads": "2"})
    with pytest.raises(UserError, match=f"^checkpoint: x.safetensors does not fit a BitDance.*{words}"):
        load_bitdance(path)


def test_an_autoencoder_of_other_tokens_is_refused_with_both_numbers(tmp_path):
    path = one_file(tmp_path / "x.safetensors")
    other = drawn(BinaryAutoencoder(BinaryConfig((32,), 1, 8)), 0, 0.1, 0.1)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(UserError) as error:
        load(path, decoder=tmp_path / "other.safetensors", device="cpu")
    assert str(error.value).startswith(
        "decoder: x has tokens of 6 channels at stride 2, but other reads 8 channels at stride 1; "
    )
    load(path, device="cpu")


def test_an_autoencoder_with_noise_is_refused(tmp_path):
    net = drawn(BinaryAutoencoder(BinaryConfig((32,), 1, 8, noisy=True)), 0, 0.1, 0.1)
    save_file(net.state_dict(), tmp_path / "gan.safetensors")
    with pytest.raises(UserError, match="^decoder: gan.safetensors decodes bits together with noise"):
        load_binary(tmp_path / "gan.safetensors")


# ------------------------------------------------------------------------------------------------ autoencoder


def test_decoding_reads_signs_and_encoding_gives_them():
    net = drawn(BinaryAutoencoder(BINARY), 0, 1.0, 0.1)
    latents = bits(2, tiny_bitdance(), (3, 5))
    assert torch.equal(net.decode(0.01 * latents), net.decode(latents))
    image = net.decode(latents)
    assert image.shape == (2, 3, 6, 10)
    found, features = net.encode(image)
    assert torch.equal(found, torch.where(features > 0, 1.0, -1.0)) and found.shape == latents.shape
