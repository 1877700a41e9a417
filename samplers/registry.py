"""Every sampler by its command-line name, in one place for the command line, the nodes and the contract test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError
from .mar.cspd import cspd
from .mar.fasthybrid import fasthybrid
from .mar.lazymar import cspd_lazymar, fasthybrid_lazymar, lazymar
from .mar.loop import Sampler
from .mar.mar import mar
from .mar.settings import (
    CSpDLazyMARSettings,
    CSpDSettings,
    FastHybridLazyMARSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARSettings,
    PlainMARSettings,
)
from .tokens.lantern import lantern
from .tokens.llamagen import llamagen
from .tokens.loop import TokenSampler
from .tokens.mulosd import mulosd
from .tokens.par import par
from .tokens.settings import (
    LanternSettings,
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TokenSettings,
    ZipARSettings,
)
from .tokens.zipar import zipar

MAR, LLAMAGEN, TAR = "mar", "llamagen", "tar"
# Family to what a person calls a model of it. Those of Tar are its de-tokenizers.
FAMILIES = {MAR: "a MAR", LLAMAGEN: "a LlamaGen or a PAR", TAR: "a Tar de-tokenizer"}


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
        also: a further family that it samples from, and what "demo" may mean there.
        needs_codes: whether ``run`` also takes what the codes mean: ``up_sampler`` (MuLo-SD) or ``vq`` (LANTERN).
    """

    name: str
    title: str
    run: Callable[..., Sampler | TokenSampler]
    settings: type[MARSettings] | type[TokenSettings]
    baseline: bool = False
    needs_draft: bool = False
    family: str = MAR
    demo: tuple[str, ...] = ("demo",)
    also: tuple[str, tuple[str, ...]] | None = None
    needs_codes: str = ""

    @property
    def families(self) -> tuple[str, ...]:
        """All families that it samples from."""
        return (self.family, self.also[0]) if self.also else (self.family,)

    @property
    def models(self) -> str:
        """What a person calls a model of those."""
        return ", or ".join(FAMILIES[family] for family in self.families)

    def demos(self, family: str) -> tuple[str, ...]:
        """What "demo" may mean for it in one of its families."""
        return self.also[1] if self.also and family == self.also[0] else self.demo


_PLAIN_DEMO, _TAR_DEMO = ("demo-llamagen", "demo-llamagen-low"), ("demo-dtok", "demo-dtok-low")
# Drafted from the smaller one of the two.
_LARGE_DEMO, _LARGE_TAR = _PLAIN_DEMO[:1], _TAR_DEMO[:1]


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
        Entry("tar", "Tar", llamagen, LlamaGenSettings, baseline=True, family=TAR, demo=_TAR_DEMO),
        Entry("zipar", "ZipAR", zipar, ZipARSettings, family=LLAMAGEN, demo=_PLAIN_DEMO, also=(TAR, _TAR_DEMO)),
        Entry(
            "mulosd",
            "MuLo-SD",
            mulosd,
            MuLoSDSettings,
            needs_draft=True,
            needs_codes="up_sampler",
            family=LLAMAGEN,
            demo=_LARGE_DEMO,
            also=(TAR, _LARGE_TAR),
        ),
        Entry(
            "lantern",
            "LANTERN-style comparison",
            lantern,
            LanternSettings,
            needs_draft=True,
            needs_codes="vq",
            family=LLAMAGEN,
            demo=_PLAIN_DEMO,
            also=(TAR, _TAR_DEMO),
        ),
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
    if {*parts} <= {*SAMPLERS}:
        raise UserError(f"samplers: this version does not have {key} yet; it has {have}.")
    raise UserError(f"samplers: there is no sampler {name.strip()!r}; this version has {have}.")


def families_of(sampler: str) -> tuple[str, ...]:
    """All families of a sampler's name; none if it is not registered."""
    return SAMPLERS[sampler].families if sampler in SAMPLERS else ()


def family_of(sampler: str) -> str:
    """Family of a sampler's name as reports have it, the first one if there are two; of a combination that is not registered its
    first part's. "" if unknown."""
    for name in (sampler, *sampler.split("+")):
        if name in SAMPLERS:
            return SAMPLERS[name].family
    return ""
