"""Speculation in the diffusion of a block: its distribution, its cost, and where it is off.

``test_block_contract.py`` follows it with a plain reference that draws one image, one diffusion step after the other.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_models import tiny_bitdance
from fastar_nodes.model_loaders.bitdance.loader import load_bitdance
from fastar_nodes.networks.bitdance import Head
from fastar_nodes.networks.speed import Recordable
from fastar_nodes.reports.record import Report
from fastar_nodes.samplers import chain, coupling, diffusion_steps, speculation
from fastar_nodes.samplers.blocks import bitdance as module
from fastar_nodes.samplers.blocks.bitdance import bitdance
from fastar_nodes.samplers.blocks.diffusion import euler_maruyama, head_calls
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.coupling import Coupled
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise
from fastar_nodes.samplers.speculation import Speculation

FEW = BlockSettings(diffusion_steps=12, cfg=2.0, cfg_schedule="linear")
ANNEALED = {"diffusion_steps_end": 2}


def run(settings, images=(0, 1, 2), model=None):
    labels = [(1, 4, 0)[i] for i in images]
    return finish(bitdance(model or tiny_bitdance(), from_ids(labels), settings, PairedNoise(5, images)))


# ------------------------------------------------------------------------------------------------ the distribution


class Affine:
    """A head of blocks of two tokens of one bit, whose predictions are an affine function of the state.

    With it every state of the plain diffusion is Gaussian. Its two branches of guidance differ.
    """

    branches = 2

    def __call__(self, k, x):
        mixed = x.flatten(1) @ torch.tensor([[0.6, -0.5], [0.4, 0.3]]).to(x) + torch.tensor([0.8, -0.6]).to(x)
        of_null = x.flatten(1) @ torch.tensor([[0.2, 0.3], [-0.1, 0.5]]).to(x) - torch.tensor([0.2, 0.1]).to(x)
        return torch.stack([mixed, of_null])[: self.branches].unflatten(2, x.shape[1:])

    def at_states(self, row, k, x):
        return self(k, x)

    def step(self, k, inputs):
        return chain.advance(inputs, self(k, inputs.x))


def toy_rows(start, noise, made, given=None, dtype=torch.float32):
    """Rows of the toy head, with guidance; ``given``: the first token of every block, None for none."""
    times = torch.tensor(made.times, dtype=dtype)
    table = diffusion_steps.step_table(made.steps, times[:, None])
    table = replace(table, numbers=table.numbers.to(dtype))
    free = torch.tensor([[False], [True]]).expand(len(start), -1, -1)
    known = None if given is None else chain.FixedTokens(times, start, torch.full_like(start, given), free)
    scale = torch.full((len(start), 1, 1), 1.6, dtype=dtype)
    return chain.DiffusionBatch(torch.zeros(()), scale, start, noise, table, fixed_tokens=known)


def first_steps(count: int, of: int):
    """The evaluations of the first ``count`` of some steps; the prediction of the last one counts."""
    whole = head_calls(of)
    return replace(whole, times=whole.times[: count + 1], steps=(*whole.steps[:count], whole.steps[-1]))


def noisy_last(of: int):
    """The evaluations of some steps, of which the last one adds noise."""
    whole = head_calls(of)
    return replace(whole, steps=(*whole.steps[:-1], euler_maruyama(x_coefficient=0.3, data_coefficient=0.6, std=0.4)))


def draws_of(made) -> int:
    """Noises that a diffusion takes."""
    return sum(step.log_std_middle > -math.inf for step in made.steps)


def moments(made, given) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [2] and covariance [2, 2] of the plain diffusion's sample, float64.

    It is an affine function of the start and the noise: the mean is its value at 0, and its columns are those at every
    number 1.
    """
    count = draws_of(made)
    inputs = torch.zeros(2 * (count + 1) + 1, count + 1, 2, 1, dtype=torch.float64)
    for i in range(2 * (count + 1)):
        inputs[i + 1].view(-1)[i] = 1

    rows = toy_rows(inputs[:, 0], inputs[:, 1:].transpose(0, 1), made, given, torch.float64)
    *_, last = chain.run_chain(rows, Affine())
    mean = last.x[0].flatten()
    columns = last.x[1:].flatten(1) - mean
    return mean, columns.T @ columns


def deviations(made, window: int, given: float | None, images: int = 20_000):
    """By how many standard errors the means and second moments of so many images are off, [5]; and the share of the
    drafted steps that were accepted.
    """
    count = draws_of(made)
    g = torch.Generator().manual_seed(1000 * count + window)
    start = torch.randn(images, 2, 1, generator=g)
    noise = torch.randn(count, images, 2, 1, generator=g)
    keys = torch.randint(-(1 << 62), 1 << 62, (images,), generator=g)

    report = Report("bitdance", "toy", {}, 0, images, "cpu", memory={})
    rows = toy_rows(start, noise, made, given)
    paths = Speculation(Recordable(), Affine(), rows, CounterRNG(keys), report)
    last = paths.finish(np.arange(images), window)
    assert paths.done.min() == len(made.steps)

    mean, covariance = moments(made, given)
    off = last.flatten(1).double() - mean
    products = torch.stack([off[:, 0] ** 2, off[:, 1] ** 2, off[:, 0] * off[:, 1]], 1)
    expected = torch.stack([covariance[0, 0], covariance[1, 1], covariance[0, 1]])
    values = torch.cat([off, products - expected], 1)
    accepted = report.counts["accepted_steps"] / report.counts["drafted_steps"]
    return values.mean(0) / (values.std(0) / images**0.5), accepted


