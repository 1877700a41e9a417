"""The trainings of the demo's binary autoencoder and BitDance: their losses by hand, and runs of a few steps."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from block_models import tiny_bitdance
from fastar_nodes.lab.training import binary_recipe, bitdance_recipe
from fastar_nodes.lab.training.binary_recipe import BINARY, entropy_loss, flipped, initialise_from_kl
from fastar_nodes.lab.training.bitdance_recipe import denoising_loss
from fastar_nodes.lab.training.recipes import KL
from fastar_nodes.lab.training.training import Job, generator, seeded
from fastar_nodes.model_loaders.bitdance.loader import load_binary, load_bitdance
from fastar_nodes.networks.autoencoder import KLAutoencoder
from fastar_nodes.networks.binary import BinaryAutoencoder

pytestmark = pytest.mark.slow


def test_the_entropy_loss_by_hand():
    """Certain bits of two codes: no entropy of each, ln 2 of their mean. Undecided bits: 4 ln 2 of each and of all."""
    certain = torch.full((1, 4, 1, 2), 50.0)
    certain[0, 0, 0, 1] = -50.0
    assert float(entropy_loss(certain)) == pytest.approx(-math.log(2), abs=1e-5)
    assert float(entropy_loss(torch.zeros(1, 4, 1, 2))) == pytest.approx(0.0, abs=1e-5)
    undecided = certain.clone()
    undecided[0, 0, 0, 1] = 0.0  # codes: 1 certainly, and one of two: entropies 0 and ln 2, of the mean 1/4 and 3/4
    mean = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(entropy_loss(undecided)) == pytest.approx(math.log(2) / 2 - mean, abs=1e-5)


def test_bits_are_flipped_in_the_share_that_is_asked_for():
    bits = torch.ones(200, 100, 16)
    wrong = (flipped(bits, 0.1, generator(1, 0)) < 0).float().mean((1, 2))
    assert 0.045 < float(wrong.mean()) < 0.055 and float(wrong.max()) < 0.12 and float(wrong.min()) < 0.01
    assert torch.equal(flipped(bits, 0.0, generator(1, 0)), bits)


def test_the_kernel_that_enlarges_equals_enlarging_and_the_kernel():
    g = torch.Generator().manual_seed(0)
    net = seeded(1, lambda: BinaryAutoencoder(BINARY))
    kl = seeded(2, lambda: KLAutoencoder(KL))
    initialise_from_kl(net, kl)
    enlarge = net.decoder.up[1].upsample
    kernel = kl.decoder.up[1].upsample.conv.weight
    x = torch.randn(2, kernel.shape[1], 5, 7, generator=g)
    enlarge.conv1.bias.data.zero_()
    expected = F.conv2d(F.interpolate(x, scale_factor=2.0), kernel, padding=1)
    torch.testing.assert_close(enlarge(x), expected, rtol=1e-4, atol=1e-5)


def test_the_denoising_loss_by_hand():
    """A head that predicts zeros: the mean of (1 / (1 - t))^2, as bits are -1 or 1."""
    net = tiny_bitdance().net
    net.denoiser.final_layer.linear.weight.zero_()
    net.denoiser.final_layer.linear.bias.zero_()
    tokens = torch.ones(6, 4, 6)
    found = denoising_loss(net, torch.zeros(6, 4, 32), tokens, generator(3, 0))
    t = torch.sigmoid(-0.8 + 0.8 * torch.randn(6, generator=generator(3, 0)))
    assert float(found) == pytest.approx(float((1 / (1 - t).clamp_min(0.05) ** 2).mean()), rel=1e-5)


def test_both_trainings_resume_and_write_files_that_load(tmp_path, monkeypatch):
    monkeypatch.setattr(binary_recipe, "log_figures", lambda job, net: None)
    monkeypatch.setattr(binary_recipe, "BINARY_SCHEDULE", replace(binary_recipe.BINARY_SCHEDULE, batch=2))
    monkeypatch.setattr(bitdance_recipe, "SCHEDULE", replace(bitdance_recipe.SCHEDULE, batch=2))
    lines = []
    job = Job(tmp_path / "work", log=lines.append, steps=2, images=64, fp32=True)
    kl = seeded(2, lambda: KLAutoencoder(KL))
    binary_recipe.train_binary(job, tmp_path / "binary.safetensors", kl)
    binary = load_binary(tmp_path / "binary.safetensors").net
    assert (binary.config.z_channels, binary.config.stride, binary.config.groups) == (16, 8, 8)

    bitdance_recipe.train_bitdance(job, tmp_path / "bitdance.safetensors", binary)
    model = load_bitdance(tmp_path / "bitdance.safetensors")
    assert model.label_set == "picture-book" and model.stride == 8 and model.grid(None, None) == (8, 8)
    assert model.net.head_config == bitdance_recipe.HEAD and model.net.config == bitdance_recipe.BITDANCE

    written = (tmp_path / "bitdance.safetensors").read_bytes()
    bitdance_recipe.train_bitdance(job, tmp_path / "bitdance.safetensors", binary)
    assert any("bitdance: resuming at step 2 of 2" in line for line in lines)
    assert (tmp_path / "bitdance.safetensors").read_bytes() == written
