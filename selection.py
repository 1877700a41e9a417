"""Which model each sampler of a run uses, and what the sampler needs beside it. Shared by the commands and by sweeps."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from .assembly import DEMO, PAR, Drafts, Ready, Source, identify, listed_family
from .errors import UserError
from .model_loaders import hub
from .model_loaders.checkpoint import read_metadata
from .samplers.batches import in_parts
from .samplers.conditioning import AnyCondition
from .samplers.noise import PairedNoise
from .samplers.registry import FAMILIES, HYBRID, LLAMAGEN, MAR, TAR, UP_SAMPLER, Entry
from .samplers.settings import make
from .samplers.tokens.draws import PairedDraws
from .samplers.tokens.upsampling import UpSampling


def choose_models(
    model: str, entries: Sequence[Entry], files: Source, prompted: bool = False, labelled: bool = False
) -> dict[str, tuple[str, str]]:
    """The model of each sampler: the one named, or of the demo the one of the sampler's family.

    Args:
        model: "demo", a catalogue entry or a file.
        prompted, labelled: whether the run has prompts, or class labels.

    Returns:
        (family, choice) by sampler name.

    Raises:
        UserError: a sampler is for another family.
    """
    if model != DEMO:
        return dict.fromkeys((e.name for e in entries), (_family_of_model(model, entries, files), model))
    families = _families(entries, prompted, labelled)
    return {e.name: (families[e.name], _demo_model(e, entries, families, files)) for e in entries}


def identified(choice: str, files: Source) -> str:
    """What the file of a model holds, see :func:`.assembly.identify`."""
    return identify(files.find(choice, FAMILIES[listed_family(choice) or MAR].files))


def _family_of_model(choice: str, entries: Sequence[Entry], files: Source) -> str:
    """Family of a named model.

    Raises:
        UserError: a sampler is for another family.
    """
    found = listed_family(choice) or identified(choice, files) or entries[0].family
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
    settled = {e.family for e in entries if len(e.families) == 1}
    tar = prompted or TAR in settled and LLAMAGEN not in settled
    out = {e.name: TAR if tar and TAR in e.families else e.family for e in entries}
    if prompted and not labelled and any(e.built_in and not e.missing for e in hub.entries(FAMILIES[HYBRID].files)):
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
    sizes = {
        choice: read_metadata(files.find(choice, FAMILIES[family].files)).get("grid") for choice in (fixed[0], *own)
    }
    return next((choice for choice in own if sizes[choice] == sizes[fixed[0]]), own[0])


def complete(entry: Entry, ready: Ready, drafts: Drafts | None) -> Entry:
    """The sampler with its draft model and up-sampler bound to ``run``.

    Args:
        drafts: needed if the sampler has a draft model.

    Raises:
        UserError: a draft model is needed and none is named, or there is no decoder.
    """
    more: dict[str, Any] = {}
    if entry.needs_codes and ready.decoder is None:
        raise UserError(
            f"random: {entry.name} needs a tokenizer, and random weights come without; name a --model instead."
        )
    if entry.needs_draft:
        assert drafts is not None, "a sampler with a draft model"
        more["draft"] = drafts.load(entry.name, ready)
    if entry.needs_codes == UP_SAMPLER:
        more["up_sampler"] = UpSampling(ready.vq)
    return replace(entry, run=partial(entry.run, **more)) if more else entry


def begin(
    entry: Entry, ready: Ready, settings: Any, condition: AnyCondition, seed: int, first: int, part: range
) -> Generator[Any, float | None, Any]:
    """Begin a sampler on some of the images of a condition; with ``part`` left open, what ``samplers.batches.in_parts`` takes.

    Args:
        entry: completed by :func:`complete`.
        first: index of the condition's first image; image i of the condition uses (seed, first + i).
        part: the images, by their place in the condition.
    """
    images = range(first + part.start, first + part.stop)
    noise = PairedNoise(seed, images) if entry.masked else PairedDraws(seed, images)
    return entry.run(ready.model, condition.of(part), settings, noise, seed)


def warm_up(entry: Entry, ready: Ready, settings: Any, condition: AnyCondition) -> None:
    """Run one AR step with two diffusion steps, or three passes of a token model, untimed: the first calls in a process initialise
    libraries. Arguments as :func:`begin`. Raises as :func:`samplers.batches.in_parts`."""
    settings = short(entry, settings)
    run_beginning(in_parts(partial(begin, entry, ready, settings, condition, 0, 0), len(condition)))


def short(entry: Entry, settings: Any) -> Any:
    """Settings of a masked sampler for one AR step with two diffusion steps; of a token sampler as they are."""
    return make(entry.settings, {"ar_steps": 1, "diffusion_steps": 2}) if entry.masked else settings


def run_beginning(steps: Generator[Any, Any, Any]) -> None:
    """Run three steps of a sampler and close it."""
    for _ in islice(steps, 3):
        pass
    steps.close()
