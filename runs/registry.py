"""All samplers and combinations by their command-line names, for the command line, the nodes, the API and the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ..errors import unknown
from ..samplers.blocks.bitdance import bitdance
from ..samplers.blocks.bitdance import check as check_bitdance
from ..samplers.blocks.settings import BlockSettings
from ..samplers.mar.cspd import check as check_cspd
from ..samplers.mar.cspd import cspd
from ..samplers.mar.cspd.settings import CSpDSettings
from ..samplers.mar.fasthybrid import fasthybrid
from ..samplers.mar.fasthybrid.settings import FastHybridSettings
from ..samplers.mar.gtr import gtr
from ..samplers.mar.gtr.settings import GtRSettings
from ..samplers.mar.lazy import check as check_lazymar
from ..samplers.mar.lazy import check_caches, lazymar, with_caches
from ..samplers.mar.lazy.settings import WITH_CACHES, LazyMARSettings
from ..samplers.mar.mar import check as check_mar
from ..samplers.mar.mar import mar
from ..samplers.mar.settings import MARBase, MARSettings
from ..samplers.tokens.llamagen import check as check_llamagen
from ..samplers.tokens.llamagen import llamagen
from ..samplers.tokens.mulosd import check as check_mulosd
from ..samplers.tokens.mulosd import mulosd
from ..samplers.tokens.mulosd.settings import MuLoSDSettings
from ..samplers.tokens.par import PARSettings, par
from ..samplers.tokens.par import check as check_par
from ..samplers.tokens.settings import LlamaGenSettings
from ..samplers.tokens.zipar import ZipARSettings, zipar
from ..samplers.tokens.zipar import check as check_zipar
from .families import Entry, Family, families

# Raised when any sampler produces other images from the same model, settings and seed, or counts its work differently,
# so a sweep does not mix images of two versions. tests/lab/test_algorithm.py records digests.
ALGORITHM = 2

MAR = "mar"
LLAMAGEN = "llamagen"
TAR = "tar"
HYBRID = "hybrid"
JANUS = "janus"
BITDANCE = "bitdance"
NEXTSTEP = "nextstep"

FAMILIES = families()


def family_of_files(kind: str) -> Family | None:
    """The family whose models are in files of a kind; None for other files."""
    return next((family for family in FAMILIES.values() if family.files == kind), None)


def family_of(model: Any) -> Family:
    """The family of a model."""
    return FAMILIES[model.family]


_MASKED = (MAR, HYBRID)
_TOKENS = (LLAMAGEN, TAR)
_CACHES = ("make_transformer",)

_MASKED_SAMPLERS = (
    Entry("mar", "MAR", mar, check_mar, MARSettings, _MASKED, baseline=True, caches=_CACHES),
    Entry("fasthybrid", "FastHybrid", fasthybrid, check_mar, FastHybridSettings, _MASKED, caches=_CACHES),
    Entry("lazymar", "LazyMAR", lazymar, check_lazymar, LazyMARSettings, _MASKED),
    Entry(
        "cspd",
        "CSpD",
        cspd,
        check_cspd,
        CSpDSettings,
        _MASKED,
        needs_draft=True,
        caches=(*_CACHES, "make_draft_transformer"),
    ),
    Entry("gtr", "GtR", gtr, check_mar, GtRSettings, _MASKED, caches=_CACHES),
)


def _beside_lazymar(entry: Entry) -> Entry:
    """The combination of a sampler with LazyMAR's caches; plain MAR's is LazyMAR."""

    def check(model: Any, settings: Any) -> None:
        entry.check(model, settings)
        check_caches(model, settings, settings)

    return replace(
        entry,
        name=f"{entry.name}+lazymar",
        title=f"{entry.title} + LazyMAR",
        run=with_caches(entry.run, *entry.caches),
        check=check,
        settings=WITH_CACHES[cast(type[MARBase], entry.settings)],
        caches=(),
    )


_COMBINATIONS = (_beside_lazymar(entry) for entry in _MASKED_SAMPLERS if entry.caches and not entry.baseline)

SAMPLERS: dict[str, Entry] = {
    e.name: e
    for e in (
        *_MASKED_SAMPLERS,
        *_COMBINATIONS,
        Entry("llamagen", "LlamaGen", llamagen, check_llamagen, LlamaGenSettings, (LLAMAGEN, JANUS), baseline=True),
        Entry("par", "PAR", par, check_par, PARSettings, (LLAMAGEN,), demo=("demo-par",)),
        Entry("tar", "Tar", llamagen, check_llamagen, LlamaGenSettings, (TAR,), baseline=True),
        Entry("zipar", "ZipAR", zipar, check_zipar, ZipARSettings, (*_TOKENS, JANUS)),
        Entry("bitdance", "BitDance", bitdance, check_bitdance, BlockSettings, (BITDANCE,), baseline=True),
        Entry(
            "mulosd",
            "MuLo-SD",
            mulosd,
            check_mulosd,
            MuLoSDSettings,
            _TOKENS,
            needs_draft=True,
            needs_up_sampler=True,
        ),
        *(entry for family in FAMILIES.values() for entry in family.samplers),
    )
}


def first_names() -> dict[str, Entry]:
    """The samplers by name without the second names of a function, as Tar is one of LlamaGen."""
    found: dict[Any, str] = {}
    for name, entry in SAMPLERS.items():
        found.setdefault(entry.run, name)

    return {name: SAMPLERS[name] for name in found.values()}


def plain_sampler(family: Family) -> Entry:
    """The sampler that the other samplers of a family are measured against."""
    return next(entry for entry in SAMPLERS.values() if entry.baseline and family.name in entry.families)


def find(name: str) -> Entry:
    """The sampler of that name; the parts of a combination may stand in any order.

    Raises:
        UserError: there is none.
    """
    parts = sorted(part.strip() for part in name.lower().split("+"))
    for entry in SAMPLERS.values():
        if sorted(entry.name.split("+")) == parts:
            return entry

    typed = name.strip()
    raise unknown("samplers", f"there is no sampler {typed!r}", typed, SAMPLERS)
