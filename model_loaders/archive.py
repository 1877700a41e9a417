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
from pathlib import Path
from typing import Any, cast

_MAX_RECORDS = 20_000
_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
_MAX_WORK = 400_000  # operations; a tensor takes about 35

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
    """A file that is not read; the message completes the sentence "<file> ..."."""


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
        records = {record.filename.lower(): record for record in archive.infolist()}  # torch ignores case
        if any(r.compress_type or r.file_size != r.compress_size for r in archive.infolist()):
            raise Refused("is a compressed archive, which torch never writes")
        (folder,) = {name.partition("/")[0] for name in records}
        record = records[f"{folder}/data.pkl"]
        if len(records) != count:
            raise ValueError("two records have the same name")
        if record.file_size > _MAX_PICKLE:
            raise Refused(f"describes its weights in more bytes than the limit of {_MAX_PICKLE}")
        return archive.read(record)


def _scan(pickled: bytes) -> None:
    """Follow a pickle on a stack of names: a global, the class of a new container, or the operation that made the value."""
    stack: list[str] = []
    memo: dict[int, str] = {}

    def popped(count: int | None) -> list[str]:
        """The upper ``count`` names, or all above the last mark; the uppermost first."""
        return list(iter(stack.pop, "MARK")) if count is None else [stack.pop() for _ in range(count)]

    for work, (operation, read, _) in enumerate(pickletools.genops(pickled), 1):
        name, argument = operation.name, cast(Any, read)
        if work > _MAX_WORK:
            raise Refused(f"describes its weights in more steps than the limit of {_MAX_WORK}")
        if name in _PUSHES:
            stack.append(name)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append("known" if memo[argument] == "EMPTY_DICT" else memo[argument])
        elif name in _TUPLES:
            popped(_TUPLES[name])
            stack.append(name)
        elif name in ("APPEND", "APPENDS"):
            popped(1 if name == "APPEND" else None)
            if stack[-1] != "EMPTY_LIST":
                raise Refused("appends to something else than a list")
        elif name in ("SETITEM", "SETITEMS"):
            keys = popped(2 if name == "SETITEM" else None)[1::2]
            if not all(key in _ATOMS for key in keys):  # the hash of nested tuples can take minutes
                raise Refused("has entries that are named by no text or number")
            if stack[-1] not in ("EMPTY_DICT", *_NEW):  # an assignment to a tensor fills it
                raise Refused("assigns to something else than a dictionary")
        elif name == "GLOBAL":
            if argument not in _CONTAINERS and not _CALLED.fullmatch(argument) and not _TYPES.fullmatch(argument):
                raise HoldsCode(argument.replace(" ", "."))
            stack.append(argument)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = popped(2)
            if called not in _CONTAINERS and not _CALLED.fullmatch(called):
                raise HoldsCode("a call")
            if called in _CONTAINERS and arguments != "EMPTY_TUPLE":
                raise Refused("copies a dictionary, which torch.save does not write")
            stack.append(f"new {called}")
        elif name == "BUILD":  # copies a dictionary: only one that is made for this
            if popped(1) != ["EMPTY_DICT"] or stack[-1] not in _NEW:
                raise Refused("sets the state of a tensor, which torch.save does not write")
        elif name == "BINPERSID":
            popped(1)
            stack.append(name)
        elif name not in ("PROTO", "STOP"):
            raise Refused("uses a pickle operation that torch.save does not write")
