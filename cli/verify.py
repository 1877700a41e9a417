"""Verify what FastAR promises about a model of yours: images alone and in batches, and the methods at exact settings.

It loads the model in fp32, generates two images with few steps, and generates them again in every way that must give
the same images: one by one, with every sampler at its exact settings, with parallel decoding, and on a GPU with
compiled networks. With --dtypes, the images in other precisions must be nearer to these images than images of another
seed are. It does not compare 4 bits, which change so many tokens that an image can be as far away as one of another
seed. It also checks what is known of published files. Exit code 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import UserError, first_line
from ..model_loaders.catalogue import hub, official
from ..model_loaders.kinds import DTYPES, KINDS
from ..networks import speed
from ..networks.hybrid import UNCONDITIONAL, HybridModel
from ..networks.janus import JanusModel
from ..networks.llama import TokenModel
from ..networks.mar import MARModel
from ..networks.nextstep import NextStepModel, to_tokens
from ..networks.quantized import EIGHT_BITS
from ..pipeline import Pipeline, load
from ..runs.drawing import Drawing
from ..runs.presets import CUSTOM, EXACT
from ..runs.registry import SAMPLERS, Entry
from ..samplers.conditioning import AnyCondition, PromptCondition
from ..samplers.engine import finish
from ..samplers.settings import knobs
from .checks import stand_in
from .options import MODEL_OPTIONS, models_option

SEED = 7
# Images of a case, so that a batch differs from an image alone.
IMAGES = 2
# Exactness holds for any number of steps, and on any grid.
FEW_STEPS = {"steps": 8, "diffusion_steps": 10}
GRID = 8
# Largest difference of latents, relative to the largest latent, that counts as rounding in fp32: the first diffusion
# step multiplies the rounding errors of a batch by hundreds.
ROUNDING = 0.01
# Standard deviation of the tokens of an image, whose latents were scaled to one.
STD = (0.5, 2.0)

# Ids of the Qwen2.5 tokenizer, as recorded, within the template of Harmon and UniPic.
QWEN_IDS = {
    "a photo of a pink stop sign.": [264, 6548, 315, 264, 18217, 2936, 1841, 13],
    "a dog on the left and a cat on the right.": [264, 5562, 389, 279, 2115, 323, 264, 8251, 389, 279, 1290, 13],
}
BEFORE = [151_644, 872, 198, 31115, 458, 2168, 25]
AFTER = [151_645, 198, 151_644, 77091, 198]
EMPTY = [*BEFORE[:-1], 13, *AFTER]

# The first tokens of Janus-Pro-1B in bf16 on CUDA, drawn greedily at guidance 5 from a text without the template, as a
# test of transformers states them. Another GPU may give other tokens.
JANUS_TEXT = "A portrait of young girl. masterpiece, film grained, best quality."
JANUS_TOKENS = [
    *(4484, 4015, 15750, 506, 3758, 11651, 8597, 5739, 4861, 971),
    *(14985, 14834, 15438, 7548, 1820, 1465, 13529, 12761, 10503, 12761),
    *(14303, 6155, 4015, 11766, 705, 15736, 14146, 10417, 1951, 7713),
    *(14305, 15617, 6169, 2706, 8006, 14893, 3855, 10188, 15652, 6297),
    *(1097, 12108, 15038, 311, 14998, 15165, 897, 4044, 1762, 4676),
]

# What is wrong, in words, or "".
Case = Callable[[], str]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name in ("model", "device"):
        default, about = MODEL_OPTIONS[name]
        parser.add_argument(f"--{name}", default=default, help=about)
    others = [name for name in (*DTYPES, *EIGHT_BITS) if name != "fp32"]
    about = "other precisions of 16 and 8 bits to compare with fp32; 4 bits change too many tokens for this comparison"
    parser.add_argument("--dtypes", nargs="*", default=[], choices=others, help=about)
    models_option(parser)


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a promise does not hold."""

    def loaded(dtype: str) -> Pipeline:
        return load(options.model, dtype=dtype, device=options.device, models=options.models)

    failed = False
    for name, case in cases(loaded, network_of(options.model), options.dtypes):
        try:
            wrong = case()
        except UserError as problem:
            print(f"{name}: not possible ({first_line(problem)})", flush=True)
            continue
        print(f"{name}: FAIL, {wrong}" if wrong else f"{name}: ok", flush=True)
        failed |= bool(wrong)

    return int(failed)


