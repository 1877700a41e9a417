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
from typing import Any

_MAX_RECORDS = 20_000
_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
_MAX_WORK = 400_000  # operations; a tensor takes about 35

# Classes that torch.save writes without arguments, and their content as separate operations.
_CONTAINERS = ("collections OrderedDict", "argparse Namespace", "easydict EasyDict")
_CALLED = re.compile(
    r"torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)|torch (Size|device)"
)
_TYPES = re.compile(
    r"torch \w+Storage|torch\.storage UntypedStorage|torch (u?int|long|short|b?float|double|half|bool|complex)\d*"
)
# Operations that push a number, text, boolean or None.
_ATOMS = "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING".split()
_MARK = object()


class Refused(Exception):
    """A file that is not read; the message completes the sentence "<file> ..."."""


class HoldsCode(Refused):
    """A file that calls something else than constructors of tensors and plain values; the message is its name."""


def check(path: Path) -> None:
    """Check a zip file of ``torch.save``.

    Raises:
        Refused: it is over a limit, or holds something else than weights and plain values.
        OSError: it cannot be read.
    """
    try:
        _Scan().run(_pickle(path))
    except (Refused, OSError, MemoryError):
        raise
    except Exception as e:  # zipfile and pickletools raise many
        raise Refused("is damaged or cut short") from e


def _pickle(path: Path) -> bytes:
    """The pickle within the zip file.

    The directory must end the file and name one folder and no record twice, so that Python's and torch's readers find the same.

    Raises:
        Refused: it is too large, or a record is compressed.
        ValueError: another layout.
    """
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


class _Value:
    """Placeholder of a value that is no number, text or tuple.

    Attributes:
        name: "module name" of a global, else "".
        entries: of a dictionary; None for other values.
    """

    def __init__(self, name: str = "", entries: int | None = None):
        self.name, self.entries = name, entries


class _Scan:
    """Follows a pickle on a stack of placeholders."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.work = 0

    def run(self, pickled: bytes) -> None:
        """Follow a pickle to its end.

        Raises:
            Refused: it is over a limit, or holds something else than weights and plain values.
            Exception: it ends early or contradicts itself.
        """
        memo: dict[Any, Any] = {}
        for operation, argument, _ in pickletools.genops(pickled):
            self._spend(1)
            if operation.name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = self.stack[-1]
            elif operation.name in ("BINGET", "LONG_BINGET"):
                self.stack.append(memo[argument])
            elif operation.name not in ("PROTO", "STOP"):
                self._step(operation.name, argument)

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > _MAX_WORK:
            raise Refused(f"describes its weights in more steps than the limit of {_MAX_WORK}")

    def _step(self, name: str, argument: Any) -> None:
        push, pop = self.stack.append, self.stack.pop
        if name in _ATOMS:
            push(argument)
        elif name == "MARK":
            push(_MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            push(_Value(entries=0))
        elif name == "EMPTY_TUPLE":
            push(())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            push(tuple(pop() for _ in range(int(name[-1]))))
        elif name == "TUPLE":
            push(tuple(self._marked()))
        elif name in ("APPEND", "SETITEM", "APPENDS", "SETITEMS"):
            items = self._marked() if name.endswith("S") else [pop() for _ in range(1 + (name == "SETITEM"))]
            keys = items[1::2] if name.startswith("SETITEM") else []  # the items are in reverse
            if any(isinstance(key, (tuple, _Value)) for key in keys):  # the hash of nested tuples can take minutes
                raise Refused("has entries that are named by no text or number")
            self.stack[-1].entries = (self.stack[-1].entries or 0) + len(items)
        elif name == "GLOBAL":
            if argument not in _CONTAINERS and not _CALLED.fullmatch(argument) and not _TYPES.fullmatch(argument):
                raise HoldsCode(argument.replace(" ", "."))
            push(_Value(argument))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = pop(), pop()
            if not isinstance(called, _Value) or called.name not in _CONTAINERS and not _CALLED.fullmatch(called.name):
                raise HoldsCode("a call")
            if called.name in _CONTAINERS and arguments != ():
                raise Refused("copies a dictionary, which torch.save does not write")
            push(_Value(entries=0 if called.name in _CONTAINERS else None))
        elif name == "BUILD":
            state = pop()
            if state.entries is None or self.stack[-1].entries is None:
                raise Refused("sets the state of a tensor, which torch.save does not write")
            self._spend(state.entries)
        elif name == "BINPERSID":
            pop()
            push(_Value())
        else:
            raise Refused("uses a pickle operation that torch.save does not write")

    def _marked(self) -> list[Any]:
        """Everything above the last mark, in reverse."""
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items
