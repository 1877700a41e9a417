"""Speculation in the flow of a token: its distribution, with an affine head and for whole images, and its cost.

``test_nextstep_contract.py`` follows it with a plain reference that draws one image, one step after the other.
"""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from fastar_nodes.networks.speed import Recordable
from fastar_nodes.reports.record import Report
from fastar_nodes.samplers import chain, coupling, diffusion_steps
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.coupling import Coupled
from fastar_nodes.samplers.diffusion_steps import HeadCalls
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.nextstep import nextstep as module
from fastar_nodes.samplers.nextstep.flow import SOLVERS, flow
from fastar_nodes.samplers.nextstep.nextstep import nextstep
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import CounterRNG, PairedNoise
from fastar_nodes.samplers.speculation import Speculation
from nextstep_models import tiny_nextstep
from toy_models import ManyImages
from two_samples import p_values

NOISY = tuple(solver for solver in SOLVERS if solver != "ode")
EVERY_DRAFT, DRAWN_AGAIN = "every draft is kept", "rejected drafts are drawn again"
CARELESS = (EVERY_DRAFT, DRAWN_AGAIN)


def careless(how: str):
    """Within it, drafts are verified with a fault.

    A rejected draft cannot be replaced by a new sample of the target: what is accepted is no fair sample of it.
    """
    exact = coupling.couple_means

    def wrong(draft, mean, p, uniform):
        if how == EVERY_DRAFT:
            always = torch.ones(len(draft), dtype=torch.bool)
            return Coupled(draft, always, always)

        found = exact(draft, mean, p, uniform)
        g = torch.Generator().manual_seed(len(draft))
        redrawn = p.mean + p.log_std.exp() * torch.randn(draft.shape, generator=g)
        return found._replace(value=torch.where(found.accepted[:, None], draft, redrawn))

    return mock.patch.object(coupling, "couple_means", wrong)


# ------------------------------------------------------------------------------------------------ an affine head


class Affine:
    """A head of tokens of two numbers, whose velocities are an affine function of the state.

    With it every state of the plain flow is Gaussian. Its branches of guidance differ.
    """

    FACTORS = torch.tensor([[[0.6, -0.5], [0.4, 0.3]], [[0.3, 0.1], [-0.2, 0.4]], [[0.2, 0.3], [-0.1, 0.5]]])
    SHIFTS = torch.tensor([[0.8, -0.6], [0.3, 0.2], [-0.2, -0.1]])

    def __init__(self, branches: int):
        self.branches = [0, 2] if branches == 2 else list(range(branches))

    def __call__(self, x):
        return torch.stack([x @ self.FACTORS[b].to(x) + self.SHIFTS[b].to(x) for b in self.branches])

    def at_states(self, row, k, x):
        return self(x)

    def step(self, k, inputs):
        return chain.advance(inputs, self(inputs.x))


def rows_of(
    start, noise, made: HeadCalls, branches: int, dtype=torch.float32, scale: float = 1.0
) -> chain.DiffusionBatch:
    """Tokens of the affine head; ``scale``: of the guidance."""
    table = diffusion_steps.step_table(made.steps, torch.tensor(made.times)[:, None])
    table = replace(table, numbers=table.numbers.to(dtype))
    scales = torch.tensor([1.6, 1.3] if branches == 3 else [1.6], dtype=dtype) * scale
    return chain.DiffusionBatch(torch.zeros(()), scales.expand(len(start), -1), start, noise, table)


