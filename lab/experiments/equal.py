"""Count the images of exact parallel decoding that equal those of serial decoding, by dtype.

Every image is drawn from the same noise with each value of *parallel*; the first value is the reference. --alone draws
the reference again, one image at a time. Two images are equal if all their tokens are. In fp32, (nearly) all images
should be equal. In 16 bits the order of a sum affects the result: values from 1 to the side of the image compute in one
shape and should give equal images; serial decoding (0) uses another shape. A CPU has other kernels for bf16 and fp16
than a GPU, so run the command on the device in question. --random draws with an official width, random weights and a
few blocks. For a de-tokenizer the codes of Tar's language model are counted, too.
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
from ...samplers.tokens.draws import PairedDraws
from ...samplers.tokens.settings import TarPromptSettings
from ...samplers.tokens.tar import tar_prompt
from ..work.random_options import planned_for, shared_options

# Of a network with random weights: blocks, and tokens per side of its images.
_BLOCKS = 2
_GRID = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    shared_options(parser)
    parser.add_argument("--parallel", default="1,0,8", metavar="W,W", help="values to compare; default 1,0,8")
    parser.add_argument("--images", default="200", metavar="N", help="images of each sampler; default 200")
    parser.add_argument("--batch", default="25", metavar="N", help="images that are drawn at once; default 25")
    parser.add_argument("--seed", default="0", metavar="N", help="seed of the noise; default 0")
    parser.add_argument("--alone", action="store_true", help="also draw every image alone, which takes long")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    windows = [whole(text, "parallel", 0, 4096) for text in options.parallel.split(",")]
    images = whole(options.images, "images", 1, MOST_IMAGES)
    batch = min(whole(options.batch, "batch", 1, MOST_IMAGES), images)
    seed = whole(options.seed, "seed", 0, 2**63)

    planned, asked = planned_for(options)
    for p in planned:
        if not hasattr(p.settings, "parallel"):
            raise UserError(f"samplers: {p.entry.name} has no setting parallel; name a sampler of tokens.")
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

    rows = [["sampler", "dtype", "compared", f"equal to parallel {windows[0]}", "of", "equal tokens %"]]
    for label, dtype, source_of_codes in found:
        for name, equal, share in _counts(source_of_codes, windows, images, batch, options.alone):
            rows.append([label, dtype, name, str(equal), str(images), f"{share:.1f}"])

    print(markdown(rows, empty=False))
    return 0


class _Codes(Protocol):
    """What draws codes."""

    def __call__(self, window: int, chosen: range, first: int, count: int) -> Tensor:
        """Codes int64 [B, N] of the images ``chosen`` of a batch, with a value of ``parallel``.

        The batch has ``count`` images from ``first`` on; ``chosen`` counts from its first one.
        """


@dataclass(frozen=True)
class _Sampler:
    """The codes of a sampler."""

    planned: Planned
    seed: int
    condition: Callable[[int], AnyCondition]  # of a number of images

    def __call__(self, window: int, chosen: range, first: int, count: int) -> Tensor:
        condition: Any = self.condition(count)
        settings = replace(self.planned.settings, parallel=window)
        planned = replace(self.planned, settings=settings)
        codes: Tensor = draw(planned, condition.of(chosen), self.seed, first + chosen.start).latents
        return codes.flatten(1).cpu()


@dataclass(frozen=True)
class _Writer:
    """The codes of Tar's language model."""

    model: TarModel
    settings: TarPromptSettings
    prompts: Sequence[str]  # in turn
    seed: int

    def __call__(self, window: int, chosen: range, first: int, count: int) -> Tensor:
        texts = [self.prompts[i % len(self.prompts)] for i in chosen]
        draws = PairedDraws(self.seed, [first + i for i in chosen])
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


def _counts(
    codes: _Codes, windows: Sequence[int], images: int, batch: int, alone: bool
) -> Iterator[tuple[str, int, float]]:
    """For each value of ``parallel`` but the first, and for images alone: images that equal those of the first value,
    and the share of equal tokens in percent.
    """
    same: dict[str, list[Tensor]] = {}
    for first in range(0, images, batch):
        count = min(batch, images - first)
        everything = range(count)
        reference = codes(windows[0], everything, first, count)
        for window in windows[1:]:
            found = codes(window, everything, first, count)
            same.setdefault(f"parallel {window}", []).append(found == reference)

        if alone:
            singles = [codes(windows[0], range(i, i + 1), first, count) for i in everything]
            same.setdefault("alone", []).append(torch.cat(singles) == reference)

    for name, parts in same.items():
        equal = torch.cat(parts)
        yield name, int(equal.all(1).sum()), 100 * float(equal.float().mean())


def _few_blocks(p: Planned) -> Planned:
    """The sampler on the first blocks of its network and a small image."""
    model = p.on.model
    assert isinstance(model, TokenModel)  # run() refuses others
    model.net.layers = model.net.layers[:_BLOCKS]
    return replace(p, ready=replace(p.on, model=replace(model, grid=_GRID)))
