"""A dry run where the models are not here: cells and sizes from the shapes of the catalogue, without any download."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ...errors import UserError
from ...model_loaders.catalogue import hub
from ...model_loaders.catalogue.transfer import readable_size
from ...reports.table import markdown
from ...runs.loading import Ready, Source
from ...runs.outlines import STRIDE, outlined
from ...runs.registry import FAMILIES
from .spec import Spec, expand, models_of


class NotHere(UserError):
    """A file that would be downloaded."""


def here_only(files: Source, folder: Path | None) -> Source:
    """A source that raises :class:`NotHere` in place of a download; ``folder``: the folder of weight files."""
    folders = [] if folder is None else [folder]

    def find(choice: str, family: str) -> Path:
        if any(entry.id == choice for entry in hub.entries(family)):
            missing = hub.absent(choice, family, folders)
            if missing is not None:
                size = f", {readable_size(missing.size)}" if missing.size else ""
                raise NotHere(f"{missing.id} is not on this machine (a download{size}).")

        return files.find(choice, family)

    return replace(files, find=find)


def by_shapes(spec: Spec, files: Source) -> str:
    """The cells of a spec as a Markdown table: shards, and megabytes of the images. All settings are checked.

    Raises:
        UserError: settings that the model cannot be sampled with.
    """
    combinations = expand(spec)

    rows = [["cell", "model", "images", "shards", "MB"]]
    for combination, (family, model) in zip(combinations, models_of(spec, combinations, files), strict=True):
        sampler = combination.choice.entry
        ready = _outlined(family, model)
        settings = combination.choice.settings(ready.facts)
        sampler.check(ready.model, settings)

        height, width = ready.kind.latents(ready.model, settings)
        pixels = height * width * STRIDE**2
        shards = math.ceil(spec.images / spec.batch)
        megabytes = f"{spec.images * pixels * 3 / 1e6:,.0f}"
        rows.append([combination.title, model, str(spec.images), str(shards), megabytes])

    return markdown(rows)


@lru_cache(maxsize=4)
def _outlined(family: str, model: str) -> Ready:
    """A catalogue entry by its shapes."""
    for entry in hub.entries(FAMILIES[family].files):
        if entry.id == model and not entry.built_in:
            return outlined(entry)

    raise UserError(
        f"model: {model} is not in the catalogue, so FastAR knows nothing about this model without its file; give a "
        "file, or the name of a catalogue entry."
    )
