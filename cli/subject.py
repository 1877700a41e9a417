"""What is checked: an entry of the catalogue or a file, what it needs, and whether disk and memory suffice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import UserError
from ..model_loaders import kinds
from ..model_loaders.catalogue import hub, official
from ..model_loaders.catalogue.transfer import arrived, readable_size
from ..model_loaders.files import checkpoint as ck
from ..model_loaders.files.shards import weight_files
from ..reports.files import typed_path
from ..runs.loading import (
    AUTO,
    DEMO_TAR,
    LANGUAGE,
    OFFICIAL_TAR,
    READER,
    USUAL,
    Source,
    dtype_name,
    find_file,
    models_folder,
)
from ..runs.registry import FAMILIES, family_of_files
from ..samplers.conditioning import CodeCondition, TextCondition
from .machine import free_memory, free_space

# Bytes of a weight.
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class Subject:
    """A model to check."""

    choice: str  # a catalogue entry or a file
    files: str  # family of its files, a key of kinds.KINDS
    entry: hub.Entry | None = None  # None of a file

    @property
    def family(self) -> str:
        """Its family of the registry, whose samplers draw from it; "" of a decoder, encoder or language model."""
        family = family_of_files(self.files)
        return "" if family is None else family.name

    @property
    def name(self) -> str:
        """Its name without folders."""
        return Path(self.choice).name if self.entry is None else self.choice

    @property
    def condition(self) -> str:
        """The kind of condition that a published model reads; "" where the catalogue does not tell."""
        if self.entry is None or not self.family or not self.network:
            return ""
        return str(FAMILIES[self.family].outlined(self.entry).condition)

    @property
    def network(self) -> str:
        """Its published network, a key of official.NETWORKS; "" if the catalogue names none."""
        return "" if self.entry is None else self.entry.network


def all_entries() -> list[hub.Entry]:
    """All entries of the catalogue, built-in ones first."""
    found: list[hub.Entry] = []
    for kind in kinds.KINDS:
        found += hub.entries(kind)

    return sorted(found, key=lambda entry: not entry.built_in)


def subject(choice: str, models: str | None) -> Subject:
    """The entry or file that a user names.

    Raises:
        UserError: there is neither, or the file is none of a known model.
    """
    entries = {entry.id: entry for entry in all_entries()}
    if choice in entries:
        return Subject(choice, entries[choice].family, entries[choice])

    folder = models_folder(models)
    places = [typed_path(choice, "model")]
    if folder is not None:
        places.append(folder / choice)

    path = next((place for place in places if place.is_file() or place.is_dir()), None)
    if path is None:
        path = find_file(choice, FAMILIES[USUAL].files, folder)  # raises the sentence of all commands

    read = ck.read(path, "model", shards=weight_files(path, "model", "a model"))
    _, kind = kinds.identified(read)
    if kind not in kinds.KINDS:
        raise UserError(f"model: {path.name} is not a model that FastAR knows; choose a different file.")
    if kinds.KINDS[kind].remedy:
        about = kinds.KINDS[kind]
        raise UserError(f"model: {path.name} holds {about.noun}; {about.remedy}.")
    return Subject(str(path), kind)


# ------------------------------------------------------------------------------------------------ what it needs


def needed(what: Subject, decoder: str, tar: str, ta_tok: str, encoder: str, prompts: bool) -> list[tuple[str, str]]:
    """The files of a check: (choice, family of files), the model first.

    Args:
        what: the model.
        decoder, tar, ta_tok, encoder: choices of the user, "auto" for the usual ones.
        prompts: whether prompts are read, for which Tar and LlamaGen's text-to-image models need further networks.
    """
    found = [(what.choice, what.files)]
    entry = what.entry
    if not what.family or entry is None:
        return found

    family = FAMILIES[what.family]
    if family.tokenizer and not entry.built_in and "tokenizer.json" not in entry.parts:
        found.append((family.tokenizer, "tokenizer"))

    is_text = what.condition == TextCondition.kind
    # An entry without a decoder has it in its own files.
    if decoder != AUTO or entry.decoder is not None:
        chosen = hub.decoder_for(what.choice, what.files, text=is_text) if decoder == AUTO else decoder
        found.append((chosen, family.decoder))

    if prompts and is_text:
        found.append((encoder, "t5"))
    if prompts and CodeCondition.kind in family.reads:
        usual = DEMO_TAR if entry.built_in else OFFICIAL_TAR
        found.append((usual if tar == AUTO else tar, LANGUAGE))
        if not entry.built_in or ta_tok != AUTO:
            found.append((hub.ta_tok_for(None) if ta_tok == AUTO else ta_tok, READER))

    return found


def expect_disk(files: list[tuple[str, str]], folder: Path | None) -> None:
    """Raise a UserError if the disk has no room for what has to be downloaded."""
    if folder is None:
        return

    lacking = 0
    names = []
    for choice, kind in files:
        entry = _absent(choice, kind, folder)
        if entry is not None:
            here = sum(arrived(folder / part.path) for part in entry.files)
            lacking += max(0, download_bytes(entry) - here)
            names.append(entry.id)

    free = free_space(folder)
    if lacking > free:
        raise UserError(
            f"models: the downloads of {', '.join(names)} need {readable_size(lacking)}, but only "
            f"{readable_size(free)} are free on the disk of {folder}; delete files there, or use --models to "
            "choose a folder on a different disk."
        )


def _absent(choice: str, kind: str, folder: Path) -> hub.Entry | None:
    """The catalogue entry that has to be downloaded for a choice; None for what is here, or is a file."""
    if choice not in {entry.id for entry in hub.entries(kind)}:
        return None
    return hub.absent(choice, kind, [folder])


def download_bytes(entry: hub.Entry) -> int:
    """About how many bytes the download of an entry has; of an unknown size those of its weights in fp32."""
    if entry.size:
        return entry.size

    return parameters(entry) * _BYTES[entry.dtype or "fp32"]


def parameters(entry: hub.Entry) -> int:
    """Number of weights of the published network of an entry; 0 where that is not known."""
    if not entry.network:
        return 0

    try:
        shapes = official.shapes(entry.network)
    except ImportError:  # transformers, of a text encoder
        return 0
    return sum(math.prod(shape) for shape in shapes.values())


def expect_memory(what: Subject, files: Source) -> None:
    """Raise a UserError if a model's weights do not fit into what is free of its device's memory."""
    if what.entry is None or what.files not in kinds.KINDS:
        return

    count = parameters(what.entry)
    free = free_memory(files.device)
    if not count or free is None:
        return

    dtype = precision(what, files)
    need = count * _BYTES[dtype]
    if need <= free:
        return

    half = count * 2
    if dtype == "fp32" and half <= free:
        remedy = f"choose --dtype bf16, which needs {readable_size(half)}"
    else:
        remedy = "close other programs, or choose a smaller model or a different --device"
    raise UserError(
        f"memory: the weights of {what.name} need {readable_size(need)} in {dtype} on {files.device}, but only "
        f"{readable_size(free)} are free; {remedy}."
    )


def precision(what: Subject, files: Source) -> str:
    """Name of the dtype in which a model is loaded."""
    if what.family:
        return files.precision_name(what.family)

    # Decoders, encoders and language models choose their own.
    wanted = files.dtype if what.files in (LANGUAGE, READER) else AUTO
    return dtype_name(kinds.choose_dtype(wanted, torch.device(files.device), what.files))