def cases(loaded: Callable[[str], Pipeline], network: str, dtypes: list[str]) -> Iterator[tuple[str, Case]]:
    """What is verified, by name. ``loaded``: the model in a dtype; ``network``: its published one, or ""."""
    pipe = loaded("fp32")
    yield "alone and in a batch", lambda: in_batch(pipe)

    for name in pipe.samplers:
        entry = SAMPLERS[name]
        if entry is not SAMPLERS[pipe.samplers[0]] and is_exact(pipe, entry):
            yield f"{name} at its exact settings", partial(at_exact_settings, pipe, entry)

    if "parallel" in knobs(SAMPLERS[pipe.samplers[0]].settings):
        yield "parallel decoding", lambda: in_parallel(pipe)
    if pipe.device.type == "cuda":
        yield "compiled networks", lambda: compiled(pipe)

    yield "varied tokens", lambda: varied(pipe, draw(pipe).latents)
    for dtype in dtypes:
        yield dtype, partial(in_dtype, pipe, loaded, dtype)

    if network in official.HYBRID_SIZES:
        yield f"prompts of {network}", partial(hybrid_facts, cast(HybridModel, pipe.model), network)
    if network == "Janus-Pro-1B" and pipe.device.type == "cuda":
        yield f"first tokens of {network}", lambda: first_tokens(loaded("bf16"))


# ------------------------------------------------------------------------------------------------ images


def condition_of(pipe: Pipeline, images: int) -> AnyCondition:
    """Classes, a prompt, or random features in place of those that a further network would compute."""
    kind = pipe.ready.condition
    if kind == "class":
        return pipe.condition([i % pipe.ready.classes for i in range(images)])
    if kind == "prompt":
        return pipe.condition("a red boat at sunset", images=images)
    return stand_in(pipe.ready, images)


def small(pipe: Pipeline) -> Any:
    """A token model for small images, whose grid still fits its regions; another model as it is."""
    if pipe.ready.kind.kind != "tokens":
        return pipe.model

    model = cast(TokenModel, pipe.model)
    across = math.isqrt(model.regions)
    grid = min(model.grid, GRID)
    return replace(model, grid=max(across, grid - grid % across))


def few_steps(pipe: Pipeline) -> dict[str, int]:
    """Settings for fewer steps, as far as the model's samplers have them: at most one AR step a token. For a NextStep
    also those for a small image, because every token of it takes a pass.
    """
    known = knobs(SAMPLERS[pipe.samplers[0]].settings)
    found = {name: value for name, value in FEW_STEPS.items() if name in known}
    if "steps" in found:
        found["steps"] = min(found["steps"], pipe.ready.tokens)
    if pipe.ready.kind.kind == "continuous":
        side = GRID * cast(NextStepModel, pipe.model).stride
        found |= {"width": side, "height": side}
    return found


def draw(
    pipe: Pipeline,
    entry: Entry | None = None,
    settings: Any = None,
    images: range = range(IMAGES),
    seed: int = SEED,
) -> Any:
    """What a sampler makes of some of the images; the unaccelerated one with few steps if none is given. A model is its
    own draft.
    """
    entry = entry or SAMPLERS[pipe.samplers[0]]
    settings = settings or pipe.settings(entry.name, CUSTOM, **few_steps(pipe))
    condition = condition_of(pipe, images.stop).for_images(images)
    model = small(pipe)
    draft = model if entry.needs_draft else None
    return finish(Drawing(entry, model, settings, condition, seed, images, draft=draft).steps())


def values(pipe: Pipeline, result: Any) -> Tensor:
    """What is compared: latents of a MAR, the signs of bits, or codes."""
    return result.latents > 0 if pipe.ready.kind.kind == "blocks" else result.latents


def difference(found: Tensor, expected: Tensor) -> str:
    """How tokens differ, or latents by more than rounding; "" if they do not."""
    if expected.is_floating_point():
        apart = float((found - expected).abs().max() / expected.abs().max())
        return "" if apart <= ROUNDING else f"latents differ by {apart:.1e} of the largest one"

    share = float((found != expected).float().mean())
    return f"{100 * share:.1f} % of the tokens differ" if share else ""


def distance(found: Tensor, expected: Tensor) -> float:
    """Mean difference of latents, or the share of tokens that differ."""
    if expected.is_floating_point():
        return float((found - expected).abs().mean())
    return float((found != expected).float().mean())


# ------------------------------------------------------------------------------------------------ promises


def in_batch(pipe: Pipeline) -> str:
    """An image alone is the image in a batch."""
    alone = [values(pipe, draw(pipe, images=range(i, i + 1))) for i in range(IMAGES)]
    return difference(torch.cat(alone), values(pipe, draw(pipe)))


def is_exact(pipe: Pipeline, entry: Entry) -> bool:
    """Whether a sampler has exact settings on the model, without a further file."""
    if entry.needs_up_sampler:
        return False
    settings = pipe.settings(entry.name, EXACT, **few_steps(pipe))
    return bool(settings.exact(min(entry.family.grid(small(pipe)))))


