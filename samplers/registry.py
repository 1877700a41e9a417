"""All samplers and combinations by their command-line names, for the command line, the nodes, the API and the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import unknown
from .blocks.loop import bitdance
from .blocks.loop import check as check_bitdance
from .blocks.settings import BlockSettings
from .mar.cspd import cspd
from .mar.fasthybrid import fasthybrid
from .mar.lazymar import LazyTransformer, lazymar
from .mar.lazymar import check as check_lazymar
from .mar.loop import Sampler
from .mar.loop import check as check_mar
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
from .tokens.llamagen import check as check_llamagen
from .tokens.llamagen import llamagen
from .tokens.loop import TokenSampler
from .tokens.mulosd import check as check_mulosd
from .tokens.mulosd import mulosd
from .tokens.par import check as check_par
from .tokens.par import par
from .tokens.settings import LlamaGenSettings, MuLoSDSettings, PARSettings, TokenSettings, ZipARSettings
from .tokens.zipar import check as check_zipar
from .tokens.zipar import zipar

# Raised when any sampler produces other images from the same model, settings and seed, or counts its work differently,
# so that images of two versions are not mixed in one sweep. tests/bench/test_algorithm.py records digests.
ALGORITHM = 1

MAR = "mar"
LLAMAGEN = "llamagen"
TAR = "tar"
HYBRID = "hybrid"
JANUS = "janus"
BITDANCE = "bitdance"
# What needs_codes of an entry may be: the tokenizer argument of its function.
UP_SAMPLER = "up_sampler"


@dataclass(frozen=True)
class Family:
    """A model family."""

    words: str  # its models in messages
    files: str  # family of its files in the catalogue
    demo: tuple[str, ...]  # catalogue entries that "demo" means, the preferred one first; () if there is no demo
    usual: str  # samplers of a run that names none
    drafted: str = ""  # and what a draft model adds to them
    masked: bool = False  # whether it is sampled by the masked loop, to latents; otherwise token by token, to codes
    blocks: bool = False  # whether it is sampled block by block, to latents of bits

    @property
    def latents(self) -> bool:
        """Whether its samplers draw latents with paired noise, rather than codes."""
        return self.masked or self.blocks

    @property
    def nature(self) -> str:
        """What is behind the name of one of its models in a message about a sampler of another family."""
        return ", which draws whole blocks of tokens one after another" if self.blocks else ""

    @property
    def decoder(self) -> str:
        """Family of the files of its decoders."""
        if self.blocks:
            return "bitdance-ae"
        return "kl" if self.masked else "vq"


FAMILIES = {
    MAR: Family("a MAR", "mar", ("demo",), "mar,fasthybrid", masked=True),
    LLAMAGEN: Family("a LlamaGen or a PAR", "llamagen", ("demo-llamagen", "demo-llamagen-low"), "llamagen,zipar"),
    # Tar's models are its de-tokenizers.
    TAR: Family("a Tar de-tokenizer", "dtok", ("demo-dtok", "demo-dtok-low"), "tar,zipar", ",mulosd"),
    HYBRID: Family("a Harmon or UniPic", "hybrid", ("demo-hybrid",), "mar,fasthybrid", masked=True),
    JANUS: Family("a Janus", "janus", (), "llamagen,zipar"),
    BITDANCE: Family("a BitDance", "bitdance", ("demo-bitdance",), "bitdance", blocks=True),
}


@dataclass(frozen=True)
class Entry:
    """A sampler."""

    name: str  # its command-line name
    title: str
    # run(model, condition, settings, noise) returns the generator; noise is PairedNoise in the families of latents
    # and PairedDraws in the others. All but MuLo-SD also take edit, part of an image to sample again.
    run: Callable[..., Sampler | TokenSampler]
    check: Callable[[Any, Any], None]  # check(model, settings) raises what run would of them, before anything runs
    settings: type[MARBase] | type[TokenSettings] | type[BlockSettings]
    families: tuple[str, ...]  # its model families, keys of FAMILIES; reports are compared with those of the first
    baseline: bool = False  # whether the others of its family are measured against it
    needs_draft: bool = False  # whether run also takes draft, a second model
    needs_codes: str = ""  # the tokenizer argument of run: UP_SAMPLER (MuLo-SD) or ""
    demo: tuple[str, ...] = ()  # catalogue entries that "demo" means for it, if not its family's

    @property
    def family(self) -> str:
        """The first of its families."""
        return self.families[0]

    @property
    def masked(self) -> bool:
        """Whether its models are sampled by the masked loop."""
        return FAMILIES[self.family].masked

    @property
    def latents(self) -> bool:
        """Whether it draws latents with paired noise, rather than codes."""
        return FAMILIES[self.family].latents

    @property
    def decoder(self) -> str:
        """Family of the files that decode what it draws."""
        return FAMILIES[self.family].decoder

    @property
    def models(self) -> str:
        """Description of its models in messages."""
        return ", or ".join(FAMILIES[family].words for family in self.families)

    def demos(self, family: str) -> tuple[str, ...]:
        """What "demo" may mean for it in one of its families."""
        own = self.demo or FAMILIES[family].demo
        return own[:1] if self.needs_codes == UP_SAMPLER else own  # the smaller one is the draft


def with_caches(sampler: Callable[..., Sampler], *models: str) -> Callable[..., Sampler]:
    """A MAR sampler whose models are evaluated with LazyMAR's caches; ``models`` are its arguments that say how they
    are evaluated.
    """

    def run(model: Any, condition: Any, settings: Any, noise: Any, **more: Any) -> Sampler:
        lazy = {name: LazyTransformer(settings) for name in models}
        return sampler(model, condition, settings, noise, **lazy, **more)

    return run


_MASKED = (MAR, HYBRID)
_TOKENS = (LLAMAGEN, TAR)
_LAZY_FASTHYBRID = with_caches(fasthybrid, "transformer")
_LAZY_CSPD = with_caches(cspd, "transformer", "draft_transformer")

SAMPLERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("mar", "MAR", mar, check_mar, MARSettings, _MASKED, baseline=True),
        Entry("fasthybrid", "FastHybrid", fasthybrid, check_mar, FastHybridSettings, _MASKED),
        Entry("lazymar", "LazyMAR", lazymar, check_lazymar, LazyMARSettings, _MASKED),
        Entry("cspd", "CSpD", cspd, check_mar, CSpDSettings, _MASKED, needs_draft=True),
        Entry(
            "fasthybrid+lazymar",
            "FastHybrid + LazyMAR",
            _LAZY_FASTHYBRID,
            check_lazymar,
            FastHybridLazyMARSettings,
            _MASKED,
        ),
        Entry(
            "cspd+lazymar", "CSpD + LazyMAR", _LAZY_CSPD, check_lazymar, CSpDLazyMARSettings, _MASKED, needs_draft=True
        ),
        Entry("llamagen", "LlamaGen", llamagen, check_llamagen, LlamaGenSettings, (LLAMAGEN, JANUS), baseline=True),
        Entry("par", "PAR", par, check_par, PARSettings, (LLAMAGEN,), demo=("demo-par",)),
        Entry("tar", "Tar", llamagen, check_llamagen, LlamaGenSettings, (TAR,), baseline=True),
        Entry("zipar", "ZipAR", zipar, check_zipar, ZipARSettings, (*_TOKENS, JANUS)),
        Entry("bitdance", "BitDance", bitdance, check_bitdance, BlockSettings, (BITDANCE,), baseline=True),
        Entry(
            "mulosd", "MuLo-SD", mulosd, check_mulosd, MuLoSDSettings, _TOKENS, needs_draft=True, needs_codes=UP_SAMPLER
        ),
    )
}


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
