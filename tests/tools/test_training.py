"""The training loop: resuming is exact, the result is the average, the recipes learn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fastar_nodes.model_loaders.autoencoders import load_kl
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.model_loaders.networks.mar import MARConfig
from fastar_nodes.samplers.mar.diffusion import tables
from fastar_nodes.tools.training import recipes
from fastar_nodes.tools.training.training import Schedule, generator, train
from safetensors import safe_open
from torch import nn

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY_KL = KLConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=2, groups=4)
TINY_MAR = MARConfig(
    dim=16,
    encoder_depth=1,
    decoder_depth=1,
    heads=2,
    buffer=2,
    tokens=64,
    channels=2,
    classes=10,
    head_depth=1,
    head_width=16,
)
QUIET = {"log": lambda text: None}


def regression(module, step):
    g = generator(3, step)
    x = torch.randn(16, 4, generator=g)
    return ((module(x) - x @ torch.arange(4.0)[:, None]) ** 2).mean(), {}


def fresh():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def test_a_stopped_run_goes_on_as_if_never_stopped(tmp_path):
    class Stop(Exception):
        pass

    def stopping(module, step):
        if step == 25 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            raise Stop
        return regression(module, step)

    schedule = Schedule(steps=40, batch=16, lr=0.05, warmup=5)
    whole = train("a", fresh(), regression, schedule, tmp_path / "whole", CPU, **QUIET)
    with pytest.raises(Stop):
        train("b", fresh(), stopping, schedule, tmp_path / "parts", CPU, save_every=0.0, **QUIET)
    resumed = train("b", fresh(), stopping, schedule, tmp_path / "parts", CPU, **QUIET)
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)
    again = train("b", fresh(), regression, schedule, tmp_path / "parts", CPU, **QUIET)
    assert torch.equal(again.weight, resumed.weight), "a finished run is only read back"


def test_training_learns_and_returns_the_average(tmp_path):
    net = train("r", fresh(), regression, Schedule(steps=400, batch=16, lr=0.05, ema=0.9), tmp_path, CPU, **QUIET)
    torch.testing.assert_close(net.weight.detach(), torch.arange(4.0)[None], atol=0.05, rtol=0)
    assert not net.training


def test_rate_rises_holds_and_falls_to_zero():
    s = Schedule(steps=100, batch=1, lr=1.0, warmup=10, decay=0.2)
    rates = [s.rate(i) for i in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[10] == rates[79] == 1.0
    assert rates[80:] == sorted(rates[80:], reverse=True) and 0 < rates[99] <= 0.05


def test_kl_recipe_writes_a_loadable_file_with_normal_latents(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "KL", TINY_KL)
    few = Schedule(steps=3, batch=4, lr=1e-3)
    recipes.train_kl(tmp_path, tmp_path / "kl.safetensors", CPU, few, few, few, count=40, **QUIET)
    model = load_kl(tmp_path / "kl.safetensors")
    data, _ = recipes.pictures(40, recipes.TRAIN_SEED, **QUIET)
    mean, _ = recipes.latents(model.net, data, CPU)
    channels = mean.transpose(0, 1).flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(2), atol=0.05, rtol=0)
    assert float(channels.std(1).max()) == pytest.approx(1, abs=0.05)


def test_a_trained_autoencoder_gets_another_decoder_and_keeps_its_latents(tmp_path):
    torch.manual_seed(1)
    start, few = KLAutoencoder(TINY_KL).eval(), Schedule(steps=3, batch=4, lr=1e-2, warmup=1, weight_decay=0.0, ema=0.0)
    before = {k: v.clone() for k, v in start.state_dict().items()}
    made = recipes.train_kl(
        tmp_path, tmp_path / "kl.safetensors", CPU, robust=few, count=40, start=start, **QUIET
    ).state_dict()
    for name, value in before.items():
        assert torch.equal(start.state_dict()[name], value), "the model that was given stays what it was"
        decodes = name.startswith(("decoder.", "post_quant_conv."))
        assert torch.equal(made[name], value) != decodes, name


def test_normalising_latents_does_not_change_the_pictures():
    torch.manual_seed(1)
    net = KLAutoencoder(TINY_KL).eval()
    data, _ = recipes.pictures(30, 5, **QUIET)
    x = recipes.to_signed(data)
    with torch.no_grad():
        before = net.decode(net.encode(x)[0])
        recipes.normalise_latents(net, data, CPU)
        torch.testing.assert_close(net.decode(net.encode(x)[0]), before, rtol=1e-3, atol=1e-3)


def test_mar_recipe_writes_a_loadable_file(tmp_path):
    torch.manual_seed(1)
    kl, out = KLAutoencoder(TINY_KL).eval(), tmp_path / "mar.safetensors"
    few = Schedule(steps=4, batch=8, lr=1e-3, muon_lr=1e-3)
    recipes.train_mar(TINY_MAR, "mar", kl, tmp_path, out, CPU, few, count=60, **QUIET)
    model = load_mar(out)
    assert model.net.config == TINY_MAR and model.t_max == recipes.T_MAX and model.label_set == "picture-book"
    with safe_open(out, "pt") as f:
        assert json.loads(f.metadata()["heads"]) == 2 and f.get_tensor("class_emb.weight").dtype == torch.float16


def test_diffusion_loss_is_least_for_the_truth():
    full, n = tables(), 400
    g = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(n, 3, generator=g), torch.randn(n, 3, generator=g)
    t = torch.randint(1, 1000, (n,), generator=g)
    a = full.alphas_cumprod.float()[t][:, None]
    x = a.sqrt() * x0 + (1 - a).sqrt() * noise
    # The posterior's own variance is the lower bound, logit -1; with the true noise the bound is then zero.
    mse, bound = recipes.diffusion_loss(torch.cat([noise, -torch.ones(n, 3)], 1), x0, x, noise, t, full)
    assert float(mse) == 0 and float(bound) == pytest.approx(0, abs=1e-3)
    worse = recipes.diffusion_loss(torch.cat([noise, torch.ones(n, 3)], 1), x0, x, noise, t, full)[1]
    assert worse > 1e-5  # small: with 1000 steps the two bounds of the variance are nearly equal
    assert recipes.diffusion_loss(torch.cat([noise + 1, -torch.ones(n, 3)], 1), x0, x, noise, t, full)[1] > 0.01


def test_pictures_are_the_books(tmp_path):
    data, labels = recipes.pictures(5, 9, **QUIET)
    from fastar_nodes.tools.training import picture_book as book

    s = book.scenes(9, 5)
    assert (
        np.array_equal(data.permute(0, 2, 3, 1).numpy(), book.render(s, 64)[0]) and labels.tolist() == s.label.tolist()
    )


def test_a_trained_mar_can_be_improved(tmp_path):
    """Training from given weights at a rate of zero returns them."""
    torch.manual_seed(1)
    kl = KLAutoencoder(TINY_KL).eval()
    few = Schedule(steps=2, batch=8, lr=1e-3)
    first = recipes.train_mar(
        TINY_MAR, "mar", kl, tmp_path / "a", tmp_path / "a.safetensors", CPU, few, count=60, **QUIET
    )
    still = Schedule(steps=2, batch=8, lr=0.0)
    again = recipes.train_mar(
        TINY_MAR, "mar", kl, tmp_path / "b", tmp_path / "b.safetensors", CPU, still, count=60, start=first, **QUIET
    )
    for name, value in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, msg=name)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_training_killed_at_random_points_writes_the_file_of_an_unbroken_one(tmp_path):
    script = Path(__file__).with_name("killed_training.py")
    done = subprocess.run([sys.executable, script, tmp_path, "1"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    kills = int(done.stdout.split()[1])
    assert kills >= 3 and "files equal, left: kl.safetensors mar.safetensors" in done.stdout, done.stdout
