"""The training loop: resuming is exact, the result is the average; and losses that have a known value."""

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.training import picture_book, recipes
from fastar_nodes.lab.training.training import Job, Schedule, generator, seeded, train
from fastar_nodes.networks.autoencoder import KLAutoencoder
from fastar_nodes.samplers.mar.tables import constants
from torch import nn

pytestmark = pytest.mark.slow


def regression(module, step):
    g = generator(3, step)
    x = torch.randn(16, 4, generator=g)
    return ((module(x) - x @ torch.arange(4.0)[:, None]) ** 2).mean(), {}


def fresh():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def test_training_learns_and_returns_the_average(tmp_path):
    net = train(Job(tmp_path), "r", fresh(), regression, Schedule(steps=400, batch=16, lr=0.05, ema=0.9))
    torch.testing.assert_close(net.weight.detach(), torch.arange(4.0)[None], atol=0.05, rtol=0)
    assert not net.training


def test_a_training_that_is_interrupted_anywhere_ends_like_an_unbroken_one(tmp_path, monkeypatch):
    """Before a step, while a state file is half written, and before it takes the place of the last one."""
    few, save, left = Schedule(steps=4, batch=16, lr=0.05), torch.save, 0
    whole = train(Job(tmp_path / "whole"), "r", fresh(), regression, few)

    def event():
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    def saved(state, path):
        save(state, path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        event()
        path.write_bytes(data)
        event()

    monkeypatch.setattr(torch, "save", saved)
    interrupted = 0
    for left in range(1, 20):  # noqa: B007 - counted down by event()
        try:
            net = train(Job(tmp_path / "parts"), "r", fresh(), lambda *a: event() or regression(*a), few, 0.0)
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted >= 4 and all(torch.equal(v, whole.state_dict()[k]) for k, v in net.state_dict().items())


def test_a_trained_autoencoder_gets_another_decoder_and_keeps_its_latents(tmp_path, monkeypatch):
    few = Schedule(steps=3, batch=4, lr=1e-2, warmup=1, weight_decay=0.0, ema=0.0)
    monkeypatch.setattr(recipes, "KL_ROBUST_SCHEDULE", few)
    start = seeded(1, lambda: KLAutoencoder(tiny.KL)).eval()
    before = {k: v.clone() for k, v in start.state_dict().items()}
    made = recipes.train_kl(Job(tmp_path, images=40), tmp_path / "kl.safetensors", start).state_dict()
    for name, value in before.items():
        assert torch.equal(start.state_dict()[name], value), "the model that was given stays what it was"
        decodes = name.startswith(("decoder.", "post_quant_conv."))
        assert torch.equal(made[name], value) != decodes, name


def test_normalising_latents_gives_them_unit_variance_and_does_not_change_the_pictures(tmp_path):
    net, device = seeded(1, lambda: KLAutoencoder(tiny.KL)).eval(), torch.device("cpu")
    data, _ = recipes.pictures(Job(tmp_path), 30)
    x = recipes.to_signed(data)
    with torch.no_grad():
        before = net.decode(net.encode(x)[0])
        recipes.normalise_latents(net, data, device)
        torch.testing.assert_close(net.decode(net.encode(x)[0]), before, rtol=1e-3, atol=1e-3)
    channels = recipes.latents(net, data, device)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(8), atol=0.01, rtol=0)
    assert float(channels.std(1).max()) == pytest.approx(1, abs=0.01)


def test_diffusion_loss_is_least_for_the_truth():
    full, n = constants(), 400
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


def test_images_are_the_books(tmp_path):
    """In chunks, and each with its own label."""
    images, labels = recipes.pictures(Job(tmp_path), 502)
    for i in (0, 499, 500, 501):
        s = picture_book.scenes(recipes.TRAIN_SEED, 1, i)
        assert np.array_equal(images[i].permute(1, 2, 0).numpy(), picture_book.render(s)[0][0])
        assert labels[i] == s.label[0]
