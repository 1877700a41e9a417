"""Loading of VQ files: nestings, ignored weights, dtypes and error messages."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders import load_vq
from fastar_nodes.model_loaders.networks.autoencoder import HISTORY, VQAutoencoder, VQConfig
from safetensors.torch import load_file, save_file

TINY = VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, codes=12, groups=4)


@pytest.fixture
def tiny(tmp_path: Path):
    """Writes a tiny VQ tokenizer, after ``change(state)``; gives its path."""

    def write(change=lambda state: None, **metadata: str) -> Path:
        torch.manual_seed(0)
        state = {k: v.clone() for k, v in VQAutoencoder(TINY).state_dict().items()}
        change(state)
        save_file(state, tmp_path / "vq.safetensors", metadata={"groups": "4", **metadata})
        return tmp_path / "vq.safetensors"

    return write


def test_the_reference_loads(root: Path) -> None:
    path = root / "tests" / "parity" / "vq" / "vq8_tiny.safetensors"
    model = load_vq(path)
    stored = load_file(path)
    assert HISTORY in stored and model.name == "vq8_tiny" and model.net.config.stride == 8
    assert all(torch.equal(v, stored[k].float()) for k, v in model.net.state_dict().items())
    assert not model.net.training and not any(p.requires_grad for p in model.net.parameters())
    assert not any(p.is_meta for p in model.net.parameters())


def test_metadata_is_used(tiny) -> None:
    model = load_vq(tiny(name="a small\ntokenizer"))
    assert model.name == "a small tokenizer" and model.net.config == TINY
    for groups, words in (("none", "groups = none"), ("3", "num_groups .3"), ("0", "groups = 0")):
        with pytest.raises(UserError, match=f"^decoder: vq.safetensors .*{words}"):
            load_vq(tiny(groups=groups))


@pytest.mark.parametrize("name", ["auto", "fp32", "bf16", "fp16"])
def test_the_codebook_stays_in_fp32(tiny, name: str) -> None:
    expected = {"auto": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    for key, value in load_vq(tiny(), name).net.state_dict().items():
        assert value.dtype == (torch.float32 if key == "quantize.embedding.weight" else expected), key


def test_published_layouts(tiny, tmp_path: Path) -> None:
    pytest.importorskip("torch", minversion="2.6")
    torch.manual_seed(0)
    # Official sizes need 32 groups, and a pickled file cannot say otherwise.
    state = VQAutoencoder(VQConfig(ch=32, ch_mult=(1, 1), blocks=1, z_channels=4, codes=12)).state_dict()
    state[HISTORY] = torch.full((20,), float("nan"))
    for wrap in (
        lambda s: s,
        lambda s: {"model": s},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        # The training dump: the moving average is what upstream evaluates.
        lambda s: {
            "model": {k: v + 1 for k, v in s.items()},
            "ema": s,
            "optimizer": {"state": {}},
            "steps": 1,
            "discriminator": {"main.0.weight": torch.zeros(1)},
            "args": argparse.Namespace(vq_model="VQ-8"),
        },
    ):
        torch.save(wrap(state), tmp_path / "vq_ds8.pt")
        model = load_vq(tmp_path / "vq_ds8.pt")
        assert model.name == "vq_ds8" and torch.equal(model.net.quant_conv.weight, state["quant_conv.weight"])


def widen(state: dict) -> None:
    for name in ("conv1.weight", "conv1.bias"):
        key = f"encoder.conv_blocks.1.res.0.{name}"
        state[key] = torch.zeros(20, *state[key].shape[1:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("encoder.conv_in.weight"), "encoder.conv_in.weight is missing"),
        (lambda s: s.pop("post_quant_conv.weight"), "post_quant_conv.weight is missing"),
        (lambda s: s.update({"encoder.conv_blocks.x.weight": torch.ones(1)}), "does not fit a VQ autoencoder"),
        (
            lambda s: s.update({"encoder.conv_blocks.99999999.weight": torch.ones(1)}),
            "conv_blocks.* are not numbered 0 to 2",
        ),
        (lambda s: s.update({"encoder.conv_in.weight": torch.ones(())}), "does not fit a VQ autoencoder"),
        (lambda s: s.update({"quantize.embedding.weight": torch.ones(3)}), "does not fit a VQ autoencoder"),
        (lambda s: s.update({"post_quant_conv.weight": torch.ones(5, 8, 1, 1)}), "misshaped"),
        (widen, "widths 8, 20 are no multiples of 8"),
    ],
)
def test_what_does_not_fit(tiny, change, words: str) -> None:
    with pytest.raises(UserError, match=f"^decoder: vq.safetensors .*{words}") as error:
        load_vq(tiny(change))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1200
