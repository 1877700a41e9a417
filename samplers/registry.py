"""Every sampler by its command-line name, in one place for the command line, the nodes and the contract test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError
from .fasthybrid import fasthybrid
from .mar import Sampler, mar
from .settings import FastHybridSettings, MARSettings

# Names that are spoken for; asking for one is answered by a sentence, not by "unknown".
LATER = ("lazymar", "cspd", "llamagen", "par", "zipar", "tar", "mulosd")


@dataclass(frozen=True)
class Entry:
    """A sampler.

    Attributes:
        name: its command-line name.
        title: how a person calls it.
        run: ``run(model, condition, settings, noise, seed)`` gives the generator.
        settings: its settings class.
        baseline: whether it is exact, so that others are measured against it.
    """

    name: str
    title: str
    run: Callable[..., Sampler]
    settings: type[MARSettings]
    baseline: bool = False


SAMPLERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("mar", "MAR", mar, MARSettings, baseline=True),
        Entry("fasthybrid", "FastHybrid", fasthybrid, FastHybridSettings),
    )
}


def find(name: str) -> Entry:
    """The sampler of that name.

    Raises:
        UserError: this version has no such sampler or combination; the message lists what it has.
    """
    key = name.strip().lower()
    if key in SAMPLERS:
        return SAMPLERS[key]
    have = ", ".join(SAMPLERS)
    known = {*SAMPLERS, *LATER}
    if key in known or "+" in key and all(part.strip() in known for part in key.split("+")):
        raise UserError(f"samplers: this version does not have {key} yet; it has {have}.")
    raise UserError(f"samplers: there is no sampler {name.strip()!r}; this version has {have}.")
