"""List the models of the catalogue, with their decoders, encoders and tokenizers: what each is, how large the download
is, its licence, and whether it is on this computer already.

"here" is a file in the folder of weights or in the cache of huggingface-hub. Any name of the list can be a --model,
--decoder, --draft, --tar, --ta-tok or --encoder of its kind, which downloads it; the command download does no more than
that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..model_loaders import kinds
from ..model_loaders.catalogue import hub
from ..model_loaders.catalogue.transfer import readable_size
from ..reports.table import markdown
from ..runs.loading import models_folder
from ..runs.registry import family_of_files
from .options import models_option
from .subject import all_entries, download_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    models_option(parser)


# What a catalogue writes if the authors state none.
_LICENCES = {"NOASSERTION": "none stated"}


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    folder = models_folder(options.models)

    rows = [["name", "what", "download", "licence", "where"]]
    for entry in all_entries():
        rows.append(
            [entry.id, _what(entry), _size(entry), _LICENCES.get(entry.licence, entry.licence), _where(entry, folder)]
        )

    print(markdown(rows))
    print(f"\nfolder of downloads: {folder or 'none; name one with --models'}")
    return 0


def _what(entry: hub.Entry) -> str:
    """What an entry is, and what it does with an image beside a prompt."""
    what = kinds.KINDS[entry.family].noun.removeprefix("a ")
    family = family_of_files(entry.family)
    if family is not None:
        what += family.further_uses(entry.id)

    return f"{what} ({entry.note})" if entry.note else what


def _size(entry: hub.Entry) -> str:
    """How large a download is; where that is not known, at most. "" of what comes with the pack."""
    if entry.built_in:
        return ""
    if entry.size:
        return readable_size(entry.size)

    estimate = download_bytes(entry)
    return f"up to {readable_size(estimate)}" if estimate else ""


def _where(entry: hub.Entry, folder: Path | None) -> str:
    """Where the files of an entry are."""
    if entry.built_in:
        return "missing" if entry.missing else "built in"

    return "here" if entry.find([] if folder is None else [folder]) else ""
