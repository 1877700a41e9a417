"""A minimal training of the up-sampler: it runs and improves."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.tools.training import upsampler_recipe as recipe
from fastar_nodes.tools.training.training import Job, Schedule, seeded

pytestmark = pytest.mark.slow
TINY = VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=20, code_channels=4, groups=4)


def tiny_vq() -> VQAutoencoder:
    return seeded(0, lambda: VQAutoencoder(TINY)).eval().requires_grad_(False)


def test_codes_are_those_of_the_same_scenes_at_two_sizes(tmp_path):
    vq = tiny_vq()
    low, high, rgb = recipe.code_pairs(Job(tmp_path), vq, 3, 8)
    assert low.shape == (3, 8, 8) and high.shape == (3, 16, 16) and rgb.shape == (3, 3, 32, 32)
    assert torch.equal(vq.encode(rgb.float() / 127.5 - 1)[1], high.long())


def test_training_improves(tmp_path, monkeypatch):
    vq = tiny_vq()
    weights = {k: v.clone() for k, v in vq.state_dict().items()}
    # A small learning rate: bf16 rounding differs between processors and would decide the result.
    monkeypatch.setattr(recipe, "SCHEDULE", Schedule(steps=40, batch=4, lr=2e-3, warmup=2, ema=0.5))
    job = Job(tmp_path, images=6)
    net = recipe.train_upsampler(job, tmp_path / "up.safetensors", vq, 8)
    assert all(torch.equal(v, weights[k]) for k, v in vq.state_dict().items()), "the tokenizer stays as it is"
    low, high, rgb = recipe.code_pairs(job, vq, 6, 8)
    batch = low.long(), high.long(), rgb.float() / 127.5 - 1

    def repeated(x):
        return torch.nn.functional.interpolate(x, scale_factor=2)

    with torch.no_grad():
        assert recipe.upsampler_loss(net, vq, *batch)[0] < recipe.upsampler_loss(repeated, vq, *batch)[0]
