"""All samplers and combinations by their command-line names, for the command line, the nodes, the API and the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError
from ..model_loaders.networks.mar import MARModel
from .conditioning import MaskedCondition
from .mar.cspd import cspd
from .mar.editing import Edit
from .mar.fasthybrid import fasthybrid
from .mar.lazymar import LazyTransformer, lazymar
from .mar.loop import Sampler
from .mar.mar import mar
from .mar.settings import (
    CSpDLazyMARSettings,
    CSpDSettings,
    FastHybridLazyMARSettings,
    FastHybridSettings,
    LazyMARSettings,
    MARBase,
    MARSettings,
)
from .noise import Noise
from .tokens.lantern import lantern
from .tokens.llamagen import jacobi, llamagen
from .tokens.loop import TokenSampler
from .tokens.mulosd import mulosd
from .tokens.par import par
from .tokens.settings import (
    JacobiSettings,
    LanternSettings,
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TokenSettings,
    ZipARSettings,
)
from .tokens.zipar import zipar


def fasthybrid_lazymar(
    model: MARModel,
    condition: MaskedCondition,
    settings: FastHybridLazyMARSettings,
    noise: Noise,
    seed: int | None = None,
    edit: Edit | None = None,
) -> Sampler:
    """FastHybrid with LazyMAR's caches. With ``refresh_period`` 1 it is FastHybrid bit for bit.

    Args:
        model, condition, noise, seed, edit: as :func:`samplers.mar.fasthybrid.fasthybrid`.
        settings: see :class:`FastHybridLazyMARSettings`.

    Raises:
        UserError: as :func:`samplers.mar.fasthybrid.fasthybrid`, or a block that the decoder does not have.
    """
    return fasthybrid(model, condition, settings, noise, seed, LazyTransformer(settings), edit)


def cspd_lazymar(
    model: MARModel,
    condition: MaskedCondition,
    settings: CSpDLazyMARSettings,
    noise: Noise,
    seed: int | None = None,
    edit: Edit | None = None,
    *,
    draft: MARModel,
) -> Sampler:
    """CSpD with LazyMAR's caches in both models. With ``refresh_period`` 1 it is CSpD.

    Args:
        model, condition, noise, seed, edit, draft: as :func:`samplers.mar.cspd.cspd`.
        settings: see :class:`CSpDLazyMARSettings`.

    Raises:
        UserError: as :func:`samplers.mar.cspd.cspd`, or a block that a decoder does not have.
    """
    target, small = LazyTransformer(settings), LazyTransformer(settings)
    return cspd(model, condition, settings, noise, seed, target, edit, draft=draft, draft_transformer=small)


# Number of the algorithms. It is raised when a change makes any sampler draw other pictures from the same model, settings and seed, or
# count its work differently, so that images of two versions are not mixed in one sweep. tests/scale/test_algorithm.py records digests.
ALGORITHM = 1

MAR, LLAMAGEN, TAR, HYBRID = "mar", "llamagen", "tar", "hybrid"
# Family to its description in messages. Tar's models are its de-tokenizers.
FAMILIES = {MAR: "a MAR", LLAMAGEN: "a LlamaGen or a PAR", TAR: "a Tar de-tokenizer", HYBRID: "a Harmon or UniPic"}
# Families of the masked samplers.
MASKED = (MAR, HYBRID)


@dataclass(frozen=True)
class Entry:
    """A sampler.

    Attributes:
        name: its command-line name.
        title: display name.
        run: ``run(model, condition, settings, noise, seed)`` returns the generator. In the MAR family ``edit=``
            samples part of a picture again, and noise is a ``Noise``; in the token families it is ``Draws``.
        settings: its settings class.
        baseline: whether the others of its family are measured against it.
        needs_draft: whether ``run`` also takes ``draft``, a second model.
        family: the model family, one of :data:`FAMILIES`.
        demo: catalogue entries that "demo" may mean for it, the preferred one first.
        also: a further family, and what "demo" may mean there.
        needs_codes: the tokenizer argument of ``run``: ``up_sampler`` (MuLo-SD), ``vq`` (LANTERN) or "".
    """

    name: str
    title: str
    run: Callable[..., Sampler | TokenSampler]
    settings: type[MARBase] | type[TokenSettings]
    baseline: bool = False
    needs_draft: bool = False
    family: str = MAR
    demo: tuple[str, ...] = ("demo",)
    also: tuple[str, tuple[str, ...]] | None = None
    needs_codes: str = ""

    @property
    def families(self) -> tuple[str, ...]:
        """All families of its models."""
        return (self.family, self.also[0]) if self.also else (self.family,)

    @property
    def models(self) -> str:
        """Description of its models in messages."""
        return ", or ".join(FAMILIES[family] for family in self.families)

    def demos(self, family: str) -> tuple[str, ...]:
        """What "demo" may mean for it in one of its families."""
        return self.also[1] if self.also and family == self.also[0] else self.demo


_PROMPTED = (HYBRID, ("demo-hybrid",))
_PLAIN_DEMO, _TAR_DEMO = ("demo-llamagen", "demo-llamagen-low"), ("demo-dtok", "demo-dtok-low")
# With the smaller of the two as draft model.
_LARGE_DEMO, _LARGE_TAR = _PLAIN_DEMO[:1], _TAR_DEMO[:1]


SAMPLERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("mar", "MAR", mar, MARSettings, baseline=True, also=_PROMPTED),
        Entry("fasthybrid", "FastHybrid", fasthybrid, FastHybridSettings, also=_PROMPTED),
        Entry("lazymar", "LazyMAR", lazymar, LazyMARSettings, also=_PROMPTED),
        Entry("cspd", "CSpD", cspd, CSpDSettings, needs_draft=True, also=_PROMPTED),
        # Combinations: the head plug, then the transformer plug.
        Entry(
            "fasthybrid+lazymar", "FastHybrid + LazyMAR", fasthybrid_lazymar, FastHybridLazyMARSettings, also=_PROMPTED
        ),
        Entry("cspd+lazymar", "CSpD + LazyMAR", cspd_lazymar, CSpDLazyMARSettings, needs_draft=True, also=_PROMPTED),
        Entry("llamagen", "LlamaGen", llamagen, LlamaGenSettings, baseline=True, family=LLAMAGEN, demo=_PLAIN_DEMO),
        Entry("par", "PAR", par, PARSettings, family=LLAMAGEN, demo=("demo-par",)),
        Entry("tar", "Tar", llamagen, LlamaGenSettings, baseline=True, family=TAR, demo=_TAR_DEMO),
        Entry("jacobi", "Jacobi", jacobi, JacobiSettings, family=LLAMAGEN, demo=_PLAIN_DEMO, also=(TAR, _TAR_DEMO)),
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
