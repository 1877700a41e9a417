"""What reads images for a Janus: its files in both layouts, and the square that an image becomes."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.janus.loader import load_janus, load_janus_head, load_janus_vision
from fastar_nodes.model_loaders.janus.squares import box_of, squared
from fastar_nodes.networks.janus_vision import JanusVision, VisionConfig
from janus_images import FOLDER, picture, tiny_reader
from PIL import Image
from safetensors.torch import load_file, save_file

# The authors' names of the tower and the aligner to transformers', which has queries, keys and values apart.
THEIRS = {
    "vision_model.vision_tower.patch_embed.proj.": "model.vision_model.embeddings.patch_embedding.",
    "vision_model.vision_tower.pos_embed": "model.vision_model.embeddings.position_embedding.weight",
    "vision_model.vision_tower.blocks.": "model.vision_model.encoder.layers.",
    "vision_model.vision_tower.norm.": "model.vision_model.post_layernorm.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.proj.": ".self_attn.projection_layer.",
    "aligner.layers.0.": "model.aligner.fc1.",
    "aligner.layers.2.": "model.aligner.hidden_layers.0.",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the recorded model."""
    return Path(shutil.copytree(FOLDER / "model", tmp_path / "model"))


def vision_of(folder: Path) -> dict[str, torch.Tensor]:
    state = load_file(folder / "model.safetensors")
    return {name: t for name, t in state.items() if name.startswith(("vision_model.", "aligner."))}


def changed(folder: Path, change) -> Path:
    """The model with other weights; ``change`` gets the state dict."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


def test_transformers_layout_reads_the_same(folder):
    state = {}
    for name, tensor in vision_of(folder).items():
        if "attn_pool" in name:
            continue
        for ours, theirs in THEIRS.items():
            name = name.replace(ours, theirs)
        if ".attn.qkv." in name:
            for part, own in zip("qkv", tensor.chunk(3), strict=True):
                state[name.replace(".attn.qkv.", f".self_attn.{part}_proj.")] = own.clone()
        else:
            state[name] = tensor.squeeze(0) if "position" in name else tensor
    save_file(state, folder / "model.safetensors")

    pixels = squared(picture(0), 16, 3)
    read = load_janus_vision(folder, tiny_reader().vq, "fp32").read(pixels)
    assert torch.equal(read.rows, tiny_reader().read(pixels).rows)


def test_a_file_without_the_part_that_reads_images(folder):
    def without(state):
        for name in vision_of(folder):
            del state[name]

    changed(folder, without)
    assert load_janus(folder).vision_file is None
    with pytest.raises(UserError, match="lacks the part that reads images"):
        load_janus_vision(folder, tiny_reader().vq)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vision_model.vision_tower.pos_embed", torch.zeros(1, 15, 48), "15 positions .* not a square"),
        ("aligner.layers.0.weight", None, "missing"),
        ("vision_model.vision_tower.blocks.1.attn.qkv.weight", torch.zeros(48, 48), "does not fit"),
        ("aligner.layers.2.weight", torch.zeros(32, 64), "does not fit"),
        ("vision_model.vision_tower.more.weight", torch.zeros(3), "more"),
    ],
)
def test_weights_that_do_not_fit(folder, name, value, message):
    def change(state):
        state.pop(name, None)
        if value is not None:
            state[name] = value

    with pytest.raises(UserError, match=f"(?s)checkpoint: .*{message}"):
        load_janus_vision(changed(folder, change), tiny_reader().vq)


@pytest.mark.parametrize(("heads", "message"), [(5, "do not fit the width"), (0, "a whole number"), ("x", "must")])
def test_heads_that_a_configuration_states(folder, heads, message):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_attention_heads"] = heads
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_janus_vision(folder, tiny_reader().vq)


def test_the_output_layer_for_words_in_both_layouts(folder):
    (name,) = (name for name in load_file(folder / "model.safetensors") if name.endswith("lm_head.weight"))
    weight = load_janus_head(folder, "fp32").lm_head.weight
    assert weight.shape == (322, 64)

    changed(folder, lambda state: state.update({"lm_head.weight": state.pop(name)}))
    assert torch.equal(load_janus_head(folder, "fp32").lm_head.weight, weight)

    changed(folder, lambda state: state.pop("lm_head.weight"))
    with pytest.raises(UserError, match="^checkpoint: .*lacks the output layer for words"):
        load_janus_head(folder)


def test_the_published_size():
    """The tower and the aligner of a 7B have 324,668,416 weights, all of which are computed with."""
    config = VisionConfig(width=1024, depth=24, heads=16, hidden=4096, patch=16, places=24, dim=4096)
    with torch.device("meta"):
        net = JanusVision(config)
    assert sum(weight.numel() for weight in net.parameters()) == 324_668_416
    assert config.side == 384
    assert VisionConfig.from_state_dict(net.state_dict()) == config


def test_heads_of_an_unlisted_width_are_of_64_numbers():
    config = VisionConfig(width=128, depth=1, heads=2, hidden=8, patch=2, places=2, dim=4)
    state = JanusVision(config).state_dict()
    assert VisionConfig.from_state_dict(state) == config
    assert VisionConfig.from_state_dict(state, heads=4) == replace(config, heads=4)


def test_features_that_are_not_finite_have_no_codes():
    vq = copy.deepcopy(tiny_reader().vq)
    vq.net.quant_conv.bias.data[0] = torch.nan
    with pytest.raises(UserError, match="^model: .*features of the image.* finite"):
        replace(tiny_reader(), vq=vq).read(squared(picture(0), 16, 3))


def test_a_tokenizer_of_another_size_is_refused():
    other = replace(tiny_reader(), vq=_Larger(tiny_reader().vq))
    with pytest.raises(UserError, match="16 vectors, but the decoder gives 64 tokens"):
        other.read(squared(picture(0), 16, 3))


class _Larger:
    """A VQ tokenizer that reads an image twice as large."""

    def __init__(self, vq):
        self.net, self.name = self, vq.name
        self.parameters, self.codes, self.quantize = vq.net.parameters, vq.net.codes, vq.net.quantize
        self._features = vq.net.features

    def features(self, x):
        return self._features(torch.nn.functional.interpolate(x, scale_factor=2))


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (640, 427, (0, 64, 384, 320)),
        (384, 384, (0, 0, 384, 384)),
        (10, 20, (96, 0, 288, 384)),
        (1, 5000, (185, 0, 199, 384)),
        (1001, 999, (0, 0, 384, 383)),
    ],
)
def test_where_an_image_lies_in_its_square(width, height, box):
    assert box_of(width, height, 384) == box


def test_a_square_holds_the_image_between_grey():
    pixels = torch.full((20, 10, 3), 200, dtype=torch.uint8)
    square = squared(pixels, 384)
    assert (square[:, 96:288] == 200).all()
    assert (square[:, :96] == 127).all() and (square[:, 288:] == 127).all()


def test_scaling_is_pillows_on_8_bits():
    pixels = torch.randint(256, (90, 60, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    scaled = Image.fromarray(pixels.numpy()).resize((256, 384), Image.Resampling.BICUBIC)
    assert np.array_equal(squared(pixels, 384)[:, 64:320].numpy(), np.asarray(scaled))
