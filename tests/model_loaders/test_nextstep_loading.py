"""NextStep's loaders: layouts, what is not read, both spellings of the configuration, and every refusal."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes import load
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue.official import official_nextstep
from fastar_nodes.model_loaders.files import checkpoint as ck
from fastar_nodes.model_loaders.kinds import identify
from fastar_nodes.model_loaders.nextstep.loader import (
    UNUSED,
    autoencoder_path,
    load_nextstep,
    load_nextstep_ae,
)
from fastar_nodes.model_loaders.nextstep.sources import cropped
from fastar_nodes.networks.nextstep import NextStep, NextStepConfig
from fastar_nodes.networks.ops import shapes_only
from nextstep_models import FOLDER
from safetensors.torch import load_file, save_file

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recorded model."""
    return Path(shutil.copytree(FOLDER / "model", tmp_path / "model"))


def change(path: Path, **values) -> None:
    """Change entries of a JSON file; None removes one."""
    settings = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def edit(path: Path, change) -> None:
    """Change the weights of a file."""
    state = load_file(path)
    change(state)
    save_file(state, path)


def same(a: Path, b: Path) -> bool:
    """Whether two folders give equal networks."""
    mine, other = load_nextstep(a).net.state_dict(), load_nextstep(b).net.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


# ------------------------------------------------------------------------------------------------ what is read


def test_a_folder_a_shard_and_the_index_are_one_model(folder):
    model = load_nextstep(folder)
    assert (model.name, model.stride, model.side, model.note) == ("model", 4, 32, "")
    assert same(folder / SECOND, folder) and same(folder / "model.safetensors.index.json", folder)
    (folder / FIRST).unlink()
    with pytest.raises(UserError, match="^checkpoint: model .* 1 of 2 shards"):
        load_nextstep(folder)


def test_the_name_says_which_images_a_model_was_trained_for(folder):
    small = folder.rename(folder.parent / "NextStep-1.1-Pretrain-256px")
    assert load_nextstep(small).side == 16


def test_weights_are_cast_as_they_are_read_and_the_last_layer_stays_in_fp32(folder):
    for name in (FIRST, SECOND):
        edit(folder / name, lambda state: state.update({key: tensor.float() for key, tensor in state.items()}))
    found = load_nextstep(folder, "bf16").net.state_dict()
    assert same(folder, FOLDER / "model"), "files in fp32"
    last = [name for name, tensor in found.items() if tensor.dtype == torch.float32]
    assert last == ["image_head.net.final_layer.linear.weight", "image_head.net.final_layer.linear.bias"]


def test_the_output_layer_for_words_and_the_table_of_positions_are_not_read(folder):
    """They are NaN here, which every weight that is read would be refused for."""
    for name in ("lm_head.weight", "gen_pos_embed"):
        shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
        edit(shard, lambda state, name=name: state[name].fill_(torch.nan))
    assert same(folder, FOLDER / "model")
    assert not any(UNUSED.search(name) for name in load_nextstep(folder).net.state_dict())


def test_both_spellings_of_the_configuration(folder):
    change(
        folder / "config.json",
        model_type="stepx_llama",
        latent_size=None,
        latent_patch_size=None,
        latent_channels=None,
        image_size=16,
        patch_size=2,
        num_channels=4,
        use_mlp_before_lm_head=False,
        attention_use_qk_norm=False,
    )
    assert same(folder, FOLDER / "model") and load_nextstep(folder).net.config.patch == 2


def test_official_names_and_shapes_load_strictly():
    """The published files: every key of the authors' class but the ones that are not read."""
    recorded = json.loads((FOLDER / "nextstep_keys_14b.json").read_text())["model"]
    with shapes_only():
        net = NextStep(official_nextstep())
        state = {name: torch.empty(shape) for name, shape in recorded.items() if not UNUSED.search(name)}
        made = NextStepConfig.of_nextstep(state)
    assert {name: list(tensor.shape) for name, tensor in net.state_dict().items()} == {
        name: list(tensor.shape) for name, tensor in state.items()
    }
    assert replace(made, positions=131_072) == official_nextstep()
    assert identify(state) == "nextstep"
    net.load_state_dict(state, strict=True, assign=True)
    weights = sum(weight.numel() for weight in net.parameters())
    assert weights == 14_953_814_080 - 778_567_680, "without the output layer for words"


