"""Static check of files written by ``torch.save``, before torch reads them.

torch's weights-only unpickler executes no code, but a small file can make it allocate gigabytes or run for minutes:
compressed records, ``bytearray(n)``, hashes of nested tuples. :func:`check` accepts only the operations
and callables that ``torch.save`` writes for weights and plain values. Storages need no check: torch maps
the file, so they cannot exceed it.
"""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from .formats import INSTEAD, SUFFIXES

_MAX_RECORDS = 20_000
_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
_MAX_WORK = 400_000  # operations; a tensor takes about 35
_MAX_DEPTH = 100  # of values inside each other; an optimizer's state has about 6
_PROTOCOL = 2  # of torch.save, unless it is told otherwise
# An extra field of a zip record with another name for it, which Python reads from 3.12 on and torch does not.
_UNICODE_PATH = 0x7075

# Classes that torch.save writes without arguments, and their content as separate operations.
_CONTAINERS = ("collections OrderedDict", "argparse Namespace", "easydict EasyDict")
_NEW = [f"new {name}" for name in _CONTAINERS]
_REBUILT = r"torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
_CALLED = re.compile(rf"{_REBUILT}|torch (Size|device)")
_DTYPE = r"torch (u?int|long|short|b?float|double|half|bool|complex)\d*|torch float8_\w+"
_TYPES = re.compile(rf"torch \w+Storage|torch\.storage UntypedStorage|{_DTYPE}")
# Operations that push a number, text, boolean or None, and all that push something.
_ATOMS = "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING".split()
_PUSHES = [*_ATOMS, "MARK", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"]
# Values of a tuple; those of TUPLE are all above a mark.
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Refused(Exception):
    """A file that is not read.

    The message completes the sentence "<file> ..."; ``remedy`` says what to do, if it is known.
    """

    def __init__(self, found: str, remedy: str = ""):
        super().__init__(found)
        self.remedy = remedy


class HoldsCode(Refused):
    """A file that calls something else than constructors of tensors and plain values; the message is its name."""


# What is no plain tensor, by the beginning of its constructor's name: what to call it, and what helps.
_OTHER_TENSORS = {
    "torch._utils _rebuild_sparse": ("a sparse tensor", "save its state_dict again with to_dense() of every weight"),
    "torch._utils _rebuild_meta": (
        "a tensor without numbers (of the device meta)",
        "save it again from the model with its weights",
    ),
    "torch._utils _rebuild_qtensor": ("a quantised tensor", INSTEAD),
    "torchao.": ("weights that torchao quantised", INSTEAD),
    "numpy": (
        "NumPy arrays or numbers, which may hold code",
        "use a .safetensors version of it, or if you trust it, load it with torch.load(weights_only=False) "
        "and save its state_dict alone, with torch.as_tensor of every array",
    ),
}


def _not_accepted(name: str) -> Refused:
    """The error for a global that is neither a container nor a constructor of plain tensors."""
    for beginning, (found, remedy) in _OTHER_TENSORS.items():
        if name.startswith(beginning):
            return Refused(f"holds {found}", remedy)

    return HoldsCode(name.replace(" ", "."))


def check(path: Path) -> None:
    """Check a zip file of ``torch.save``.

    Raises:
        Refused: if it is over a limit, or holds something else than weights and plain values.
    """
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
        # torch ignores the case of names.
        records = {record.filename.lower(): record for record in archive.infolist()}
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
    """Ids of the extra fields of a zip record.

    Raises:
        struct.error, ValueError: if they do not end where the last one does.
    """
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
        inside = [name for name in names if name.lower().endswith(SUFFIXES)]
        if inside:
            raise Refused(f"is a zip archive that holds {inside[0][:80]}", "unpack it and choose the file inside")
        raise Refused("is a zip archive without a checkpoint", "choose another file")

    if any(record.compress_type or record.file_size != record.compress_size for record in records):
        raise Refused("is a compressed archive, which torch never writes")


@dataclass(eq=False)
class _Value:
    """A value on the stack of a pickle."""

    kind: str  # a global, the class of a new container, or the operation that made the value
    depth: int = 0  # how many values are inside each other


class _Stack:
    """The stack of a pickle."""

    def __init__(self) -> None:
        self.values: list[_Value] = []

    @property
    def top(self) -> _Value:
        """The value on top."""
        return self.values[-1]

    def pop(self, count: int) -> list[_Value]:
        """The upper ``count`` values, the uppermost first."""
        return [self.values.pop() for _ in range(count)]

    def pop_to_mark(self) -> list[_Value]:
        """All values above the last mark, the uppermost first."""
        values = []
        while (value := self.values.pop()).kind != "MARK":
            values.append(value)
        return values

    def fill(self, contents: list[_Value]) -> None:
        """Put ``contents`` into the value on top, which the memo may hold, too."""
        for value in contents:
            self.top.depth = max(self.top.depth, value.depth + 1)

        if self.top.depth > _MAX_DEPTH:
            raise Refused(f"nests its values deeper than the limit of {_MAX_DEPTH}")

    def push(self, kind: str, contents: list[_Value]) -> None:
        """Put a value on top that holds ``contents``."""
        self.values.append(_Value(kind))
        self.fill(contents)


def _scan(pickled: bytes) -> None:
    """Follow a pickle on a stack of values."""
    stack = _Stack()
    memo: dict[int, _Value] = {}

    for work, (operation, read, _) in enumerate(pickletools.genops(pickled), 1):
        name = operation.name
        argument = cast(Any, read)
        if work > _MAX_WORK:
            raise Refused(f"describes its weights in more steps than the limit of {_MAX_WORK}")

        if name in _PUSHES:
            stack.push(name, [])

        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack.top

        elif name in ("BINGET", "LONG_BINGET"):
            known = memo[argument]
            # A container is filled where it is made, never later.
            filled = known.kind in ("EMPTY_DICT", "EMPTY_LIST", *_NEW)
            stack.values.append(_Value("known", known.depth) if filled else known)

        elif name in _TUPLES:
            stack.push(name, stack.pop(_TUPLES[name]))
        elif name == "TUPLE":
            stack.push(name, stack.pop_to_mark())

        elif name in ("APPEND", "APPENDS"):
            _fill_list(stack, stack.pop(1) if name == "APPEND" else stack.pop_to_mark())
        elif name in ("SETITEM", "SETITEMS"):
            _fill_dictionary(stack, stack.pop(2) if name == "SETITEM" else stack.pop_to_mark())

        elif name == "GLOBAL":
            if argument not in _CONTAINERS and not _CALLED.fullmatch(argument) and not _TYPES.fullmatch(argument):
                raise _not_accepted(argument)
            stack.push(argument, [])

        elif name in ("REDUCE", "NEWOBJ"):
            _call(stack)

        elif name == "BUILD":  # copies a dictionary: only one that is made for this
            (state,) = stack.pop(1)
            if state.kind != "EMPTY_DICT" or stack.top.kind not in _NEW:
                raise Refused("sets the state of a tensor, which torch.save does not write")
            stack.fill([state])

        elif name == "BINPERSID":
            stack.push(name, stack.pop(1))

        elif name == "PROTO" and argument > _PROTOCOL:
            raise Refused(
                f"is pickled with protocol {argument}, and torch's safe reader reads protocol {_PROTOCOL}, "
                "the default of torch.save",
                "if you trust it, load it with torch.load(weights_only=False) "
                "and save its weights again with torch.save",
            )

        elif name not in ("PROTO", "STOP"):
            raise Refused("uses a pickle operation that torch.save does not write")


def _fill_list(stack: _Stack, contents: list[_Value]) -> None:
    """Append to the list on top of the stack."""
    if stack.top.kind != "EMPTY_LIST":
        raise Refused("appends to something else than a list")

    stack.fill(contents)


def _fill_dictionary(stack: _Stack, contents: list[_Value]) -> None:
    """Put values and keys, in turn, into the dictionary on top of the stack."""
    keys = contents[1::2]
    if not all(key.kind in _ATOMS for key in keys):  # the hash of nested tuples can take minutes
        raise Refused("has entries that are named by no text or number")
    if stack.top.kind not in ("EMPTY_DICT", *_NEW):  # an assignment to a tensor fills it
        raise Refused("assigns to something else than a dictionary")

    stack.fill(contents)


def _call(stack: _Stack) -> None:
    """Put what a call returns in the place of the function or class and of its arguments."""
    arguments, called = stack.pop(2)
    if called.kind not in _CONTAINERS and not _CALLED.fullmatch(called.kind):
        raise HoldsCode("a call")
    if called.kind in _CONTAINERS and arguments.kind != "EMPTY_TUPLE":
        raise Refused("copies a dictionary, which torch.save does not write")

    stack.push(f"new {called.kind}", [arguments])