def moments(made: HeadCalls, branches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [2] and covariance [2, 2] of the plain flow's token, float64.

    It is an affine function of the start and the noise: the mean is its value at 0, and its columns are those at every
    number 1.
    """
    count = len(made.steps)
    inputs = torch.zeros(2 * (count + 1) + 1, count + 1, 2, dtype=torch.float64)
    for i in range(2 * (count + 1)):
        inputs[i + 1].view(-1)[i] = 1

    rows = rows_of(inputs[:, 0], inputs[:, 1:].transpose(0, 1), made, branches, torch.float64)
    *_, last = chain.run_chain(rows, Affine(branches))
    columns = last.x[1:] - last.x[0]
    return last.x[0], columns.T @ columns


def deviations(
    solver: str, window: int, branches: int = 2, scale: float = 1.0, images: int = 20_000, shift: float = 1.0
):
    """By how many standard errors the means and second moments of so many tokens of 6 steps are off, [5]; and the share
    of the drafted steps that were accepted.
    """
    made = flow(solver, 6, shift)
    g = torch.Generator().manual_seed(1000 * SOLVERS.index(solver) + 10 * window + branches)
    start = torch.randn(images, 2, generator=g)
    noise = torch.randn(6, images, 2, generator=g)
    keys = torch.randint(-(1 << 62), 1 << 62, (images,), generator=g)

    report = Report("nextstep", "toy", {}, 0, images, "cpu", memory={})
    rows = rows_of(start, noise, made, branches, scale=scale)
    paths = Speculation(Recordable(), Affine(branches), rows, CounterRNG(keys), report)
    off = paths.finish(np.arange(images), window).double()
    assert paths.done.min() == 6

    mean, covariance = moments(made, branches)
    off = off - mean
    products = torch.stack([off[:, 0] ** 2, off[:, 1] ** 2, off[:, 0] * off[:, 1]], 1)
    expected = torch.stack([covariance[0, 0], covariance[1, 1], covariance[0, 1]])
    values = torch.cat([off, products - expected], 1)
    accepted = report.counts["accepted_steps"] / report.counts["drafted_steps"]
    return values.mean(0) / (values.std(0) / images**0.5), accepted


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("solver", NOISY)
@pytest.mark.fast_cases("em0-4-2", "em-2-3", "sde-4-1", "cps-4-2")
def test_a_token_has_the_distribution_of_the_plain_flow(solver, window, branches):
    """120 numbers in all lie within 4.5 standard errors: p = 0.0008 of a false alarm."""
    off, accepted = deviations(solver, window, branches)
    assert off.abs().max() < 4.5
    assert 0.05 < accepted < 0.95


@pytest.mark.parametrize("shift", [0.5, 3.2])
@pytest.mark.parametrize("solver", NOISY)
@pytest.mark.fast_cases("em-3.2")
def test_a_token_of_shifted_steps_has_the_distribution_of_the_plain_flow(solver, shift):
    """Among them em's shifted last step, whose sample is not the data: 40 numbers, p = 0.0003 of a false alarm."""
    off, _ = deviations(solver, 4, shift=shift)
    assert off.abs().max() < 4.5


@pytest.mark.parametrize("how", CARELESS)
@pytest.mark.parametrize("solver", NOISY)
@pytest.mark.fast_cases("em0-every draft is kept", "cps-rejected drafts are drawn again")
def test_carelessness_would_show(solver, how):
    with careless(how):
        off, _ = deviations(solver, 4)
    assert off.abs().max() > 8


@pytest.mark.parametrize("solver", NOISY)
@pytest.mark.fast_cases("em0")
def test_a_bias_of_three_percent_of_the_guidance_would_show(solver):
    """Of 20,000 tokens."""
    for scale in (0.97, 1.03):
        off, _ = deviations(solver, 4, scale=scale)
        assert off.abs().max() > 4.5, scale


# ------------------------------------------------------------------------------------------------ whole images

SEED, ALPHA, IMAGES = 90210, 0.001, 4000
# Two tokens of 16 numbers.
SMALL = NextStepSettings(diffusion_steps=5, cfg=1.5, width=8, height=4)


class Louder(ManyImages):
    """Noise of the steps that is five percent larger."""

    def step_noise(self, stream, count, tokens, channels):
        return super().step_noise(stream, count, tokens, channels) * 1.05


def drawn(key: str, settings: NextStepSettings, kind: type = ManyImages) -> torch.Tensor:
    """Latents as vectors fp32 [IMAGES, 32] of images of one prompt; ``key`` names the noise."""
    random = torch.randint(-(1 << 62), 1 << 62, (IMAGES, 2), generator=torch.Generator().manual_seed(SEED))
    condition = PromptCondition(("a boat",) * IMAGES)
    with mock.patch.object(module, "row_keys", lambda *_: random):
        made = finish(nextstep(tiny_nextstep(), condition, settings, kind(f"{SEED}/{key}", IMAGES)))
    return made.latents.flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("solver", NOISY)
def test_images_have_the_distribution_of_plain_ones_and_the_controls_have_not(solver):
    """Two-sample tests of 4,000 images each. 12 p-values in all: 0.012 of a false alarm, with fixed seeds."""
    settings = replace(SMALL, solver=solver)
    plain = drawn("plain", settings)
    p = p_values(plain, drawn("speculation", replace(settings, speculation=3)))
    assert min(p.values()) > ALPHA, p

    controls = {"noise of 5 % more": (nullcontext(), settings, Louder)}
    for how in CARELESS:
        controls[how] = (careless(how), replace(settings, speculation=3), ManyImages)
    for name, (fault, own, kind) in controls.items():
        with fault:
            assert min(p_values(plain, drawn(name, own, kind)).values()) <= ALPHA, name


# ------------------------------------------------------------------------------------------------ what it costs


def counts_of(**settings) -> dict[str, int]:
    """Counts of an image of 9 tokens with 28 steps."""
    run = nextstep(tiny_nextstep(), PromptCondition(("a boat",)), NextStepSettings(**settings), PairedNoise(5, (0,)))
    return finish(run).report.counts


@pytest.mark.parametrize("cfg", [1.0, 7.5])
def test_half_the_calls_and_more_rows(cfg):
    """A call brings a token on by its accepted steps and one that is put right, or to the end of its window; all states
    of a window are rows of it.
    """
    branches = 1 + (cfg != 1)
    plain, annealed = counts_of(cfg=cfg), counts_of(cfg=cfg, diffusion_steps_end=10)
    assert (plain["head_calls"], plain["head_rows"]) == (9 * 28, branches * 9 * 28)
    assert annealed["head_calls"] == 168, "28 steps fall to 10"

    for end, steps in ((None, 9 * 28), (10, 168)):
        found = counts_of(cfg=cfg, speculation=8, diffusion_steps_end=end)
        assert steps - found["accepted_steps"] <= found["head_calls"] < 0.6 * steps
        assert found["head_rows"] == branches * found["drafted_steps"] > branches * steps
        assert found["transformer_passes"] == 9
