"""Images of a model for tests/test_own_model.py, and what is known of published models."""

import math
import os
from dataclasses import replace

import fastar_nodes
import torch
from fastar_nodes.cli.checks import stand_in
from fastar_nodes.model_loaders.catalogue import hub, official
from fastar_nodes.model_loaders.kinds import KINDS
from fastar_nodes.networks.hybrid import UNCONDITIONAL, HybridModel
from fastar_nodes.networks.llama import TokenModel
from fastar_nodes.pipeline import Pipeline
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.settings import knobs

MODEL = os.environ.get("FASTAR_MODEL", "")
DEVICE = os.environ.get("FASTAR_DEVICE", "auto")
SEED = 7
# Images of a case, so that a batch differs from an image alone.
IMAGES = 2
# Exactness holds for any number of steps, and on any grid.
FEW_STEPS = {"steps": 8, "diffusion_steps": 10}
GRID = 8
# Largest difference of latents, relative to the largest latent, that counts as rounding in fp32: the first diffusion
# step multiplies the rounding errors of a batch by hundreds.
ROUNDING = 0.01

# Ids of the Qwen2.5 tokenizer, as recorded, within the template of Harmon and UniPic.
QWEN_IDS = {
    "a photo of a pink stop sign.": [264, 6548, 315, 264, 18217, 2936, 1841, 13],
    "a dog on the left and a cat on the right.": [264, 5562, 389, 279, 2115, 323, 264, 8251, 389, 279, 1290, 13],
}
BEFORE = [151_644, 872, 198, 31115, 458, 2168, 25]
AFTER = [151_645, 198, 151_644, 77091, 198]
EMPTY = [*BEFORE[:-1], 13, *AFTER]


def load(dtype: str, name: str = "") -> Pipeline:
    return fastar_nodes.load(name or MODEL, dtype=dtype, device=DEVICE)


def condition_of(pipe: Pipeline, images: int = IMAGES):
    """Classes, a prompt, or random features in place of those that a further network would compute."""
    kind = pipe.ready.condition
    if kind == "class":
        return pipe.condition([i % pipe.ready.classes for i in range(images)])
    if kind == "prompt":
        return pipe.condition("a red boat at sunset", images=images)
    return stand_in(pipe.ready, images)


def small(pipe: Pipeline):
    """A token model for small images, whose grid still fits its regions; another model as it is."""
    model = pipe.model
    if not isinstance(model, TokenModel):
        return model

    across = math.isqrt(model.regions)
    grid = min(model.grid, GRID)
    return replace(model, grid=max(across, grid - grid % across))


def few_steps(pipe: Pipeline) -> dict[str, int]:
    """Settings for fewer steps, as far as the model's samplers have them: at most one AR step a token."""
    known = knobs(SAMPLERS[pipe.samplers[0]].settings)
    found = {name: value for name, value in FEW_STEPS.items() if name in known}
    if "steps" in found:
        found["steps"] = min(found["steps"], pipe.ready.tokens)
    return found


def draw(pipe: Pipeline, entry=None, settings=None, images: range = range(IMAGES), seed: int = SEED, draft=None):
    """What a sampler makes of some of the images of :func:`condition_of`; the plain one with few steps if none is
    given.
    """
    entry = entry or SAMPLERS[pipe.samplers[0]]
    settings = settings or pipe.settings(entry.name, **few_steps(pipe))
    condition = condition_of(pipe, images.stop).of(images)
    return finish(Drawing(entry, small(pipe), settings, condition, seed, images, draft=draft).steps())


def values(pipe: Pipeline, result) -> torch.Tensor:
    """What is compared: latents of a MAR, the signs of bits, or codes."""
    return result.latents > 0 if pipe.ready.kind.decoder == "bitdance-ae" else result.latents


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Tokens are equal, latents up to rounding."""
    assert found.shape == expected.shape
    if expected.is_floating_point():
        difference = float((found - expected).abs().max() / expected.abs().max())
        assert difference <= ROUNDING, f"{difference:.1e} of the largest latent"
        return

    share = float((found == expected).float().mean())
    assert share == 1, f"{100 * share:.1f} % of the tokens are equal"


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean difference of latents, or the share of tokens that differ."""
    if expected.is_floating_point():
        return float((found - expected).abs().mean())
    return float((found != expected).float().mean())


def expect_hybrid_facts(model: HybridModel, network: str) -> None:
    """The largest beta, and the ids of prompts."""
    assert model.max_beta == official.HYBRID_SIZES[network][4]
    assert model.instruction(UNCONDITIONAL) == EMPTY
    for text, ids in QWEN_IDS.items():
        assert model.prompt(text) == [*BEFORE, *ids, *AFTER]


def network_of(name: str) -> str:
    """The published network of a catalogue entry; "" of a file."""
    entries = {entry.id: entry for kind in KINDS for entry in hub.entries(kind)}
    return entries[name].network if name in entries else ""
