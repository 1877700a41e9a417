"""Conditions of the samplers of a run: class labels, encoded text, or Tar's semantic codes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..assembly import AUTO, Ready, language_model_for, load_language_model, load_reader, prompt_settings
from ..errors import UserError
from ..model_loaders.networks.prompts import UNCONDITIONAL, HybridModel
from ..model_loaders.networks.ta_tok import TATokModel
from ..samplers.batches import in_parts
from ..samplers.conditioning import (
    AnyCondition,
    CodeCondition,
    PromptCondition,
    TextCondition,
    label_sets,
    resolve_labels,
)
from ..samplers.registry import HYBRID, TAR
from ..samplers.settings import make
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.settings import TarPromptSettings
from ..samplers.tokens.tar import tar_prompt
from .options import MOST_IMAGES, source
from .planning import Planned
from .running import drive

# Prefix of the settings of Tar's language model in --set.
PROMPT = "prompt"


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
        label, texts: the options; None if not given.
        repeat: images per label or text.
        seed: seed of Tar's codes.
        asked: settings of Tar's language model, see :func:`of_prompt`.

    Raises:
        UserError: an unknown label, a missing prompt, or an option that no model of the run uses.
    """
    names = ", ".join(dict.fromkeys(p.on.model.name for p in planned))
    if texts and not any(p.on.draws_from_text for p in planned):
        raise UserError(f"text: the models of this run ({names}) draw classes; name one with --label.")
    if label is not None and all(p.on.draws_from_text for p in planned):
        raise UserError(f"label: the model of this run ({names}) draws from text; say what with --text.")
    if asked and not any(p.on.family == TAR for p in planned):
        raise UserError(
            f"set: no sampler of this run draws from Tar's codes, which {PROMPT}.{next(iter(asked))} is about."
        )
    made: dict[int, AnyCondition] = {}
    codes: CodeCondition | None = None
    for p in planned:
        if id(p.on) in made:
            continue
        if p.on.family == TAR:
            codes = codes or write_codes(texts, repeat, p.on, options, seed, asked or {})
            made[id(p.on)] = _read_codes(codes, p.on, options)
        elif p.on.family == HYBRID:
            made[id(p.on)] = _prompts(texts, repeat, p.on, options)
        else:
            made[id(p.on)] = (
                _encode(texts or (), repeat, p.on, options)
                if p.on.draws_from_text
                else _labels(p.on, label or "0", repeat)
            )
    most = max(len(condition) for condition in made.values())
    if most > MOST_IMAGES:
        raise UserError(f"batch: {most} images are more than {MOST_IMAGES}; ask for fewer.")
    return [made[id(p.on)] for p in planned]


def _labels(on: Ready, label: str, repeat: int) -> AnyCondition:
    known = on.model.label_set if on.model.label_set in label_sets() else ""  # a file may name an unknown label set
    condition = resolve_labels(label, known, repeat)
    condition.class_ids(on.classes, on.model.label_set, on.device)
    return condition


def _prompts(texts: Sequence[str] | None, repeat: int, on: Ready, options: argparse.Namespace) -> PromptCondition:
    """Prompts as typed, checked against the model."""
    if not texts:
        raise UserError(
            f"prompt: {on.model.name} draws from text; say what with --prompt, for example --prompt 'a red boat at sunset'."
        )
    model, negative = cast(HybridModel, on.model), getattr(options, "negative", None)
    for text in texts:
        model.prompt(text)
    more = () if negative is None else (negative,)
    model.instruction(*more or (UNCONDITIONAL,))
    return PromptCondition(tuple(text for text in texts for _ in range(repeat)), *more)


def _encode(texts: Sequence[str], repeat: int, on: Ready, options: argparse.Namespace) -> TextCondition:
    """Encode prompts. The encoder, which is larger than most models, is freed afterwards."""
    prompts = [text.strip() for text in texts]
    if not prompts or not all(prompts):
        raise UserError(
            f"text: {on.model.name} draws from text; say what with --text, for example --text 'a red boat'."
        )
    from ..model_loaders.text import load_text_encoder

    encoder = load_text_encoder(source(options).find(options.encoder, "t5"), AUTO, on.device)
    features = encoder.encode(prompts)
    repeated = [(rows, prompt) for rows, prompt in zip(features, prompts, strict=True) for _ in range(repeat)]
    return TextCondition(tuple(rows for rows, _ in repeated), tuple(prompt for _, prompt in repeated))


def of_prompt(sets: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split --set into the settings of samplers, and by name those of Tar's language model (checked)."""
    mine = [text for text in sets if text.partition("=")[0].strip().startswith(f"{PROMPT}.")]
    asked = {}
    for text in mine:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise UserError(f"set: {text!r} is not of the form {PROMPT}.name=value.")
        asked[name.removeprefix(f"{PROMPT}.")] = value
    make(TarPromptSettings, asked)
    return [text for text in sets if text not in mine], asked


def write_codes(
    texts: Sequence[str] | None,
    repeat: int,
    on: Ready,
    options: argparse.Namespace,
    seed: int,
    asked: Mapping[str, str],
) -> CodeCondition:
    """Generate Tar's codes. The language model, which is larger than the de-tokenizer, is freed afterwards."""
    if not texts:
        raise UserError(
            f"prompt: {on.model.name} draws from text; say what with --prompt, for example --prompt 'a red boat at sunset'."
        )
    prompts = [text.strip() for text in texts for _ in range(repeat)]
    if len(prompts) > MOST_IMAGES:
        raise UserError(f"batch: {len(prompts)} images are more than {MOST_IMAGES}; ask for fewer.")
    choice = language_model_for(on) if options.tar == AUTO else options.tar
    tar, stated = load_language_model(choice, source(options))
    settings = prompt_settings(stated, asked)

    def start(part: range) -> Any:
        own = [prompts[i] for i in part]
        return tar_prompt(tar, own, settings, PairedDraws(seed, part), seed)

    return drive(in_parts(start, len(prompts)), "prompt", "codes").condition


def _read_codes(codes: CodeCondition, on: Ready, options: argparse.Namespace) -> AnyCondition:
    """Features of the codes, for a de-tokenizer that reads features. Computed once, outside the samplers' seconds."""
    if on.config.condition == "codes":
        return codes
    return features_of(codes, cast(TATokModel, load_reader(on, source(options), options.ta_tok)))