def test_a_start_token_comes_from_the_tokenizers_own_configuration(folder):
    assert load_nextstep(folder).marks.text is None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / "tokenizer_bos" / name, folder / name)
    assert load_nextstep(folder).marks.text == 312
    change(folder / "tokenizer_config.json", bos_token={"content": "<|beginoftext|>"})
    assert load_nextstep(folder).marks.text == 312
    change(folder / "tokenizer_config.json", bos_token="<nothing>")
    with pytest.raises(UserError, match="bos_token '<nothing>' is not one of its tokens"):
        load_nextstep(folder)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: (p / "config.json").unlink(), "has no config.json, from which FastAR reads the model.s norms"),
        (lambda p: change(p / "config.json", use_gen_pos_embed=True), "states use_gen_pos_embed = true"),
        (lambda p: change(p / "config.json", attention_use_qk_norm=True), "states attention_use_qk_norm = true"),
        (lambda p: change(p / "config.json", model_type="llama"), "states model_type = 'llama'"),
        (lambda p: change(p / "config.json", latent_channels=16), "states latent_channels = 16 .* weights have 4"),
        (lambda p: change(p / "config.json", latent_patch_size=3), "but 3 x 3 latents need a multiple of 9"),
        (lambda p: change(p / "config.json", fm_head_dim=64), "states fm_head_dim = 64 .* weights have 48"),
        (lambda p: change(p / "config.json", boi=300), r"states boi = 300 .* <\|begin_of_image\|> is 305"),
        (lambda p: change(p / "config.json", rope_scaling={"rope_type": "yarn"}), "states rope_scaling.rope_type"),
        (lambda p: (p / "tokenizer.json").unlink(), "has no tokenizer"),
        (
            lambda p: edit(p / SECOND, lambda s: s.update({"layers.0.self_attn.o_proj.bias": torch.zeros(64)})),
            "has biases in o_proj, which no published NextStep has",
        ),
        (lambda p: edit(p / SECOND, lambda s: s.pop("image_out_projector.bias")), "weight missing .image_out_proj"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
@pytest.mark.fast_cases(every=3)
def test_a_model_that_does_not_fit_says_so(folder, spoil, words):
    spoil(folder)
    with pytest.raises(UserError, match=f"^checkpoint: .*{words}"):
        load_nextstep(folder)


@pytest.mark.parametrize("name", ["<|image_area|>", "<|image_placeholder|>"])
def test_a_tokenizer_without_a_mark_is_refused(folder, name):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for entry in tokenizer["added_tokens"]:
        if entry["content"] == name:
            entry["content"] = "<|other|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="^checkpoint: model has a tokenizer without "):
        load_nextstep(folder)


def test_a_small_table_of_words_is_refused(folder):
    def cut(state):
        state["embed_tokens.weight"] = state["embed_tokens.weight"][:306].clone()

    edit(folder / FIRST, cut)
    change(folder / "config.json", vocab_size=306)
    with pytest.raises(UserError, match="^checkpoint: model has 306 token ids, .* special tokens with ids up to 307"):
        load_nextstep(folder)


def test_fp16_is_refused():
    with pytest.raises(UserError, match="^dtype: a NextStep was trained in bf16, and nobody has tested it in fp16"):
        load_nextstep(FOLDER / "model", "fp16")


# ------------------------------------------------------------------------------------------------ autoencoder


def test_the_autoencoder_is_in_the_folder_or_beside_it(folder):
    inside = folder / "vae" / "checkpoint.pt"
    assert autoencoder_path(folder) == autoencoder_path(folder / SECOND) == inside
    change(folder / "config.json", vae_name_or_path="own")
    shutil.move(folder / "vae", folder / "own")
    assert autoencoder_path(folder) == folder / "own" / "checkpoint.pt"

    beside = folder.parent / "NextStep-1-f8ch16-Tokenizer"
    shutil.move(folder / "own", beside)
    assert autoencoder_path(folder) == beside / "checkpoint.pt"
    assert load_nextstep_ae(beside).name == "NextStep-1-f8ch16-Tokenizer"
    shutil.rmtree(beside)
    assert autoencoder_path(folder) is None
    assert load_nextstep(folder).stride == 16, "of the published autoencoder"


def test_a_path_out_of_the_folder_is_not_followed(folder):
    """``vae_name_or_path`` of NextStep-1 is a repository, and may be anything."""
    outside = folder.parent / "outside"
    shutil.copytree(folder / "vae", outside)
    for stated in ("../outside", str(outside), "stepfun-ai/NextStep-1-f8ch16-Tokenizer"):
        change(folder / "config.json", vae_name_or_path=stated)
        assert autoencoder_path(folder) == folder / "vae" / "checkpoint.pt"


def test_what_the_configuration_of_the_autoencoder_says(folder):
    path = folder / "vae" / "config.json"

    def numbers() -> tuple[float, float, int]:
        c = load_nextstep_ae(folder / "vae").net.config
        return c.scaling, c.shift, c.norm_patch

    assert numbers() == (0.6, 0.15, 1)
    change(path, psz=2)
    assert numbers() == (0.6, 0.15, 2)
    change(path, psz=None)
    assert numbers() == (0.6, 0.15, 1), "a norm of every position, as with psz 1"
    change(path, scaling_factor=None, shift_factor=None)
    assert numbers() == (1.0, 0.0, 1), "of the programs that know the norm"
    change(path, encoder_norm=False)
    assert numbers() == (1.0, 0.0, 0)
    change(path, encoder_norm=None)
    assert numbers() == (0.3611, 0.1159, 0), "of the programs of August 2025"


def test_encoding_and_decoding_are_in_the_scale_of_the_tokens():
    net = load_nextstep_ae(FOLDER / "model" / "vae").net
    c = net.config
    z = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net.decode(z), net.decoder(z / c.scaling + c.shift))
    mean, std = net.encode(net.decode(z))
    assert mean.shape == std.shape == z.shape and bool((std > 0).all())
    raw = mean / c.scaling + c.shift
    torch.testing.assert_close(raw.mean(1), torch.zeros(2, 3, 5), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: (p / "config.json").unlink(), "has no config.json in its folder, from which FastAR reads how"),
        (lambda p: change(p / "config.json", z_channels=16), "states z_channels = 16 .* weights have 4"),
        (lambda p: change(p / "config.json", encoder_norm="layer"), "states encoder_norm = 'layer'"),
        (lambda p: change(p / "config.json", scaling_factor=0), "states scaling_factor = 0"),
    ],
)
def test_an_autoencoder_that_does_not_fit_says_so(folder, spoil, words):
    spoil(folder / "vae")
    with pytest.raises(UserError, match=f"^decoder: .*{words}"):
        load_nextstep_ae(folder / "vae")


