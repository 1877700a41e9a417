"""What a hybrid computes once instead of often does not change its pictures: prompts and the encoder."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.model_loaders.networks.hybrid import PromptBatch
from fastar_nodes.model_loaders.networks.prompts import PromptRows
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.loop import FullTransformer
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from tiny_hybrids import tiny_hybrid

TEXTS = ("a dog", "two red apples in a blue bowl", "a dog")
PROMPTS = PromptCondition(TEXTS)
SETTINGS = MARSettings(ar_steps=6, diffusion_steps=4, cfg=3.0, cfg_schedule="constant")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hybrid():
    return tiny_hybrid()


def noise() -> PairedNoise:
    return PairedNoise(3, range(len(TEXTS)))


@pytest.fixture(scope="module")
def plain(hybrid):
    return finish(mar(hybrid, PROMPTS, SETTINGS, noise())).latents


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Within 1e-5 of the largest value."""
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(1.0, float(b.abs().max())))


class Uncached(FullTransformer):
    """The whole sequence at every AR step: no keys and values of prompts, and the encoder for each branch of guidance."""

    def __init__(self, model):
        ids = [model.prompt(text) for text in TEXTS] + [model.instruction(PROMPTS.unconditional)] * len(TEXTS)
        self.lengths = torch.tensor([len(row) for row in ids])
        self.ids = torch.tensor([row + [0] * (max(self.lengths) - len(row)) for row in ids])

    def __call__(self, run, step, wanted):
        known = run.plan.known(step).repeat(2, 1)
        tokens = run.tokens.repeat(2, 1, 1)
        z = run.model.hybrid(tokens, known, self.ids, self.lengths, wanted.repeat(2, 1))
        return z.unflatten(0, (2, -1))


class EncoderTwice(FullTransformer):
    """The encoder for each branch of guidance; prompts come from their cache."""

    def __call__(self, run, step, wanted):
        rows, net = run.rows, run.model.hybrid
        assert isinstance(rows, PromptRows) and rows.null is not None
        known, tokens = run.plan.known(step).repeat(2, 1), run.tokens.repeat(2, 1, 1)
        encoded = net.mar.encode(tokens, known, net.mar.class_rows(None, len(tokens)))
        fused = net.fuse(encoded, known, PromptBatch([*rows.prompts, *[rows.null] * len(rows)]))
        return net.mar.decode(fused, known, wanted.repeat(2, 1)).unflatten(0, (2, -1))


@pytest.mark.parametrize("transformer", [Uncached, lambda model: EncoderTwice()], ids=["prompt cache", "encoder once"])
def test_what_is_computed_once_equals_what_is_computed_often(hybrid, plain, transformer):
    close(finish(mar(hybrid, PROMPTS, SETTINGS, noise(), transformer=transformer(hybrid))).latents, plain)


def test_prompts_that_are_read_again_give_the_same_picture(hybrid, plain):
    """The unconditional prompt is kept by the model; a model without it reads it."""
    hybrid._unconditional.clear()
    close(finish(mar(hybrid, PROMPTS, SETTINGS, noise())).latents, plain)
