"""Which model each sampler of a run samples, and what the sampler needs beside it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import assembly
from ..assembly import AUTO, DEMO, FILES, PAR, Drafts, Ready, Source
from ..errors import UserError
from ..model_loaders import hub
from ..model_loaders.checkpoint import read_metadata
from ..samplers.registry import HYBRID, LLAMAGEN, MAR, TAR, Entry
from ..samplers.tokens.settings import LATENT
from ..samplers.tokens.upsampling import UpSampling, up_sampling
from .options import source, whole
from .planning import Planned

# Samplers without --samplers, by what the model's file holds; and what a draft model adds.
USUAL = {MAR: "mar,fasthybrid", HYBRID: "mar,fasthybrid", LLAMAGEN: "llamagen,zipar", PAR: "par", TAR: "tar,zipar"}
_DRAFTED = ",mulosd"


def usual_samplers(options: argparse.Namespace) -> str:
    """The value of --samplers, or the samplers that suit the model."""
    if options.samplers is not None:
        return options.samplers
    if options.model == DEMO:
        return USUAL[TAR] + _DRAFTED if options.text else USUAL[MAR]
    kind = _identify(options.model, source(options)) or MAR
    return USUAL[kind] + (_DRAFTED if kind == TAR and options.draft != AUTO else "")


def _identify(choice: str, files: Source) -> str:
    """What the file of --model holds, see :func:`.assembly.identify`."""
    return assembly.identify(files.find(choice, FILES[assembly.listed_family(choice) or MAR]))


def load(options: argparse.Namespace, entries: Iterable[Entry]) -> dict[str, Ready]:
    """Load the model of each sampler: the model of the options, or of the demo the one of the sampler's family.

    Returns:
        Models by sampler name.

    Raises:
        UserError: a file is missing or does not fit, or a sampler is for another family.
    """
    entries, files = list(dict.fromkeys(entries)), source(options)
    families = _families(entries, bool(options.text), getattr(options, "label", None) is not None)
    if options.model == DEMO and options.decoder != AUTO and len(set(families.values())) > 1:
        raise UserError("decoder: the samplers of this run are of two families with a decoder each; leave it at auto.")
    loaded: dict[str, Ready] = {}
    out = {}
    for entry in entries:
        choice, family = options.model, families[entry.name]
        if choice == DEMO:
            choice = _demo_model(entry, entries, families, files)
        elif not loaded:
            families = dict.fromkeys(families, _family_of_model(choice, entries, files))
            family = families[entry.name]
        if choice not in loaded:
            grid = None if family == MAR or options.grid is None else whole(options.grid, "grid", 2, 128)
            loaded[choice] = assembly.load(family, choice, files, options.decoder, grid)
        out[entry.name] = loaded[choice]
    return out


def _family_of_model(choice: str, entries: Sequence[Entry], files: Source) -> str:
    """Family of the model that --model names.

    Raises:
        UserError: a sampler is for another family.
    """
    found = assembly.listed_family(choice) or _identify(choice, files) or entries[0].family
    found = LLAMAGEN if found == PAR else found
    other = next((e for e in entries if found not in e.families), None)
    if other:
        raise UserError(
            f"samplers: {other.name} samples {other.models}, but {Path(choice).name} is not one; leave it out, "
            "or name another model."
        )
    return found


def _families(entries: Sequence[Entry], prompted: bool, labelled: bool) -> dict[str, str]:
    """Sampler name to the family of its demo model. A token sampler of two families follows the samplers of one; with a prompt it uses
    Tar, and a MAR sampler without a label the demo that reads prompts."""
    settled = {e.family for e in entries if not e.also}
    tar = prompted or TAR in settled and LLAMAGEN not in settled
    out = {e.name: TAR if tar and TAR in e.families else e.family for e in entries}
    if prompted and not labelled and any(e.built_in and not e.missing for e in hub.entries(FILES[HYBRID])):
        out |= {e.name: HYBRID for e in entries if HYBRID in e.families}
    return out


def _demo_model(entry: Entry, entries: Sequence[Entry], families: Mapping[str, str], files: Source) -> str:
    """The built-in model that a sampler uses for "demo".

    A sampler with a single model fixes the picture size for its family, because seconds are comparable only at one size.
    """
    family = families[entry.name]
    fixed = [e.demos(family)[0] for e in entries if families[e.name] == family and len(e.demos(family)) == 1]
    own = entry.demos(family)
    if len(own) == 1 or not fixed:
        return own[0]
    sizes = {choice: read_metadata(files.find(choice, FILES[family])).get("grid") for choice in (fixed[0], *own)}
    return next((choice for choice in own if sizes[choice] == sizes[fixed[0]]), own[0])


def with_draft(planned: Sequence[Planned], options: argparse.Namespace) -> list[Planned]:
    """The samplers with their draft model, up-sampler or codebook bound to ``entry.run``; loaded only where needed.

    Raises:
        UserError: a draft model is needed and none is named, or there is no decoder.
    """
    files = source(options) if any(p.entry.needs_draft or p.entry.needs_codes for p in planned) else None
    out = []
    drafts: Drafts | None = None
    for p in planned:
        more: dict[str, Any] = {}
        if files and p.entry.needs_codes and p.on.decoder is None:
            raise UserError(
                f"random: {p.entry.name} needs a tokenizer, and random weights come without; name a --model instead."
            )
        if files and p.entry.needs_draft:
            shared = any(q.entry.needs_codes == "up_sampler" for q in planned)
            drafts = drafts or Drafts(files, options.draft, options.model, shared)
            more["draft"] = drafts.load(p.entry.name, p.on)
        if files and p.entry.needs_codes == "up_sampler":
            more["up_sampler"] = _up_sampling(p, files, options.up_sampler)
        elif p.entry.needs_codes:
            more["vq"] = p.on.decoder
        out.append(replace(p, entry=replace(p.entry, run=partial(p.entry.run, **more))) if more else p)
    return out


def _up_sampling(p: Planned, files: Source, choice: str) -> UpSampling:
    """How MuLo-SD enlarges the draft.

    Raises:
        UserError: the learned up-sampler is selected and there is none.
    """
    learned = None
    if p.settings.up_sampler == LATENT:
        learned = assembly.load_up_sampler(p.on.decoder_choice, files, choice)
    return up_sampling(p.settings.up_sampler, p.on.vq, model=learned)