def at_exact_settings(pipe: Pipeline, entry: Entry) -> str:
    """A sampler gives the unaccelerated images."""
    settings = pipe.settings(entry.name, EXACT, **few_steps(pipe))
    return difference(values(pipe, draw(pipe, entry, settings)), values(pipe, draw(pipe)))


def in_parallel(pipe: Pipeline) -> str:
    """Windows of tokens that are verified together give the tokens of serial decoding."""
    entry = SAMPLERS[pipe.samplers[0]]
    serial = pipe.settings(entry.name, parallel=0)
    windows = replace(serial, parallel=small(pipe).grid)
    return difference(values(pipe, draw(pipe, entry, windows)), values(pipe, draw(pipe, entry, serial)))


def compiled(pipe: Pipeline) -> str:
    """Compiled networks give the same images."""
    expected = values(pipe, draw(pipe))
    speed.choose(pipe.model.net, speed.COMPILE, pipe.device)
    try:
        return difference(values(pipe, draw(pipe)), expected)
    finally:
        speed.choose(pipe.model.net, speed.PLAIN, pipe.device)


def in_dtype(pipe: Pipeline, loaded: Callable[[str], Pipeline], dtype: str) -> str:
    """:func:`nearly`, of the model in another dtype, which is loaded only now."""
    return nearly(pipe, loaded(dtype))


def nearly(pipe: Pipeline, other: Pipeline) -> str:
    """The tokens of another dtype are nearer to those of fp32 than the tokens of another seed are."""
    expected, apart = (values(pipe, draw(pipe, seed=seed)) for seed in (SEED, SEED + 1))
    gap, most = distance(values(other, draw(other)), expected), distance(apart, expected)
    if gap < most:
        return ""
    return f"the distance from fp32 is {gap:.3f}, but must be below {most:.3f}, the distance of a different seed"


def varied(pipe: Pipeline, latents: Tensor) -> str:
    """Latents have a std of about one, so their scale is right; of bits some are on; tokens have several values, and if
    these are continuous, no two tokens are equal.
    """
    if pipe.ready.kind.kind == "masked":
        std = float(cast(MARModel, pipe.model).to_tokens(latents.float()).std())
        return "" if STD[0] < std < STD[1] else f"the standard deviation of the latents is {std:.2f}"
    if pipe.ready.kind.codes:
        return "" if len(latents.unique()) > 1 else "all tokens have one value"
    if pipe.ready.kind.kind == "continuous":
        tokens = to_tokens(latents, cast(NextStepModel, pipe.model).net.config.patch).flatten(0, 1)
        return "" if len(tokens.unique(dim=0)) == len(tokens) else "some tokens are equal"
    return "" if 0 < (latents > 0).float().mean() < 1 else "all bits have one value"


def hybrid_facts(model: HybridModel, network: str) -> str:
    """The largest beta, and the ids of prompts."""
    if model.max_beta != official.HYBRID_SIZES[network][4]:
        return f"the largest beta is {model.max_beta}"

    for text, ids in QWEN_IDS.items():
        if model.prompt(text) != [*BEFORE, *ids, *AFTER]:
            return f"the tokenizer reads {text!r} as different ids"
    return "" if model.instruction(UNCONDITIONAL) == EMPTY else "the tokenizer reads the empty prompt as different ids"


def first_tokens(pipe: Pipeline) -> str:
    """The first tokens of a prompt are those that transformers' test states."""
    model = cast(JanusModel, pipe.model)
    ids = model.tokenize(JANUS_TEXT)
    bare = replace(model, tokenize=lambda _: ids, template=replace(model.template, user=None, assistant=None))
    settings = pipe.settings(pipe.samplers[0], top_k=1)
    drawing = Drawing(SAMPLERS[pipe.samplers[0]], bare, settings, PromptCondition(("",)), 0, range(1))

    with closing(drawing.begin(range(1))) as steps:
        step = next(step for step in steps if int(step.decided.sum()) >= len(JANUS_TOKENS))
        found = step.latents.flatten()[: len(JANUS_TOKENS)].tolist()

    same = sum(a == b for a, b in zip(found, JANUS_TOKENS, strict=True))
    return (
        "" if found == JANUS_TOKENS else f"only {same} of {len(JANUS_TOKENS)} tokens equal the tokens of transformers"
    )


def network_of(name: str) -> str:
    """The published network of a catalogue entry; "" of a file."""
    entries = {entry.id: entry for kind in KINDS for entry in hub.entries(kind)}
    return entries[name].network if name in entries else ""
