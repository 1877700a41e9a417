"""What the samplers of a run draw from: labels, encoded text, or the codes that Tar writes of a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from ..errors import UserError
from ..model_loaders import checkpoint as ck
from ..model_loaders import hub
from ..model_loaders.networks.gpt import TokenModel
from ..model_loaders.tar import expect_features, load_ta_tok, load_tar, parts_inside
from ..samplers.conditioning import AnyCondition, CodeCondition, TextCondition
from ..samplers.labels import label_sets, resolve_labels
from ..samplers.registry import TAR
from ..samplers.settings import knobs, make
from ..samplers.tokens.conditioning import features_of
from ..samplers.tokens.draws import PairedDraws
from ..samplers.tokens.settings import TarPromptSettings
from ..samplers.tokens.tar import tar_prompt
from .running import AUTO, MOST_IMAGES, Planned, Ready, drive, find_file, models_folder, stated_defaults

# What --set calls the stage of Tar that turns a prompt into codes.
PROMPT = "prompt"
# Language models of Tar: of the demo, and of everything else.
_DEMO_TAR, _OFFICIAL_TAR = "demo-tar", "tar-1.5b"


def conditions(
    planned: Sequence[Planned],
    label: str | None,
    texts: Sequence[str] | None,
    repeat: int,
    options: argparse.Namespace,
    seed: int = 0,
    asked: Mapping[str, str] | None = None,
) -> list[AnyCondition]:
    """What each sampler draws from: labels, or text for the models that read it. Tar writes its codes once for all.

    Args:
        label, texts: as typed; None where nothing was.
        repeat: images of each label or text.
        seed: of Tar's codes.
        asked: settings of what writes them, see :func:`of_prompt`.

    Raises:
        UserError: a label the model does not know, nothing to read, or something that nobody reads.
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
    known = on.model.label_set if on.model.label_set in label_sets() else ""  # a file may name a list we do not have
    condition = resolve_labels(label, known, repeat)
    condition.class_ids(on.classes, on.model.label_set, on.device)
    return condition


def _encode(texts: Sequence[str], repeat: int, on: Ready, options: argparse.Namespace) -> TextCondition:
    """Prompts, encoded; the encoder, which is larger than most models, is gone afterwards."""
    prompts = [text.strip() for text in texts]
    if not prompts or not all(prompts):
        raise UserError(
            f"text: {on.model.name} draws from text; say what with --text, for example --text 'a red boat'."
        )
    from ..model_loaders.text import load_text_encoder

    encoder = load_text_encoder(find_file(options.encoder, "t5", models_folder(options.models)), "auto", on.device)
    features = encoder.encode(prompts)
    repeated = [(rows, prompt) for rows, prompt in zip(features, prompts, strict=True) for _ in range(repeat)]
    return TextCondition(tuple(rows for rows, _ in repeated), tuple(prompt for _, prompt in repeated))


def of_prompt(sets: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Settings as given, parted: those of samplers, and by name those of what writes Tar's codes, checked."""
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
    """Codes of the prompts; the language model, which is larger than what draws, is gone afterwards."""
    if not texts:
        raise UserError(
            f"prompt: {on.model.name} draws from text; say what with --prompt, for example --prompt 'a red boat at sunset'."
        )
    prompts = [text.strip() for text in texts for _ in range(repeat)]
    if len(prompts) > MOST_IMAGES:
        raise UserError(f"batch: {len(prompts)} images are more than {MOST_IMAGES}; ask for fewer.")
    choice = options.tar
    if choice == AUTO:
        choice = _DEMO_TAR if on.choice in {e.id for e in hub.entries("dtok") if e.built_in} else _OFFICIAL_TAR
    path = find_file(choice, "tar", models_folder(options.models))
    tar = load_tar(path, options.dtype, on.device)
    own = stated_defaults(ck.read_metadata(path)) if path.is_file() else {}
    settings = make(TarPromptSettings, {**{k: v for k, v in own.items() if k in knobs(TarPromptSettings)}, **asked})
    return drive(
        tar_prompt(tar, prompts, settings, PairedDraws(seed, range(len(prompts))), seed), "prompt", "codes"
    ).condition


def _read_codes(codes: CodeCondition, on: Ready, options: argparse.Namespace) -> AnyCondition:
    """The same as the features that a de-tokenizer draws from, if it does: once, so that no sampler's seconds hold it."""
    assert isinstance(on.model, TokenModel) and on.path is not None
    if on.model.net.config.condition == "codes":
        return codes
    path = on.path
    if options.ta_tok != AUTO or "ta-tok" not in parts_inside(path):
        choice = hub.ta_tok_for(on.choice, on.path) if options.ta_tok == AUTO else options.ta_tok
        path = find_file(choice, "ta-tok", models_folder(options.models))
    reader = load_ta_tok(path, options.dtype, on.device, encoder=False)
    expect_features(reader, on.model)
    return features_of(codes, reader)
