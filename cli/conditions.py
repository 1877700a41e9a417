"""Conditions of the samplers of a run: class labels, encoded text, or Tar's semantic codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..model_loaders.llamagen.captions import prompt_of
from ..runs.conditions import ConditionBuilder
from ..runs.limits import MOST_IMAGES
from ..runs.loading import Ready, Source
from ..samplers.conditioning import AnyCondition, CodeCondition
from .options import source
from .planning import PROMPT, Planned
from .running import drive


def builder(files: Source, **choices: Any) -> ConditionBuilder:
    """A builder of conditions that shows its progress, and prints each sentence on prompts once."""
    printed: set[str] = set()

    def warn(sentence: str) -> None:
        if sentence not in printed:
            printed.add(sentence)
            print(f"note: {sentence}", file=sys.stderr)

    return ConditionBuilder(files, run=drive, warn=warn, **choices)


def conditions(
    planned: Sequence[Planned],
    label: str | None,
    texts: Sequence[str] | None,
    repeat: int,
    options: argparse.Namespace,
    seed: int = 0,
    asked: Mapping[str, str] | None = None,
) -> list[AnyCondition]:
    """The condition of each sampler. Tar's codes are generated once for all samplers.

    Args:
        planned: the samplers with their models.
        label: class labels; None for class 0.
        texts: prompts.
        repeat: images of each label or prompt.
        options: of the command, for what reads prompts.
        seed: of Tar's codes.
        asked: settings of Tar's language model.

    Raises:
        UserError: an unknown label, a missing prompt, or an option that no model uses.
    """
    names = ", ".join(dict.fromkeys(p.on.model.name for p in planned))
    kinds = {p.on.condition for p in planned}
    if texts and kinds == {"class"}:
        raise UserError(
            f"prompt: the models of this run ({names}) read classes, not prompts; leave out --prompt, and all "
            f"settings that begin with {PROMPT} and a dot. If the command has the option --label, name a class with "
            "--label."
        )
    if label is not None and "class" not in kinds:
        raise UserError(
            f"label: the models of this run ({names}) read prompts, not classes; give a prompt with --prompt."
        )
    if asked and "features" not in kinds:
        setting = next(iter(asked))
        raise UserError(
            f"set: {PROMPT}.{setting} is a setting of Tar, but no sampler of this run uses Tar; leave this setting out."
        )

    images = getattr(options, "image", None)
    stated = getattr(options, "freedom", None)
    if stated is not None and not images:
        raise UserError(
            "freedom: this option is only for editing an image by prompt; give an image with --image, or "
            "leave freedom out."
        )
    if images and "class" in kinds:
        raise UserError(
            f"image: the models of this run ({names}) read classes and cannot edit an image; use Janus-4o or "
            "NextStep-1-Large-Edit."
        )
    if images and getattr(options, "negative", None) is not None:
        raise UserError(
            f"negative: with --image, the models of this run ({names}) use their own negative text instead of yours; "
            "leave negative out."
        )

    build = builder(
        source(options),
        tar=options.tar,
        ta_tok=options.ta_tok,
        encoder=options.encoder,
        seed=seed,
        asked=asked or {},
        unconditional=getattr(options, "negative", None),
    )
    made: dict[int, AnyCondition] = {}
    codes: CodeCondition | None = None
    for p in planned:
        if id(p.on) in made:
            continue

        if p.on.condition == "class":
            made[id(p.on)] = build.labels(p.on, "0" if label is None else label, repeat, most=MOST_IMAGES)
        elif images:
            prompts = _expect_prompts(texts, repeat, p.on)
            made[id(p.on)] = build.image_prompts(p.on, prompts, images, stated, repeat)
        elif p.on.condition != "features":
            made[id(p.on)] = build.prompts(p.on, _each(texts, repeat, p.on))
        else:
            if codes is None:
                codes = build.codes(p.on, _each(texts, repeat, p.on))
            build.forget()  # the language model is larger than the de-tokenizer
            made[id(p.on)] = build.read(codes, p.on)

    return [made[id(p.on)] for p in planned]


def _expect_prompts(texts: Sequence[str] | None, repeat: int, on: Ready) -> Sequence[str]:
    """Check that there are prompts, and not for too many images."""
    if not texts:
        raise UserError(
            f"prompt: {on.model.name} needs a prompt; give one with --prompt, for example --prompt 'a red boat at "
            "sunset'."
        )

    if len(texts) * repeat > MOST_IMAGES:
        raise UserError(f"batch: {len(texts) * repeat} images are too many; ask for at most {MOST_IMAGES}.")
    return texts


def _each(texts: Sequence[str] | None, repeat: int, on: Ready) -> list[str]:
    """The prompt of every image."""
    texts = _expect_prompts(texts, repeat, on)
    if on.condition == "text":
        texts = [prompt_of(text, "prompt") for text in texts]

    repeated = []
    for text in texts:
        repeated += [text] * repeat

    return repeated
