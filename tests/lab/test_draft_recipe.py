"""The recipe of CSpD's draft: it learns the outputs of its target, for the same known tokens and noisy tokens."""

import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.training import draft_recipe as recipe
from fastar_nodes.lab.training.initialise import initialise_mar
from fastar_nodes.lab.training.training import Job, Schedule
from fastar_nodes.networks.autoencoder import KLAutoencoder
from fastar_nodes.networks.mar import MAR
from fastar_nodes.samplers.mar.tables import constants

pytestmark = pytest.mark.slow


def network(seed):
    """A tiny MAR whose outputs depend on everything."""
    torch.manual_seed(seed)
    net = initialise_mar(MAR(tiny.MAR))
    for weight in net.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.05)
    return net


def test_conditions_depend_on_known_tokens_and_the_label():
    net = network(0)
    tokens, label = torch.randn(2, 64, 8), net.class_emb(torch.tensor([1, 4]))
    order = torch.stack([torch.randperm(64), torch.randperm(64)])
    known, hidden = order[:, :20].sort(1).values, order[:, 20:]

    found = recipe.conditions(net, tokens, known, hidden, label)
    assert found.shape == (2, 44, tiny.MAR.dim)

    others = tokens.scatter(1, hidden[..., None].expand(-1, -1, 8), 9.0)
    torch.testing.assert_close(recipe.conditions(net, others, known, hidden, label), found)
    for changed in (
        recipe.conditions(net, tokens + 1, known, hidden, label),
        recipe.conditions(net, tokens, known, hidden, -label),
    ):
        assert (changed - found).abs().max() > 1e-4


def test_noisy_tokens_follow_the_forward_process():
    full, x0 = constants(), torch.full((40_000, 8), 2.0)
    x, t = recipe.noisy(x0, full, torch.Generator().manual_seed(3))

    late = t > 900
    a = full.alphas_cumprod.float()[t[late]]
    assert abs(float(x[late].mean() - 2 * a.sqrt().mean())) < 0.02
    spread = (x[late] - 2 * a.sqrt()[:, None]) / (1 - a).sqrt()[:, None]
    assert abs(float(spread.std()) - 1) < 0.02


def test_a_draft_agrees_more_with_its_target_after_training(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "DRAFT", tiny.MAR)
    monkeypatch.setattr(recipe, "SCHEDULE", Schedule(steps=60, batch=8, lr=3e-3, muon_lr=6e-3, ema=0.9))
    losses = []
    monkeypatch.setattr(recipe, "imitation_loss", noting(recipe.imitation_loss, losses))

    target = network(1)
    recipe.train_draft(Job(tmp_path, images=16), tmp_path / "d.safetensors", KLAutoencoder(tiny.KL), target)
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def noting(function, losses):
    """``function``, whose first result is written down."""

    def call(*args):
        out = function(*args)
        losses.append(float(out[0].detach()))
        return out

    return call