def test_weights_that_are_missing_are_refused_and_not_drawn_at_random(folder):
    """The authors' programs go on with random weights."""
    path = folder / "vae" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state.pop("decoder.conv_out.bias")
    torch.save(state, path)
    with pytest.raises(UserError, match="^decoder: checkpoint.pt does not fit .* 1 weight missing .decoder.conv_out"):
        load_nextstep_ae(path)


def test_a_pickle_that_runs_code_is_refused(folder):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    path = folder / "vae" / "checkpoint.pt"
    torch.save({**torch.load(path, weights_only=True), "evil": Evil()}, path)
    with pytest.raises(UserError, match="^decoder: checkpoint.pt"):
        load_nextstep_ae(path)


def test_another_autoencoder_is_refused_with_both_numbers(folder, tmp_path):
    state = ck.read(FOLDER / "model" / "vae" / "checkpoint.pt").state
    other = tmp_path / "other"
    other.mkdir()
    wide = {name: tensor.clone() for name, tensor in state.items()}
    wide["decoder.conv_in.weight"] = wide["decoder.conv_in.weight"].repeat(1, 2, 1, 1)
    wide["encoder.conv_out.weight"] = wide["encoder.conv_out.weight"].repeat(2, 1, 1, 1)
    wide["encoder.conv_out.bias"] = wide["encoder.conv_out.bias"].repeat(2)
    torch.save(wide, other / "checkpoint.pt")
    (other / "config.json").write_text(json.dumps({"scaling_factor": 1.0}))
    with pytest.raises(UserError) as error:
        load(folder, decoder=other / "checkpoint.pt", device="cpu")
    assert str(error.value).startswith(
        "decoder: model needs an autoencoder with 4 channels at stride 2, but other has 8 channels at stride 2; "
    )
    load(folder, device="cpu")


# ------------------------------------------------------------------------------------------------ sources


@pytest.mark.parametrize(("height", "width"), [(24, 24), (25, 60), (48, 49), (200, 97), (9, 5)])
def test_an_image_to_change_is_cut_to_a_square(height, width):
    image = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
    found = cropped(image, 24)
    assert found.shape == (24, 24, 3) and found.dtype == torch.uint8
    if (height, width) == (24, 24):
        assert torch.equal(found, image)
