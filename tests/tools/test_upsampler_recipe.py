"""A minimal training of the up-sampler: it runs, improves, and writes a loadable file."""

from __future__ import annotations

import json

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.upsampler import load_upsampler
from fastar_nodes.tools.training.training import Schedule
from fastar_nodes.tools.training.upsampler_recipe import code_pairs, train_upsampler, upsampler_loss
from safetensors import safe_open
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def tiny_vq() -> VQAutoencoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = VQAutoencoder(VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=20, code_channels=4, groups=4))
    return net.eval().requires_grad_(False)


def test_codes_are_those_of_the_same_scenes_at_two_sizes():
    vq = tiny_vq()
    low, high, rgb = code_pairs(vq, 3, 8, CPU, lambda line: None, chunk=2)
    assert low.shape == (3, 8, 8) and high.shape == (3, 16, 16) and rgb.shape == (3, 3, 32, 32)
    assert torch.equal(vq.encode(rgb.float() / 127.5 - 1)[1], high.long())


def test_training_improves_and_what_it_writes_loads(tmp_path):
    vq, out, lines = tiny_vq(), tmp_path / "up.safetensors", []
    weights = {k: v.clone() for k, v in vq.state_dict().items()}
    # A small learning rate: bf16 rounding differs between processors and would decide the result.
    net = train_upsampler(
        vq, tmp_path, out, CPU, Schedule(steps=40, batch=4, lr=2e-3, warmup=2, ema=0.5), 6, 8, lines.append
    )
    assert all(torch.equal(v, weights[k]) for k, v in vq.state_dict().items()), "the tokenizer stays as it is"
    again = load_upsampler(out)
    assert again.name == "picture book up-sampler" and again.net.config == net.config
    assert all(torch.equal(v, net.state_dict()[k].half().float()) for k, v in again.net.state_dict().items())
    assert any("upsampler: step 40/40" in line for line in lines)
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert about["family"] == "upsampler" and about["decoder"] == "demo-vq" and json.dumps(about)
    low, high, rgb = code_pairs(vq, 6, 8, CPU, lambda line: None)
    batch = low.long(), high.long(), rgb.float() / 127.5 - 1

    def repeated(x):
        return torch.nn.functional.interpolate(x, scale_factor=2)

    with torch.no_grad():
        assert upsampler_loss(net, vq, *batch)[0] < upsampler_loss(repeated, vq, *batch)[0]


def test_another_file_is_refused_in_a_sentence(tmp_path):
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="up_sampler: other.safetensors holds no weights of a latent up-sampler"):
        load_upsampler(tmp_path / "other.safetensors")
