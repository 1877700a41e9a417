"""Reports in the metadata of an image: written under one key, and read back from a file that anybody may have written.

The value is the JSON of docs/report.md. ``node`` is the id of the node that made a run and ``label`` its name in a
comparison. ComfyUI writes the value as a text of a PNG, as a separate chunk of an animated PNG, and as "key:value" in
the EXIF data of a WebP; other programs write JPEG files like WebP files.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ..errors import UserError, first_line
from .quality import SAVED_AS, WORDS, Quality
from .reading import read
from .record import COUNTS, VERSION, Baseline, Qualities, Report, against, fingerprint

KEY = "fastar"
MOST_RUNS = 512
MOST_PIXELS = 1 << 28
ENDINGS = (".png", ".webp", ".jpg", ".jpeg")
# How files begin; "." is any byte.
_SIGNATURES = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
}
_LONGEST_SIGNATURE = 12  # bytes
_PNG_CHUNKS = 8  # bytes before the first chunk of a PNG
_ANIMATED = b"comf"  # the chunk of an animated PNG
_MOST_CHUNKS = 32 << 20  # bytes of all chunks of a PNG but the image's
_MOST_BYTES = 256 << 20  # of a WebP or JPEG, which Pillow reads as a whole
_MOST_TEXT = 4 << 20  # characters of the JSON
_LONGEST = 1600  # characters of a text
# What identifies a run: two entries that agree in it are the same run.
_IDENTITY = ("sampler", "model", "settings", "seed", "seconds")


class OtherFormat(UserError):
    """A report of another version of the format."""

    __module__ = "fastar"


def add_runs(
    metadata: MutableMapping[str, Any],
    runs: Iterable[Mapping[str, Any]],
    explained: str = "",
    instead_of: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Add runs, as :func:`described` makes them, to the metadata of an image; an entry of the same run is replaced.

    Args:
        explained: what a comparison's figures mean, for people who open the file.
        instead_of: runs whose entries are taken out.
    """
    new = list(runs)
    leaving = [*new, *instead_of]
    kept = []
    for run in _runs_of(metadata.get(KEY)):
        replaced = any(_same(run, other) for other in leaving)
        if not replaced:
            kept.append(run)

    metadata[KEY] = {"version": VERSION, "runs": [*kept, *new][-MOST_RUNS:]}
    if explained:
        metadata[KEY]["explained"] = explained


def described(
    reports: Sequence[Report],
    node: str = "",
    labels: Sequence[str] = (),
    baseline: Baseline | None = None,
    quality: Qualities = (),
) -> list[dict[str, Any]]:
    """The JSON form of runs, with the node's id and their labels."""
    if baseline is None:
        baseline = [None] * len(reports)

    out = []
    for i, (report, base) in enumerate(zip(reports, against(reports, baseline), strict=True)):
        about = {"node": node, "label": labels[i] if labels else "", "device": report.device}
        known = {name: value for name, value in about.items() if value}

        run = report.to_dict(base, quality[i] if quality else None)
        if base is not None:
            known["baseline"] = _reference(base.to_dict())
        out.append(known | run)

    return out


def _reference(run: Mapping[str, Any]) -> str:
    """A short digest of what identifies a run: how a run names its baseline."""
    return fingerprint(json.dumps([run.get(name) for name in _IDENTITY], sort_keys=True))


def _runs_of(value: Any) -> list[Any]:
    """The runs of the metadata's value; [] if it holds none."""
    runs = value.get("runs") if isinstance(value, Mapping) else None
    return runs if isinstance(runs, list) else []


def _same(run: Any, other: Mapping[str, Any]) -> bool:
    """Whether two entries are of the same run."""
    return isinstance(run, Mapping) and all(run.get(name) == other.get(name) for name in _IDENTITY)


# ------------------------------------------------------------------------------------------------ reading


class Saved(NamedTuple):
    """An image with reports: one report, label, quality and baseline a run."""

    image: Image.Image
    reports: list[Report]
    labels: list[str]  # "" for none
    qualities: list[Quality | None]
    baselines: list[int | None]  # the index of the run that a comparison measured it against


def read_runs(path: Path) -> Saved:
    """Read a PNG, WebP or JPEG file with FastAR reports.

    Raises:
        UserError: the file is of another format, too large, or without a well-formed report.
        OtherFormat: another version of FastAR wrote the report.
    """
    shown, text = _read_image(path)
    if text is None:
        raise UserError(
            f"image: {path.name} holds no FastAR report. Possible causes: no FastAR sampler generated this image, "
            "ComfyUI ran with --disable-metadata, or another program removed the report when it edited or sent the "
            "file; choose a file that a save node of ComfyUI wrote in a run with a FastAR sampler."
        )

    try:
        runs = _parse_runs(text, path.name)
        reports = [from_dict(run) for run in runs]
        labels = [_words(run, "label") for run in runs]
        qualities = [_quality(run.get("quality")) for run in runs]
    except OtherFormat:
        raise
    except (ValueError, RecursionError) as problem:
        raise UserError(
            f"image: the report of {path.name} is damaged ({first_line(problem)}); choose a file that was not edited."
        ) from None

    # A run names its baseline, which may be gone: the newest runs are kept.
    places = {_reference(run): i for i, run in enumerate(runs)}
    baselines = [places.get(_words(run, "baseline")) for run in runs]

    return Saved(shown, reports, labels, qualities, baselines)


