"""Static check of files written by ``torch.save``, before torch reads them.

torch's weights-only unpickler executes no code, but a small file can make it allocate gigabytes or run for minutes:
compressed records, ``bytearray(n)``, hashes of nested tuples. :func:`check` accepts only the operations and callables that
``torch.save`` writes for weights and plain values. Storages need no check: torch maps the file, so they cannot exceed it.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_MAX_RECORDS = 20_000
_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
_MAX_WORK = 400_000  # operations; a tensor takes about 35
_MAX_DEPTH = 100  # of values inside each other; an optimizer's state has about 6
_UNICODE_PATH = 0x7075  # an extra field of a zip record with another name for it, which Python reads from 3.12 on and torch does not
_WEIGHTS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")

# Classes that torch.save writes without arguments, and their content as separate operations.
_CONTAINERS = ("collections OrderedDict", "argparse Namespace", "easydict EasyDict")
_NEW = [f"new {name}" for name in _CONTAINERS]
_REBUILT = r"torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
_CALLED = re.compile(rf"{_REBUILT}|torch (Size|device)")
_DTYPE = r"torch (u?int|long|short|b?float|double|half|bool|complex)\d*"
_TYPES = re.compile(rf"torch \w+Storage|torch\.storage UntypedStorage|{_DTYPE}")
# Operations that push a number, text, boolean or None, and all that push something.
_ATOMS = "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING".split()
_PUSHES = [*_ATOMS, "MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"]
# Values of a tuple; those of the last are all above a mark.
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}


class Refused(Exception):
    """A file that is not read; the message completes the sentence "<file> ...", and ``remedy`` says what to do, if it is known."""

    def __init__(self, found: str, remedy: str = ""):
        super().__init__(found)
        self.remedy = remedy


class HoldsCode(Refused):
    """A file that calls something else than constructors of tensors and plain values; the message is its name."""


def check(path: Path) -> None:
    """Check a zip file of ``torch.save``; :class:`Refused` if it is over a limit, or holds something else than weights and plain values."""
    try:
        _scan(_pickle(path))
    except (Refused, OSError, MemoryError):
        raise
    except Exception as e:  # zipfile and pickletools raise many
        raise Refused("is damaged or cut short") from e


def _pickle(path: Path) -> bytes:
    """The pickle in a zip file, whose layout leaves no doubt which records Python's and torch's readers find."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 98))
        end = file.read()
        signature, count, length, offset, comment = struct.unpack("<4s6xHIIH", end[-22:])
        stop = size - 22
        if end[-42:-38] == b"PK\x06\x07":  # zip64
            begin, count, length, offset = struct.unpack("<4s28xQQQ", end[-98:-42])
            stop = size - 98
            if begin != b"PK\x06\x06" or struct.unpack("<Q", end[-34:-26])[0] != stop:
                raise ValueError("another directory than the one before it")
        if signature != b"PK\x05\x06" or comment or offset + length != stop:
            raise ValueError("the directory does not end the file")
        if count > _MAX_RECORDS or length > 512 * _MAX_RECORDS:
            raise Refused(f"has {count} records, more than the limit of {_MAX_RECORDS}")
        archive = zipfile.ZipFile(file)
        _expect_one_name(archive.infolist())
        _expect_checkpoint(archive.infolist())
        records = {record.filename.lower(): record for record in archive.infolist()}  # torch ignores case
        (folder,) = {name.partition("/")[0] for name in records}
        record = records[f"{folder}/data.pkl"]
        if len(records) != count:
            raise ValueError("two records have the same name")
        if record.file_size > _MAX_PICKLE:
            raise Refused(f"describes its weights in more bytes than the limit of {_MAX_PICKLE}")
        return archive.read(record)


def _expect_one_name(records: list[zipfile.ZipInfo]) -> None:
    """Raise :class:`Refused` if a record has two names, of which two readers may take a different one."""
    for record in records:
        if record.filename != record.orig_filename or _UNICODE_PATH in _extra_fields(record.extra):
            raise Refused("holds a record with two names, which torch.save does not write")


def _extra_fields(extra: bytes) -> set[int]:
    """Ids of the extra fields of a zip record; a struct.error or ValueError if they do not end where the last one does."""
    found = set()
    while extra:
        number, length = struct.unpack("<HH", extra[:4])
        if len(extra) < 4 + length:
            raise ValueError("an extra field is cut short")
        found.add(number)
        extra = extra[4 + length :]
    return found


