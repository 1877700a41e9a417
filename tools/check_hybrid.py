"""Compare downloaded weights of Harmon or UniPic with what is
known of the official models, and draw one image by plain MAR.

A line each: the shapes, the largest beta, whether all weights are finite, the ids of prompts, the std of the drawn
tokens. The exit code is 1 if one differs.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ..bench.sizes import HYBRID_SIZES, official_hybrid
from ..cli.options import model_options
from ..cli.planning import load, plan
from ..cli.running import draw
from ..errors import UserError
from ..model_loaders.networks.hybrid import UNCONDITIONAL, HybridModel
from ..samplers.conditioning import PromptCondition
from ..samplers.registry import SAMPLERS

# Ids of the Qwen2.5 tokenizer, as recorded; the template is part of them.
RECORDED = {
    "a photo of a pink stop sign.": [264, 6548, 315, 264, 18217, 2936, 1841, 13],
    "a dog on the left and a cat on the right.": [264, 5562, 389, 279, 2115, 323, 264, 8251, 389, 279, 1290, 13],
}
_BEFORE, _AFTER = [151_644, 872, 198, 31115, 458, 2168, 25], [151_645, 198, 151_644, 77091, 198]
_UNCONDITIONAL = [*_BEFORE[:-1], 13, *_AFTER]
# Std of the tokens of an image, whose latents were scaled to one.
_STD = (0.5, 2.0)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model_options(parser)
    parser.add_argument("--prompt", default=next(iter(RECORDED)), dest="text", metavar="TEXT", help="what is drawn")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="sets", help="a setting of MAR"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    (planned,) = plan("mar", options.sets, load(options, [SAMPLERS["mar"]]))
    model = planned.on.model
    if not isinstance(model, HybridModel):
        raise UserError(f"model: {model.name} is no Harmon or UniPic; name one with --model.")
    latents = draw(planned, PromptCondition((options.text,)), 0).latents
    lines = [*check(model), check_tokens(model, latents)]
    print("\n".join(f"{'ok  ' if good else 'FAIL'} {name}: {found}" for name, good, found in lines))

    return int(not all(good for _, good, _ in lines))


def check(model: HybridModel) -> Iterator[tuple[str, bool, str]]:
    """Compare a loaded model with what is known of the official ones: (what, whether it agrees, what was found)."""
    found, side = model.hybrid.config, model.net.config.grid
    fits = [
        size
        for size in HYBRID_SIZES
        if official_hybrid(size, side) == replace(found, llm=replace(found.llm, tied=True))
    ]
    fits = [size for size in fits if HYBRID_SIZES[size][3] == model.trained]
    yield "shapes", bool(fits), fits[0] if fits else "none of " + ", ".join(HYBRID_SIZES)
    if fits:
        beta = HYBRID_SIZES[fits[0]][4]
        yield "largest beta", model.max_beta == beta, f"{model.max_beta:g}, official {beta:g}"

    parameters = list(model.hybrid.named_parameters())
    bad = next((name for name, p in parameters if not bool(p.isfinite().all())), None)
    yield "weights", bad is None, f"{len(parameters)} tensors" if bad is None else f"{bad} is not finite"
    expected = {text: [*_BEFORE, *ids, *_AFTER] for text, ids in RECORDED.items()}
    same = model.instruction(UNCONDITIONAL) == _UNCONDITIONAL
    same = same and all(model.prompt(text) == ids for text, ids in expected.items())
    yield "prompt ids", same, f"{len(expected)} recorded prompts and the unconditional one"


def check_tokens(model: HybridModel, latents: Tensor) -> tuple[str, bool, str]:
    """As :func:`check`, for latents [B, C, h, w] that were sampled."""
    std = float(model.to_tokens(latents.float()).std())
    return "token std", _STD[0] < std < _STD[1], f"{std:.3f}, expected about 1 ({_STD[0]:g} to {_STD[1]:g})"