def _read_image(path: Path) -> tuple[Image.Image, str | None]:
    """The image of a file (the first one of an animation), and the text under our key or None."""
    try:
        format = _format_of(path)
        animated = _check_chunks(path) if format == "PNG" else None

        # No other format: Pillow's reader of EPS, for example, starts a program.
        with Image.open(path, formats=[format]) as image:
            if image.width * image.height > MOST_PIXELS:
                raise OSError(f"it has {image.width} x {image.height} pixels")

            image.load()
            text = getattr(image, "text", {}).get(KEY, animated) if format == "PNG" else _text_in_exif(image)
            return image.convert("RGB"), text
    except (OSError, ValueError, SyntaxError, LookupError, struct.error, Image.DecompressionBombError) as problem:
        raise UserError(
            f"image: {path.name} is not an image that FastAR reads ({problem}); choose a file that a save node of "
            "ComfyUI wrote."
        ) from None


def _format_of(path: Path) -> str:
    """The format of an image file, by its first bytes; an OSError for a file of another format, or a large one."""
    if not path.is_file():  # a pipe would never end
        raise OSError("it is not a file")

    with path.open("rb") as file:
        beginning = file.read(_LONGEST_SIGNATURE)
    formats = [format for format, signature in _SIGNATURES.items() if signature.match(beginning)]
    if not formats:
        raise OSError("it is not a PNG, WebP or JPEG file")

    (format,) = formats
    if format != "PNG" and path.stat().st_size > _MOST_BYTES:
        raise OSError(f"it is larger than {_MOST_BYTES >> 20} MB")
    return format


def _text_in_exif(image: Image.Image) -> str | None:
    """The text under our key in the EXIF data of an image, "key:value" under any tag; None if there is none."""
    for value in image.getexif().values():
        if isinstance(value, str) and value.startswith(f"{KEY}:"):
            return value.removeprefix(f"{KEY}:")
    return None


def _parse_runs(text: str, name: str) -> list[Any]:
    """The entries of the runs in the text of an image, 1 to 512 of them.

    Raises:
        ValueError: there are none, or more.
        OtherFormat: another version of FastAR wrote the file of this ``name``.
    """
    if len(text) > _MOST_TEXT:
        raise ValueError("it is too long")
    content = json.loads(text)

    version = content.get("version", VERSION) if isinstance(content, Mapping) else VERSION
    if version != VERSION:
        found = version if isinstance(version, int) else "unknown"
        raise OtherFormat(
            f"image: the report of {name} has the format {found}, but this version of FastAR reads the format "
            f"{VERSION}; open the file with the version of FastAR that wrote it."
        )

    runs = _runs_of(content)
    if not 0 < len(runs) <= MOST_RUNS:
        raise ValueError(f"it holds no runs, or more than {MOST_RUNS}")
    return runs


def _check_chunks(path: Path) -> str | None:
    """Raise an OSError for a PNG with large chunks: Pillow reads every chunk but the image's own as a whole.

    Returns:
        The text under our key in the chunks that ComfyUI adds to an animated PNG, which Pillow reads only with the last
        frame; None if there is none.
    """
    found = None
    total = 0
    with path.open("rb") as file:
        file.seek(_PNG_CHUNKS)

        # A chunk begins with four bytes of its size and four of its name, and ends with four of a checksum.
        while len(head := file.read(8)) == 8:
            size = int.from_bytes(head[:4], "big")
            name = head[4:]
            if name not in (b"IDAT", b"fdAT"):
                total += size

            if total > _MOST_CHUNKS:
                raise OSError(f"its metadata is larger than {_MOST_CHUNKS >> 20} MB")

            after = file.tell() + size + 4
            if name == _ANIMATED:
                key, _, text = file.read(size).partition(b"\0")
                if key == KEY.encode():
                    found = text.decode("latin-1")
            file.seek(after)

    return found


def from_dict(run: Any) -> Report:
    """The report of one entry of the JSON, without maps.

    Raises:
        ValueError: a value is missing or of another type; its text says which.
    """
    if not isinstance(run, Mapping):
        raise ValueError("an entry is not a JSON object")

    try:
        report = read(Report, {"device": "", **run}, _LONGEST)  # an unknown device is left out
    except ValueError as problem:
        raise ValueError(f"the entry {problem} is missing or wrong") from None
    report.counts = {name: report.counts[name] for name in COUNTS if name in report.counts}
    return report


def _quality(value: Any) -> Quality | None:
    """The distance from the baseline's images, as :meth:`.Quality.to_dict` writes it; None if there is none."""
    if value is None:
        return None

    try:
        found = read(Quality, value if isinstance(value, Mapping) else {"word": value})  # a word may stand alone
    except ValueError:
        found = None
    if found is None or found.word not in ("", *WORDS, *SAVED_AS):
        raise ValueError("the entry quality is missing or wrong")
    return replace(found, word=SAVED_AS.get(found.word, found.word))


def _words(run: Mapping[str, Any], name: str) -> str:
    """An optional text, shortened; "" for what is no text, whatever its depth."""
    value = run.get(name)
    return value[:_LONGEST] if isinstance(value, str) else ""