def _expect_checkpoint(records: list[zipfile.ZipInfo]) -> None:
    """Raise :class:`Refused` for a zip file that holds something else than a checkpoint of ``torch.save``."""
    names = [record.filename for record in records]
    if any(name.endswith("/constants.pkl") for name in names):
        raise Refused("is a TorchScript program", "save its state_dict with torch.save, or choose a .safetensors file")
    if names and all(name.endswith(".npy") for name in names):
        raise Refused("is an archive of NumPy arrays", "save them as tensors in a .safetensors file")
    if not any(name.lower().endswith("/data.pkl") for name in names):
        inside = [name for name in names if name.lower().endswith(_WEIGHTS)]
        what = f"is a zip archive that holds {inside[0][:80]}" if inside else "is a zip archive without a checkpoint"
        raise Refused(what, "unpack it and choose the file inside" if inside else "choose another file")
    if any(record.compress_type or record.file_size != record.compress_size for record in records):
        raise Refused("is a compressed archive, which torch never writes")


@dataclass(eq=False)
class _Value:
    """A value on the stack of a pickle."""

    kind: str  # a global, the class of a new container, or the operation that made the value
    depth: int = 0  # how many values are inside each other


def _scan(pickled: bytes) -> None:
    """Follow a pickle on a stack of values."""
    stack: list[_Value] = []
    memo: dict[int, _Value] = {}

    def popped(count: int | None) -> list[_Value]:
        """The upper ``count`` values, or all above the last mark; the uppermost first."""
        if count is not None:
            return [stack.pop() for _ in range(count)]
        values = []
        while (value := stack.pop()).kind != "MARK":
            values.append(value)
        return values

    def fill(contents: list[_Value]) -> None:
        """Put ``contents`` into the value on top of the stack, which the memo may hold, too."""
        for value in contents:
            stack[-1].depth = max(stack[-1].depth, value.depth + 1)
        if stack[-1].depth > _MAX_DEPTH:
            raise Refused(f"nests its values deeper than the limit of {_MAX_DEPTH}")

    def push(kind: str, contents: list[_Value]) -> None:
        """Put a value on the stack that holds ``contents``."""
        stack.append(_Value(kind))
        fill(contents)

    for work, (operation, read, _) in enumerate(pickletools.genops(pickled), 1):
        name, argument = operation.name, cast(Any, read)
        if work > _MAX_WORK:
            raise Refused(f"describes its weights in more steps than the limit of {_MAX_WORK}")
        if name in _PUSHES:
            stack.append(_Value(name))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            known = memo[argument]
            # A container is filled where it is made, never later.
            filled = known.kind in ("EMPTY_DICT", "EMPTY_LIST", *_NEW)
            stack.append(_Value("known", known.depth) if filled else known)
        elif name in _TUPLES:
            push(name, popped(_TUPLES[name]))
        elif name in ("APPEND", "APPENDS"):
            contents = popped(1 if name == "APPEND" else None)
            if stack[-1].kind != "EMPTY_LIST":
                raise Refused("appends to something else than a list")
            fill(contents)
        elif name in ("SETITEM", "SETITEMS"):
            contents = popped(2 if name == "SETITEM" else None)
            keys = contents[1::2]
            if not all(key.kind in _ATOMS for key in keys):  # the hash of nested tuples can take minutes
                raise Refused("has entries that are named by no text or number")
            if stack[-1].kind not in ("EMPTY_DICT", *_NEW):  # an assignment to a tensor fills it
                raise Refused("assigns to something else than a dictionary")
            fill(contents)
        elif name == "GLOBAL":
            if argument not in _CONTAINERS and not _CALLED.fullmatch(argument) and not _TYPES.fullmatch(argument):
                raise HoldsCode(argument.replace(" ", "."))
            stack.append(_Value(argument))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = popped(2)
            if called.kind not in _CONTAINERS and not _CALLED.fullmatch(called.kind):
                raise HoldsCode("a call")
            if called.kind in _CONTAINERS and arguments.kind != "EMPTY_TUPLE":
                raise Refused("copies a dictionary, which torch.save does not write")
            push(f"new {called.kind}", [arguments])
        elif name == "BUILD":  # copies a dictionary: only one that is made for this
            (state,) = popped(1)
            if state.kind != "EMPTY_DICT" or stack[-1].kind not in _NEW:
                raise Refused("sets the state of a tensor, which torch.save does not write")
            fill([state])
        elif name == "BINPERSID":
            push(name, popped(1))
        elif name not in ("PROTO", "STOP"):
            raise Refused("uses a pickle operation that torch.save does not write")
