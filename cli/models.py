"""The model of each sampler of a run: the one that --model names, or the demo's of the sampler's family."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import UserError
from ..model_loaders.catalogue import hub
from ..model_loaders.files import checkpoint as ck
from ..runs.loading import DEMO, Source, identified, listed_family
from ..runs.registry import FAMILIES, Entry
from ..samplers.conditioning import CodeCondition


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

    found = listed_family(model) or identified(model, files)[0] or entries[0].family.name

    for entry in entries:
        if found not in entry.families:
            raise UserError(
                f"samplers: {entry.name} works with {entry.models}, but {Path(model).name} is {FAMILIES[found].words}; "
                "leave this sampler out, or choose a different model."
            )

    return {entry.name: (found, model) for entry in entries}


def _families(entries: Sequence[Entry], prompted: bool, labelled: bool) -> dict[str, str]:
    """The family of the demo model of each sampler, by the sampler's name."""
    settled = {entry.family.name for entry in entries if len(entry.families) == 1}
    return {entry.name: _family(entry, settled, prompted, labelled) for entry in entries}


def _family(entry: Entry, settled: Collection[str], prompted: bool, labelled: bool) -> str:
    """The family of the demo model of a sampler.

    With a prompt it is one that draws from prompts; beside a label only if the codes of the prompt are what it reads.
    Else a sampler of several families follows the samplers of one, whose families are ``settled``.
    """
    for name in entry.families if prompted else ():
        family = FAMILIES[name]
        is_here = any(demo.built_in and not demo.missing for demo in hub.entries(family.files))
        if is_here and family.reads_prompts and (not labelled or CodeCondition.kind in family.reads):
            return name

    return next((name for name in entry.families if name in settled), entry.family.name)


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
            f"samplers: the demo model of {' and '.join(first)} has {side} x {side} tokens, but the demo model of "
            f"{' and '.join(second)} has {other_side} x {other_side} tokens. In one run, FastAR can compare "
            f"{entry.name} only with samplers whose demo models have the same size. Leave out either "
            f"{' and '.join(first)}, or {' and '.join(second)}. Then start a second run for the samplers that you left "
            "out."
        )

    (wanted,) = sizes
    return next((choice for choice in own if size(choice) == wanted), own[0])
