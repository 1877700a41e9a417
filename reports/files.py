"""Files that a command writes.

Their names are checked before the command runs, and a result that cannot be written is kept elsewhere.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError

# Errors of a disk without space.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Bytes that are written to a folder to learn whether it has space.
_PROBE = 1 << 20
# Characters of a path in a message.
_SHOWN = 120


@dataclass(frozen=True)
class Result:
    """What a command has to write."""

    field: str  # the option that names the file
    path: Path
    content: bytes


# ------------------------------------------------------------------------------------------------ names


def typed_path(text: str | Path, field: str) -> Path:
    """The path that a user typed, with the home folder in place of ``~``.

    Raises:
        UserError: it is empty, holds characters that no name can have, or begins with the home folder of an unknown
            user.
    """
    typed = str(text)
    if not typed:
        raise UserError(f"{field}: it is empty; give a path.")
    expect_name(typed, field)

    expanded = os.path.expanduser(typed)
    if typed.startswith("~") and expanded == typed:
        raise UserError(
            f"{field}: the home folder in {typed[:_SHOWN]} is unknown; write the whole path, or put ./ before a name "
            "that begins with ~."
        )

    return Path(expanded)


def expect_name(text: str, field: str) -> None:
    """Check the characters of a path or name.

    Raises:
        UserError: no file can have it.
    """
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False

    if not is_name:
        raise UserError(f"{field}: {text[:_SHOWN]!a} has characters that no file name can have; give a different name.")


def output(text: str | Path | None, field: str, endings: Sequence[str]) -> Path | None:
    """The file that an option names, after a test that it can be written; None if nothing is named.

    Its folder is created when the file is written, so that a command that is refused after this leaves none.

    Args:
        text: as the user typed it.
        field: name of the option, for messages.
        endings: the endings that the file may have, in lower case and with their dot.

    Raises:
        UserError: a name that no file can have, another ending, a folder or a device of that name, a file that is
            read-only, or a folder that cannot be made, is not writable or is full.
    """
    if text is None:
        return None

    path = typed_path(text, field)
    if path.suffix.lower() not in endings:
        raise UserError(f"{field}: {_short(path)} must end in {' or '.join(endings)}.")

    try:
        there = path.exists()
        if there and not path.is_file():
            raise UserError(f"{field}: {_short(path)} is not a file; give the name of a file.")
        if there and not os.access(path, os.W_OK):
            raise UserError(f"{field}: {_short(path)} is read-only; make it writable, or name a different file.")
    except OSError as problem:
        raise _unwritable(path, field, problem) from None

    writable(path.parent, field, path.name)
    return path


def writable(folder: Path, field: str, name: str = "") -> None:
    """Test that a folder, which need not exist, takes a file: one of a megabyte is written and removed.

    Folders that were made for it are removed, too.

    Args:
        field: name of the option, for messages.
        name: of the file that will be written; "" if the user names only the folder.

    Raises:
        UserError: the folder cannot be made, is not writable or is full.
    """
    part = _part(folder / (name or "x"))
    made: list[Path] = []

    try:
        made += [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(bytes(_PROBE))
    except OSError as problem:
        raise _unwritable(folder / name, field, problem, "file" if name else "folder") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        for place in made:  # inner ones first
            with suppress(OSError):
                place.rmdir()


def distinct(**files: Path | None) -> None:
    """Raise a UserError if two options, by name, are the same file: the second result would replace the first."""
    seen: dict[str, str] = {}

    for field, path in files.items():
        if path is None:
            continue

        key = os.path.normcase(os.path.realpath(path))
        if key in seen:
            raise UserError(
                f"{field}: {_short(path)} is already the file for {seen[key]}; name a different file for one of the "
                "two options."
            )
        seen[key] = field


def _unwritable(path: Path, field: str, problem: OSError, named: str = "file") -> UserError:
    """The error for a path that cannot be written; ``named`` is what the user names there, a file or a folder."""
    if problem.errno == errno.ENAMETOOLONG:
        remedy = "give a shorter name"
    elif problem.errno in FULL:
        remedy = f"free disk space there, or choose a {named} on a different disk"
    elif named == "file":
        remedy = "choose a file in a folder that you may write to"
    else:
        remedy = "choose a folder that you may write to"

    return UserError(f"{field}: {_short(path)} cannot be written ({problem.strerror or problem}); {remedy}.")


def _short(path: Path) -> str:
    """A path for a message: its end, which says most, if it is long."""
    text = str(path)
    return text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"


def _part(path: Path) -> Path:
    """The name of a file while it is written."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.part{path.suffix}")


# ------------------------------------------------------------------------------------------------ contents


def image_endings() -> tuple[str, ...]:
    """Endings of the image files that this Pillow can write."""
    formats = Image.registered_extensions()
    usual = (".png", ".jpg", ".jpeg", ".webp")
    return tuple(ending for ending in usual if formats.get(ending) in Image.SAVE)


def encoded(image: np.ndarray, path: Path) -> bytes:
    """An image, uint8 [H, W, 3], as the content of a file with the ending of ``path``."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, Image.registered_extensions()[path.suffix.lower()])
    return out.getvalue()


def as_text(text: str) -> bytes:
    """A text as the content of a file, in UTF-8.

    Bytes of names that are no UTF-8 become escapes, which JSON reads again.
    """
    return text.encode("utf-8", "backslashreplace")


# ------------------------------------------------------------------------------------------------ writing


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside ``path``, then rename it: an interruption leaves no half-written file. Raises OSError."""
    part = _part(path)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def save(results: Iterable[Result]) -> str:
    """Write all results.

    One that cannot be written any more is kept in another folder, or printed if it is text and no folder takes it.

    Returns:
        "" if all were written, else a sentence that says which were not, why, and where they are.
    """
    failed: list[Result] = []
    reasons: list[str] = []

    for result in results:
        try:
            replace_file(result.path, result.content)
        except OSError as problem:
            failed.append(result)
            reasons.append(str(problem.strerror or problem))

    if not failed:
        return ""

    kept = _keep(failed)
    names = ", ".join(f"{result.field} ({result.path.name})" for result in failed)
    return f"{names[:_SHOWN]}: could not be written ({reasons[0]}); {kept}"


def _keep(results: Sequence[Result]) -> str:
    """Write results to the first folder that takes them; words that say where they are."""
    for folder in _refuges():
        try:
            inside = Path(tempfile.mkdtemp(prefix="fastar-", dir=folder()))
            for result in results:
                (inside / result.path.name).write_bytes(result.content)
        except (OSError, RuntimeError):
            continue

        return f"saved in {inside} instead"

    lost = [result for result in results if not _printed(result)]
    if lost:
        return f"{lost[0].path.name} could not be written to any other folder either, so it is lost"

    return "FastAR could not write to any other folder either and printed the text"


def _refuges() -> list[Callable[[], str]]:
    """Folders for results that could not be written where they belong."""
    return [tempfile.gettempdir, os.getcwd, lambda: str(Path.home())]


def _printed(result: Result) -> bool:
    """Print a result that is text; whether it is."""
    try:
        text = result.content.decode()
    except UnicodeDecodeError:
        return False

    sys.stdout.write(f"{result.path.name}:\n{text}\n")
    return True
