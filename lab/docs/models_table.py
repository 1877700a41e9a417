"""Write README's table of models.

Sizes of downloads, licences and memory come from the catalogue and from the shapes of the networks; the table stands
between two markers in README.md.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...model_loaders.catalogue.hub import Entry, entries
from ...networks.quantized import INT4, INT8
from ...reports.table import markdown
from ...runs.memory.fitting import dtypes_for, need
from ..work.fits import drawing_entries
from .blocks import with_block

README = Path(__file__).resolve().parents[2] / "README.md"
NAME = "models"
# Names of licences that readers know, by identifier of the catalogue.
_LICENCES = {
    "LicenseRef-DeepSeek-Model-1.0": "DeepSeek Model License",
    "NOASSERTION": "none stated",
}
# How the networks of a row were compared with the authors' code.
RECORDED = "networks"
READ = "source only"
# What a Janus reads, beside a prompt: a question about an image, and an image with what to change in it.
_ANSWERS = "prompt, question"
_EDITS = f"{_ANSWERS}, edit"


@dataclass(frozen=True)
class Row:
    """Models of one kind, from the smallest to the largest."""

    title: str
    reads: str
    pixels: str  # of an image's side
    entries: tuple[str, ...]  # ids of the catalogue
    checked: str = RECORDED
    also: tuple[str, ...] = ()  # further entries that it needs, besides its decoder


ROWS = (
    Row("MAR base, large, huge", "class", "256", ("mar-base", "mar-large", "mar-huge")),
    Row("LlamaGen B to 3B", "class", "256, 384", ("llamagen-b-256", "llamagen-xl-384", "llamagen-3b-384")),
    Row(
        "LlamaGen text-to-image",
        "prompt",
        "256, 512",
        ("llamagen-t2i-xl-256", "llamagen-t2i-xl-512"),
        also=("flan-t5-xl",),
    ),
    Row("PAR XL to 3B", "class", "384", ("par-xl-4x", "par-xxl-4x", "par-3b-4x")),
    Row("Tar 1.5B, 7B", "prompt", "256 to 1024", ("tar-1.5b", "tar-7b"), also=("ar-dtok-512", "ta-tok")),
    Row("Harmon 0.5B, 1.5B", "prompt", "512", ("harmon-0.5b", "harmon-1.5b")),
    Row("UniPic 1.5B", "prompt", "1024", ("unipic-1.5b",)),
    Row("Janus-Pro 1B, 7B", _ANSWERS, "384", ("janus-pro-1b", "janus-pro-7b")),
    Row("Janus-4o-7B", _EDITS, "384", ("janus-4o-7b",)),
    Row("Janus-Pro-R1-7B", _ANSWERS, "384", ("janus-pro-r1-7b",), READ),
    Row("BitDance B, L, H", "class", "256", ("bitdance-b-4x", "bitdance-l-1x", "bitdance-h-1x")),
    Row("BitDance 14B", "prompt", "512, 1024", ("bitdance-14b-16x", "bitdance-14b-64x")),
    Row("NextStep-1.1, pretrained", "prompt", "256, 512", ("nextstep-1.1-pretrain-256px", "nextstep-1.1-pretrain")),
    Row("NextStep-1, 1.1", "prompt", "512", ("nextstep-1-large", "nextstep-1.1")),
    Row("NextStep-1-Large-Edit", "prompt, edit", "512", ("nextstep-1-large-edit",)),
)


def spread(values: list[float]) -> str:
    """The smallest and the largest of figures, in one text."""
    low = f"{min(values):.1f}"
    high = f"{max(values):.1f}"
    return low if low == high else f"{low}–{high}"


def download(row: Row, known: Mapping[str, Entry]) -> str:
    """GB of the downloads of a model, with its decoder and what else it needs."""
    totals = []
    complete = True
    for name in row.entries:
        model = known[name]
        if model.size is None:
            # A note may say the least size.
            return model.note.replace(" GB", "") if "GB" in model.note else "not stated"

        total = model.size
        for other in (model.decoder, *row.also):
            if other:
                size = known[other].size
                total += size or 0
                complete = complete and size is not None
        totals.append(total / 1e9)

    return spread(totals) if complete else f"more than {min(totals):.1f}"


def memory(models: Sequence[Entry], dtype: str) -> str:
    """GB of an image of each of some models, or that they do not have the dtype."""
    if dtype not in dtypes_for(models[0]):
        return "no"
    return spread([need(entry, dtype).total / 1e9 for entry in models])


def licence_of(models: Sequence[Entry]) -> str:
    """The licence of the weights in words."""
    stated = {entry.licence for entry in models}
    assert len(stated) == 1, f"one row, several licences: {sorted(stated)}"

    if any("non-commercial" in entry.note for entry in models):
        return "non-commercial"
    return _LICENCES.get(models[0].licence, models[0].licence)


def cells(row: Row, known: Mapping[str, Entry]) -> list[str]:
    """The entries of a row of the table."""
    models = [known[name] for name in row.entries]
    return [
        row.title,
        row.reads,
        row.pixels,
        download(row, known),
        *(memory(models, dtype) for dtype in ("bf16", INT8, INT4)),
        licence_of(models),
        row.checked,
    ]


def table() -> str:
    """The table as Markdown."""
    head = [
        "model",
        "reads",
        "pixels",
        "download, GB",
        "GPU memory in bf16, GB",
        "in int8, GB",
        "in int4, GB",
        "licence of the weights",
        "checked",
    ]
    known = {entry.id: entry for entry in drawing_entries()}
    for family in ("kl", "vq", "t5", "ta-tok", "nextstep-ae"):
        known |= {entry.id: entry for entry in entries(family)}

    return markdown([head, *(cells(row, known) for row in ROWS)], markup=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Write the table into README."""
    text = README.read_text(encoding="utf-8-sig")
    README.write_text(with_block(text, NAME, table()), encoding="utf-8")
    return 0