@pytest.mark.parametrize("given", [None, 1.0], ids=["whole", "a given token"])
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.fast_cases("2-a given token", "4-whole")
def test_every_step_has_the_distribution_of_the_plain_diffusion(window, given):
    """After 1 to 6 of 6 steps. 120 numbers in all lie within 4.5 standard errors: p = 0.0008 of a false alarm."""
    for count in range(1, 7):
        off, accepted = deviations(first_steps(count, 6), window, given)
        assert off.abs().max() < 4.5, count
        assert 0.1 < accepted < 0.95, count


@pytest.mark.parametrize("given", [None, 1.0], ids=["whole", "a given token"])
def test_without_drafts_every_step_is_the_plain_diffusions(given):
    """The tokens that are not given: they are computed from the given ones on their path."""
    g = torch.Generator().manual_seed(1)
    made = first_steps(5, 6)
    rows = toy_rows(torch.randn(3, 2, 1, generator=g), torch.randn(draws_of(made), 3, 2, 1, generator=g), made, given)
    paths = Speculation(Recordable(), Affine(), rows, CounterRNG(torch.arange(3)))
    found = paths.finish(np.arange(3), 1)
    *_, last = chain.run_chain(rows, Affine())
    torch.testing.assert_close(found[:, 1], last.x[:, 1])


@pytest.mark.parametrize("window", [2, 4])
def test_a_last_step_with_noise_is_verified_too(window):
    off, accepted = deviations(noisy_last(6), window, None)
    assert off.abs().max() < 4.5 and 0.1 < accepted < 0.95


@pytest.mark.parametrize("careless", ["every draft is kept", "rejected drafts are drawn again"])
def test_carelessness_would_show(monkeypatch, careless):
    """A rejected draft cannot be replaced by a new sample of the target: what is accepted is no fair sample of it."""
    exact = coupling.couple_means

    def wrong(draft, mean, p, uniform):
        if careless == "every draft is kept":
            always = torch.ones(len(draft), dtype=torch.bool)
            return Coupled(draft, always, always)

        found = exact(draft, mean, p, uniform)
        g = torch.Generator().manual_seed(len(draft))
        redrawn = p.mean + p.log_std.exp() * torch.randn(draft.shape, generator=g)
        return found._replace(value=torch.where(found.accepted[:, None], draft, redrawn))

    monkeypatch.setattr(coupling, "couple_means", wrong)
    off, _ = deviations(first_steps(4, 6), 4, None)
    assert off.abs().max() > 15


@pytest.mark.parametrize("scale", [0.97, 1.03])
def test_a_bias_of_three_percent_of_the_guidance_would_show(monkeypatch, scale):
    """Of 20,000 images, in every number of steps of the test above."""
    exact = speculation.guide
    monkeypatch.setattr(speculation, "guide", lambda out, cfg, channels: exact(out, scale * cfg, channels))
    for count in (1, 3, 6):
        off, _ = deviations(first_steps(count, 6), 4, None)
        assert off.abs().max() > 4.5, count


# ------------------------------------------------------------------------------------------------ where it is off


@pytest.mark.parametrize("change", [{}, {"cfg": 1.0}, ANNEALED], ids=str)
@pytest.mark.fast_cases(1)
def test_windows_of_one_step_are_plain(change):
    plain = run(replace(FEW, **change))
    for window in (0, 1):
        found = run(replace(FEW, **change, speculation=window))
        assert torch.equal(found.latents, plain.latents) and found.report.counts == plain.report.counts
    assert "drafted_steps" not in plain.report.counts
    assert not torch.equal(run(replace(FEW, **change, speculation=2)).latents, plain.latents)


@pytest.mark.parametrize(
    ("change", "exact", "lossless"),
    [
        ({}, True, False),
        ({"speculation": 1}, True, False),
        ({"speculation": 2}, False, True),
        ({"speculation": 1, **ANNEALED}, False, False),
        ({"speculation": 8, **ANNEALED}, False, False),
        ({"speculation": 8, "diffusion_steps_end": 12}, False, True),
    ],
    ids=str,
)
def test_what_the_settings_promise(change, exact, lossless):
    settings = replace(FEW, **change)
    assert (settings.exact(4), settings.lossless()) == (exact, lossless)


