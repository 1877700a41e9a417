"""Reinforcement learning of a LlamaGen: which tokens answer for what, and that the better ones become likelier."""

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.training import picture_book
from fastar_nodes.lab.training import reward_recipe as recipe
from fastar_nodes.lab.training.judge import Judge, load_judge
from fastar_nodes.lab.training.training import Job, Schedule
from fastar_nodes.networks.autoencoder import VQAutoencoder
from fastar_nodes.networks.llama import Llama
from fastar_nodes.samplers.tokens.sampling import tempered

pytestmark = pytest.mark.slow

TOKENS = recipe.GRID**2
JUDGE = "lab/checkpoints/judge.safetensors"


def network(seed: int = 0) -> Llama:
    """A tiny GPT that draws varied tokens."""
    net = tiny.scattered(Llama(tiny.GPT_CONFIG), seed).eval()
    net.output.weight.data *= 0.4
    return net


def reading(scenes, reward, faults=None):
    """Images of those scenes that are all object and match where the reward is above 0."""
    n = len(scenes)
    faults = torch.zeros(n, TOKENS) if faults is None else faults
    return recipe.Reading(scenes, reward > 0, reward, faults, torch.ones(n, TOKENS, dtype=torch.bool))


def test_probabilities_are_those_of_the_draws():
    """A first token is drawn as often as its log-probability says, and every drawn token can be drawn."""
    torch.manual_seed(0)
    net, settings = network(), recipe.settings_of(recipe.ROUNDS[0])
    labels = torch.full((600,), 3)
    tokens = recipe.sampled(net, labels, settings, seed=5)
    assert tokens.shape == (600, TOKENS) and len(set(map(tuple, tokens.tolist()))) > 500

    lesson = recipe._Lesson(Job(None, fp32=True), recipe.ROUNDS[0], None, None, 0.0, net)
    with torch.no_grad():
        cond, null = lesson._branches(net, labels[:20], tokens[:20])
        found = recipe.log_probabilities(cond, null, tokens[:20], settings)
        chances = tempered(torch.lerp(null, cond, settings.cfg), settings).softmax(-1)
    drawn = chances.gather(-1, tokens[:20, :, None])[..., 0]
    assert float((drawn > 0).float().mean()) > 0.999 and 0.1 < float((drawn < 1).float().mean())
    torch.testing.assert_close(found[drawn > 0], drawn[drawn > 0].log())

    # The standard deviation of a share of 600 draws is at most 0.02.
    shares = torch.bincount(tokens[:, 0], minlength=tiny.VQ.codes) / len(tokens)
    assert float((shares - chances[0, 0]).abs().max()) < 0.08 and float(shares.max()) < 0.9


def test_a_token_answers_for_faults_from_its_place_on():
    scenes = picture_book.scenes(0, 40, labels=[4] * 40)
    faults = torch.zeros(40, TOKENS)
    faults[0, 100] = 0.2
    pupil = recipe.Pupil(network(), TOKENS)

    found = recipe.advantages(pupil, reading(scenes, torch.ones(40), faults), torch.full((40,), 4), 0.0)
    assert float((found[0, :101] - found[0, 101:].max()).max()) < 0
    assert float(found[1:].abs().max()) < float(found[0, :101].abs().min()), "the others are hardly blamed"


def test_reading_tells_a_wrong_object_from_a_right_one():
    s = picture_book.scenes(77, 40)
    rgb, mask = picture_book.render(s, 64)
    torn = rgb.copy()
    torn[:, 32:][mask[:, 32:] > 128] = (255, 0, 255)
    judge, tolerance = load_judge(JUDGE)

    good = recipe.read_images(judge, tolerance, rgb, torch.from_numpy(s.label))
    bad = recipe.read_images(judge, tolerance, torn, torch.from_numpy(s.label))
    assert good.matches.float().mean() > 0.9 and bad.matches.float().mean() < 0.2
    assert float((good.reward - bad.reward).mean()) > 1
    upper, lower = bad.faults.chunk(2, 1)
    assert float(lower.sum()) > 2 * float(upper.sum())
    other = recipe.read_images(judge, tolerance, rgb, torch.from_numpy((s.label + 1) % 10))
    assert not other.matches.any() and float(other.reward.max()) < float(good.reward.median())


def test_better_tokens_become_likelier(tmp_path, monkeypatch):
    """With a reward for one token value the model draws it more often, and images of its own stay varied."""

    def rewarding(judge, tolerance, rgb, labels):
        share = torch.from_numpy(rgb.astype(np.float32))
        return reading(picture_book.scenes(0, len(labels), labels=labels.tolist()), share - 0.1)

    net, settings = network(), recipe.settings_of(recipe.ROUNDS[0])
    labels = torch.arange(40) % 10
    drawn = recipe.sampled(net, labels, settings, 1)
    value = int(torch.bincount(drawn.flatten(), minlength=tiny.VQ.codes).argsort()[-4])
    before = (drawn == value).float().mean()

    monkeypatch.setattr(recipe, "read_images", rewarding)
    monkeypatch.setattr(recipe, "small_images", lambda vq, tokens: (tokens == value).float().mean(1).numpy())
    monkeypatch.setattr(recipe, "ANCHOR", 0.0)
    few = Schedule(steps=15, batch=40, lr=1e-2, warmup=1, ema=0.5)
    monkeypatch.setattr(recipe, "ROUNDS", (recipe.Round(few, 0.7, 0.1), recipe.Round(few, 0.7, 0.0)))

    job = Job(tmp_path, log=lambda line: None, fp32=True)
    trained = recipe.train_reward(job, tmp_path / "gpt.safetensors", VQAutoencoder(tiny.VQ), Judge(), 0.08, net)
    after = (recipe.sampled(trained, labels, settings, 1) == value).float().mean()
    assert float(after) > 1.5 * float(before) + 0.02
