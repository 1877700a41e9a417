"""The entry of a sampler in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..samplers.engine import Sampler
from ..samplers.settings import Settings
from .families import Family, families


@dataclass(frozen=True)
class Entry:
    """A sampler."""

    name: str  # its command-line name
    title: str
    # run(model, condition, settings, noise) returns the generator; noise is PairedNoise in the families of latents, and
    # PairedDraws in all other families. All but MuLo-SD also take edit, part of an image to sample again.
    run: Callable[..., Sampler]
    check: Callable[[Any, Any], None]  # check(model, settings) raises what run would of them, before anything runs
    settings: type[Settings]
    families: tuple[str, ...]  # its model families, by name; reports are compared with the reports of the first
    baseline: bool = False  # whether the other samplers of its family are measured against it
    needs_draft: bool = False  # whether run also takes draft, a second model
    needs_up_sampler: bool = False  # whether run also takes up_sampler, which enlarges the codes of a draft (MuLo-SD)
    # The arguments of run that say how a transformer is evaluated; LazyMAR's caches give their own.
    caches: tuple[str, ...] = ()
    demo: tuple[str, ...] = ()  # catalogue entries that "demo" means for it, if not its family's

    @property
    def family(self) -> Family:
        """The first of its families."""
        return families()[self.families[0]]

    @property
    def models(self) -> str:
        """Description of its models in messages."""
        return ", or ".join(families()[family].words for family in self.families)

    @property
    def node(self) -> str:
        """Id of its node, in which saved graphs find it. Combinations have none, and Tar's is LlamaGen's."""
        return f"FastAR{self.title.replace('-', '')}Sampler"

    def demos(self, family: str) -> tuple[str, ...]:
        """What "demo" may mean for it in one of its families."""
        own = self.demo or families()[family].demo
        return own[:1] if self.needs_up_sampler else own  # the smaller one is the draft