# ------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize(("window", "calls"), [(2, 7), (5, 3), (12, 2), (13, 1), (64, 1)])
@pytest.mark.fast_cases("5-3", "64-1")
def test_drafts_that_are_right_cost_a_call_a_window(window, calls):
    """The first draft uses a prediction of 0. If the head predicts 0 everywhere, all of the 12 steps are accepted, and
    the 13 evaluations of a block need 13 / L calls, rounded up.
    """
    model = tiny_bitdance()
    last = model.net.denoiser.final_layer.linear
    last.weight.zero_()
    last.bias.zero_()
    counts = run(replace(FEW, speculation=window), model=model).report.counts
    assert counts["head_calls"] == 4 * calls
    assert counts["head_rows"] == 4 * 13 * 2 * 3 * 4, "blocks, evaluations, branches, images, tokens of a block"

    # The branches of the first block are images of their own.
    assert counts["drafted_steps"] == counts["accepted_steps"] == (2 + 3) * 12 * 3


def test_given_tokens_have_no_part_in_the_coupling():
    """The head is right about the second token, 0, and never about the given one, which follows its own path."""

    class OfSecond(Affine):
        def __call__(self, k, x):
            return torch.tensor([[9.0], [0.0]]).expand_as(x)[None]

    g = torch.Generator().manual_seed(0)
    noise = torch.randn(6, 100, 2, 1, generator=g)
    report = Report("bitdance", "toy", {}, 0, 100, "cpu", memory={})
    rows = toy_rows(noise[0], noise, head_calls(6), 1.0)
    paths = Speculation(Recordable(), OfSecond(), rows, CounterRNG(torch.arange(100)), report)
    assert [paths.done.min() for _ in paths.windows(np.arange(100), 4)] == [4, 7]
    assert report.counts["accepted_steps"] == report.counts["drafted_steps"] == 600


def test_every_state_is_counted_once():
    """Of whole windows all states but the last evaluation's are drafted."""
    settings = replace(FEW, cfg_schedule="constant", speculation=3)
    alone = run(settings, images=(0,)).report.counts
    tokens = 2 * 4  # of a state, with both branches
    ends = 4  # evaluations without a step, one of every block
    assert tokens * alone["drafted_steps"] <= alone["head_rows"] <= tokens * (alone["drafted_steps"] + 3 * ends)
    # A call brings an image on by its accepted steps and one that is put right, or to the end of its window.
    assert 4 * 13 - alone["accepted_steps"] <= alone["head_calls"] <= 4 * 13


def test_states_are_evaluated_as_many_at_once_as_fit_the_budget(monkeypatch):
    """A state of four tokens of width 64 has 4 (6 + 2) 64 modulations in each branch.

    The first block has the guidance scale 1: its branches are images of their own.
    """
    sizes = []
    inner = Head.denoise

    def counted(self, x, modulations):
        out = inner(self, x, modulations)
        sizes.append(out.shape[:2].numel())
        return out

    monkeypatch.setattr(Head, "denoise", counted)
    settings = replace(FEW, diffusion_steps=6, speculation=3)
    whole = run(settings)
    assert max(sizes) == 2 * 3 * 3, "both branches of the windows of three images"

    state = 2 * 4 * 8 * 64  # with both branches
    for budget, states in ((2 * state, 4), (2 * state - 1, 3), (1, 2)):
        sizes.clear()
        monkeypatch.setattr(module, "MODULATION_BUDGET", budget)
        parts = run(settings)
        assert torch.equal(parts.latents, whole.latents)
        assert max(sizes) == states
        assert 4 * sum(sizes) == parts.report.counts["head_rows"] == whole.report.counts["head_rows"]
        assert len(sizes) == parts.report.counts["head_calls"]


def test_every_evaluation_of_the_head_is_may_be_compiled(monkeypatch):
    """Else a report would say "speed: compile" of a head that ran plain."""
    calls = []

    def compiled(self, function, part):
        if part != "diffusion head":
            return function
        return lambda *args: calls.append(part) or function(*args)

    monkeypatch.setattr(Recordable, "compiled", compiled)
    assert run(replace(FEW, speculation=3)).report.counts["head_calls"] == calls.count("diffusion head") > 0


@pytest.mark.slow  # test_block_contract.py compares an image alone with the batch, also with speculation
def test_a_window_of_other_images_changes_no_image():
    """An image that has done its diffusion leaves the batch; the others go on by themselves."""
    settings = replace(FEW, speculation=8)
    together = run(settings)
    alone = [run(settings, (i,)) for i in range(3)]
    for i, one in enumerate(alone):
        assert torch.equal(one.latents[0], together.latents[i])
    for name in ("drafted_steps", "accepted_steps", "head_rows"):
        assert together.report.counts[name] == sum(one.report.counts[name] for one in alone), name
    assert together.report.counts["head_calls"] < sum(one.report.counts["head_calls"] for one in alone)


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 4])
def test_a_quarter_of_the_calls_on_the_demo(root: Path, images: int):
    """Of 16 blocks of 100 steps and an evaluation each."""
    model = load_bitdance(root / "demo" / "checkpoints" / "bitdance.safetensors", "fp32")
    settings = BlockSettings(diffusion_steps=100, cfg=2.0, cfg_schedule="linear", speculation=8)
    sampler = bitdance(model, from_ids(range(images)), settings, PairedNoise(7, range(images)))
    assert finish(sampler).report.counts["head_calls"] <= 16 * 101 / 4
