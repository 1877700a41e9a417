"""Which model each sampler of a run samples, and what the sampler needs beside it, by the options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .. import assembly
from ..assembly import AUTO, DEMO, PAR, Drafts, Ready, choose_models, complete, identified
from ..errors import UserError
from ..samplers.registry import FAMILIES, MAR, TAR, Entry
from .options import source, whole
from .planning import Planned

# Samplers without --samplers, by what the model's file holds; and what a draft model adds.
USUAL = {**{name: family.usual for name, family in FAMILIES.items()}, PAR: "par"}
_DRAFTED = ",mulosd"


def usual_samplers(options: argparse.Namespace) -> str:
    """The value of --samplers, or the samplers that suit the model."""
    if options.samplers is not None:
        return options.samplers
    if options.model == DEMO:
        return USUAL[TAR] + _DRAFTED if options.text else USUAL[MAR]
    kind = identified(options.model, source(options)) or MAR
    return USUAL[kind] + (_DRAFTED if kind == TAR and options.draft != AUTO else "")


def load(options: argparse.Namespace, entries: Iterable[Entry]) -> dict[str, Ready]:
    """Load the model of each sampler, by its name: the model of the options, or of the demo the one of the sampler's family."""
    entries, files = list(dict.fromkeys(entries)), source(options)
    labelled = getattr(options, "label", None) is not None
    chosen = choose_models(options.model, entries, files, bool(options.text), labelled)
    if options.model == DEMO and options.decoder != AUTO and len({family for family, _ in chosen.values()}) > 1:
        raise UserError("decoder: the samplers of this run are of two families with a decoder each; leave it at auto.")
    loaded: dict[str, Ready] = {}
    for family, choice in dict.fromkeys(chosen.values()):
        grid = None if options.grid is None else whole(options.grid, "grid", 2, 128)
        loaded[choice] = assembly.load(family, choice, files, options.decoder, grid)
    return {name: loaded[choice] for name, (_, choice) in chosen.items()}


def with_draft(planned: Sequence[Planned], options: argparse.Namespace) -> list[Planned]:
    """The samplers with their draft model and up-sampler bound to ``entry.run``; loaded only where needed."""
    drafts = Drafts(source(options), options.draft, options.model)
    return [replace(p, entry=complete(p.entry, p.on, drafts)) for p in planned]
