"""The model of each sampler of a run: the one that --model names, or the demo's of the sampler's family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UserError
from ..model_loaders.catalogue import hub
from ..model_loaders.files import checkpoint as ck
from ..runs.loading import DEMO, PAR, Source, identified, listed_family
from ..runs.registry import FAMILIES, HYBRID, LLAMAGEN, TAR, Entry


def choose_models(
    model: str, entries: Sequence[Entry], files: Source, prompted: bool = False, labelled: bool = False
) -> dict[str, tuple[str, str]]:
    """The family and the choice of the model of each sampler, by the sampler's name.

    Args:
        model: a catalogue entry or file, or "demo" for the demo's model of each sampler's family.
        entries: the samplers.
        files: how files are found.
        prompted: whether the run has prompts.
        labelled: whether the run has class labels.

    Raises:
        UserError: a sampler is for another family than the model's.
    """
    if model == DEMO:
        demos = _families(entries, prompted, labelled)
        return {entry.name: (demos[entry.name], _demo_model(entry, entries, demos, files)) for entry in entries}

    found = listed_family(model) or identified(model, files) or entries[0].family.name
    if found == PAR:
        found = LLAMAGEN

    for entry in entries:
        if found not in entry.families:
            raise UserError(
                f"samplers: {entry.name} samples {entry.models}, but {Path(model).name} is {FAMILIES[found].words}"
                f"{FAMILIES[found].nature}; leave it out, or name another model."
            )

    return {entry.name: (found, model) for entry in entries}


def _families(entries: Sequence[Entry], prompted: bool, labelled: bool) -> dict[str, str]:
    """The family of the demo model of each sampler, by the sampler's name.

    A token sampler of two families follows the samplers of one; with a prompt it uses Tar. With a prompt and without a
    label, a MAR sampler uses the demo that reads prompts.
    """
    settled = {entry.family.name for entry in entries if len(entry.families) == 1}
    tar = prompted or (TAR in settled and LLAMAGEN not in settled)
    hybrids = hub.entries(FAMILIES[HYBRID].files)
    hybrid = prompted and not labelled and any(demo.built_in and not demo.missing for demo in hybrids)

    families = {}
    for entry in entries:
        if hybrid and HYBRID in entry.families:
            families[entry.name] = HYBRID
        elif tar and TAR in entry.families:
            families[entry.name] = TAR
        else:
            families[entry.name] = entry.family.name
    return families


def _demo_model(entry: Entry, entries: Sequence[Entry], families: Mapping[str, str], files: Source) -> str:
    """The built-in model that a sampler uses for "demo".

    A sampler with a single model fixes the image size for its family, because seconds are comparable only at one size.

    Raises:
        UserError: samplers with a single model fix two sizes, and this one has a model of each.
    """
    family = families[entry.name]
    own = entry.demos(family)

    fixed: dict[str, str] = {}  # sampler to its only model
    for other in entries:
        demos = other.demos(family)
        if families[other.name] == family and len(demos) == 1:
            fixed[other.name] = demos[0]

    if len(own) == 1 or not fixed:
        return own[0]

    def size(choice: str) -> str:
        return ck.read_metadata(files.find(choice, FAMILIES[family].files)).get("grid", "")

    # The samplers of each size.
    sizes: dict[str, list[str]] = {}
    for name, choice in fixed.items():
        sizes.setdefault(size(choice), []).append(name)

    if len(sizes) > 1:
        (side, first), (other_side, second), *_ = sizes.items()
        raise UserError(
            f"samplers: the demo model of {' and '.join(first)} has {side} x {side} tokens, and the demo model of "
            f"{' and '.join(second)} has {other_side} x {other_side}, so {entry.name} can be compared with only one of "
            f"them; leave out {' and '.join(first)} or {' and '.join(second)}, and compare it in a second run."
        )

    (wanted,) = sizes
    return next((choice for choice in own if size(choice) == wanted), own[0])
