"""Every sampler by its command-line name, in one place for the command line, the nodes and the contract test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError
from .cspd import cspd
from .fasthybrid import fasthybrid
from .lazymar import cspd_lazymar, fasthybrid_lazymar, lazymar
from .llamagen import llamagen
from .mar import Sampler, mar
from .par import par
from .settings import (
    CSpDLazyMARSettings,
    CSpDSettings,
    FastHybridLazyMARSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
    PlainMARSettings,
)
from .token_settings import LlamaGenSettings, PARSettings, TokenSettings, ZipARSettings
from .tokens import TokenSampler
from .zipar import zipar

# Names that are spoken for; asking for one is answered by a sentence, not by "unknown".
LATER = ("tar", "mulosd")

MAR, LLAMAGEN = "mar", "llamagen"
# Family to what a person calls a model of it.
FAMILIES = {MAR: "a MAR", LLAMAGEN: "a LlamaGen or a PAR"}


@dataclass(frozen=True)
class Entry:
    """A sampler.

    Attributes:
        name: its command-line name.
        title: how a person calls it.
        run: ``run(model, condition, settings, noise, seed)`` gives the generator. Of the MAR family ``edit=`` draws part
            of a picture, and noise is a ``Noise``; of the LlamaGen family it is ``Draws``.
        settings: its settings class.
        baseline: whether it is exact, so that others of its family are measured against it.
        needs_draft: whether ``run`` also takes ``draft``, a second model.
        family: which models it samples from, one of :data:`FAMILIES`.
        demo: catalogue entries that "demo" may mean for it, the preferred one first.
    """

    name: str
    title: str
    run: Callable[..., Sampler | TokenSampler]
    settings: type[MARSettings] | type[TokenSettings]
    baseline: bool = False
    needs_draft: bool = False
    family: str = MAR
    demo: tuple[str, ...] = ("demo",)


_PLAIN_DEMO = ("demo-llamagen", "demo-llamagen-low")


SAMPLERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("mar", "MAR", mar, PlainMARSettings, baseline=True),
        Entry("fasthybrid", "FastHybrid", fasthybrid, FastHybridSettings),
        Entry("lazymar", "LazyMAR", lazymar, LazyMARSettings),
        Entry("cspd", "CSpD", cspd, CSpDSettings, needs_draft=True),
        # Combinations: what makes tokens, then how the transformer is run.
        Entry("fasthybrid+lazymar", "FastHybrid + LazyMAR", fasthybrid_lazymar, FastHybridLazyMARSettings),
        Entry("cspd+lazymar", "CSpD + LazyMAR", cspd_lazymar, CSpDLazyMARSettings, needs_draft=True),
        Entry("llamagen", "LlamaGen", llamagen, LlamaGenSettings, baseline=True, family=LLAMAGEN, demo=_PLAIN_DEMO),
        Entry("par", "PAR", par, PARSettings, family=LLAMAGEN, demo=("demo-par",)),
        Entry("zipar", "ZipAR", zipar, ZipARSettings, family=LLAMAGEN, demo=_PLAIN_DEMO),
    )
}


def find(name: str) -> Entry:
    """The sampler of that name; the parts of a combination may stand in any order.

    Raises:
        UserError: this version has no such sampler or combination; the message lists what it has.
    """
    parts = [part.strip() for part in name.lower().split("+")]
    key = "+".join(parts)
    for entry in SAMPLERS.values():
        if sorted(entry.name.split("+")) == sorted(parts):
            return entry
    have = ", ".join(SAMPLERS)
    if {*parts} <= {*SAMPLERS, *LATER}:
        raise UserError(f"samplers: this version does not have {key} yet; it has {have}.")
    raise UserError(f"samplers: there is no sampler {name.strip()!r}; this version has {have}.")


def family_of(sampler: str) -> str:
    """Family of a sampler's name as reports have it; of a combination that is not registered its first part's. "" if unknown."""
    for name in (sampler, *sampler.split("+")):
        if name in SAMPLERS:
            return SAMPLERS[name].family
    return ""
