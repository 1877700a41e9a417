"""Count the images of exact parallel decoding that equal those of serial decoding, by dtype.

Every image is drawn from the same noise with *parallel* 1, which is the reference, 0 and 8. Two images are equal if all
their tokens are. In fp32, (nearly) all images should be equal. In 16 bits the order of a sum affects the result: values
from 1 to the side of the image compute in one shape and should give equal images; serial decoding (0) uses another
shape. A CPU has other kernels for bf16 and fp16 than a GPU, so run the command on the device in question. --random
draws with an official width, random weights and a few blocks. For a de-tokenizer the codes of Tar's language model are
counted, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...cli.bench import PROMPT_TEXT, conditions_of
from ...cli.options import source, whole
from ...cli.planning import Planned
from ...cli.running import draw, drive
from ...errors import UserError
from ...networks.llama import TokenModel
from ...networks.tar import TarModel
from ...reports.record import dtype_of
from ...reports.table import markdown
from ...runs.limits import MOST_IMAGES
from ...runs.loading import AUTO, Ready, language_model_for, load_language_model, prompt_settings
from ...samplers.conditioning import AnyCondition
from ...samplers.tokens.tar import TarPromptSettings, tar_prompt
from ...samplers.tokens.token_noise import TokenNoise
from ..work.random_options import planned_for, shared_options

# Values of parallel: of the reference, and those that are compared with it.
REFERENCE = 1
COMPARED = (0, 8)
# Images that are drawn at once.
_BATCH = 25
# Of a network with random weights: blocks, and tokens per side of its images.
_BLOCKS = 2
_GRID = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    parser.add_argument("--images", default="200", metavar="N", help="images of each sampler; default 200")
    parser.add_argument("--seed", default="0", metavar="N", help="seed of the noise; default 0")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    images = whole(options.images, "images", 1, MOST_IMAGES)
    seed = whole(options.seed, "seed", 0, 2**63)

    planned, asked = planned_for(options)
    for p in planned:
        if not hasattr(p.settings, "parallel"):
            raise UserError(
                f"samplers: {p.entry.name} has no setting parallel; choose a sampler that has it, such as llamagen."
            )
    if options.random:
        planned = [_few_blocks(p) for p in planned]

    found: list[tuple[str, str, _Codes]] = []
    for p in planned:
        sampler = _Sampler(p, seed, partial(_condition, p, options, asked))
        found.append((p.label, dtype_of(p.on.model.net), sampler))

    readers = [p.on for p in planned if p.on.condition == "features"]
    if readers:
        writer = _writer(readers[0], options, asked, seed)
        found.append(("Tar's language model", dtype_of(writer.model.net), writer))

    rows = [["sampler", "dtype", "compared", f"equal to parallel {REFERENCE}", "of", "equal tokens %"]]
    for label, dtype, source_of_codes in found:
        for name, equal, share in _counts(source_of_codes, images):
            rows.append([label, dtype, name, str(equal), str(images), f"{share:.1f}"])

    print(markdown(rows, empty=False))
    return 0


class _Codes(Protocol):
    """What draws codes."""

    def __call__(self, window: int, first: int, count: int) -> Tensor:
        """Codes int64 [B, N] of ``count`` images from ``first`` on, with a value of ``parallel``."""


@dataclass(frozen=True)
class _Sampler:
    """The codes of a sampler."""

    planned: Planned
    seed: int
    condition: Callable[[int], AnyCondition]  # of a number of images

    def __call__(self, window: int, first: int, count: int) -> Tensor:
        condition: Any = self.condition(count)
        settings = replace(self.planned.settings, parallel=window)
        planned = replace(self.planned, settings=settings)
        codes: Tensor = draw(planned, condition, self.seed, first).latents
        return codes.flatten(1).cpu()


@dataclass(frozen=True)
class _Writer:
    """The codes of Tar's language model."""

    model: TarModel
    settings: TarPromptSettings
    prompts: Sequence[str]  # in turn
    seed: int

    def __call__(self, window: int, first: int, count: int) -> Tensor:
        texts = [self.prompts[i % len(self.prompts)] for i in range(count)]
        draws = TokenNoise(self.seed, range(first, first + count))
        sampler = tar_prompt(self.model, texts, replace(self.settings, parallel=window), draws)
        codes: Tensor = drive(sampler, "prompt", "codes").codes
        return codes.cpu()


def _condition(p: Planned, options: argparse.Namespace, asked: Mapping[str, str], images: int) -> AnyCondition:
    """The condition of a batch."""
    (condition,) = conditions_of([p], images, options, asked)
    return condition


def _writer(on: Ready, options: argparse.Namespace, asked: Mapping[str, str], seed: int) -> _Writer:
    """Tar's language model for a de-tokenizer."""
    choice = language_model_for(on) if options.tar == AUTO else options.tar
    model, stated = load_language_model(choice, source(options))
    return _Writer(model, prompt_settings(stated, asked), options.text or [PROMPT_TEXT], seed)


def _counts(codes: _Codes, images: int) -> Iterator[tuple[str, int, float]]:
    """For each value of ``parallel`` that is compared: images that equal those of :data:`REFERENCE`, and the share of
    equal tokens in percent.
    """
    same: dict[str, list[Tensor]] = {}
    for first in range(0, images, _BATCH):
        count = min(_BATCH, images - first)
        reference = codes(REFERENCE, first, count)
        for window in COMPARED:
            found = codes(window, first, count)
            same.setdefault(f"parallel {window}", []).append(found == reference)

    for name, parts in same.items():
        equal = torch.cat(parts)
        yield name, int(equal.all(1).sum()), 100 * float(equal.float().mean())


def _few_blocks(p: Planned) -> Planned:
    """The sampler on the first blocks of its network and a small image."""
    model = p.on.model
    assert isinstance(model, TokenModel)  # run() refuses others
    model.net.layers = model.net.layers[:_BLOCKS]
    return replace(p, ready=replace(p.on, model=replace(model, grid=_GRID)))
