"""Static check of files written by ``torch.save``, before torch reads them.

torch's weights-only unpickler executes no code, but a small file can make it allocate gigabytes or run for minutes:
compressed records, ``bytearray(n)``, nested tuples as dictionary keys, storages that claim more bytes than the file has.
:func:`check` simulates the pickle on a stack of types and sizes, so every such file is refused at the cost of reading its
pickle once. What torch would refuse anyway is left to torch, which names it.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

ZIP, LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_MAX_RECORDS = 20_000
_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
# Opcodes, weighted by what they allocate; a tensor takes about 35.
_MAX_WORK = 400_000
_MAX_DEPTH = 100  # nested tuples and open marks
_MAX_WEIGHT = 100_000  # elements of one tuple, counted as often as they occur in it

# Callables whose results are as large as their arguments. torch also calls bytearray, torch.Tensor and others, which allocate.
_CALLED = re.compile(
    r"(collections (OrderedDict|Counter)|(builtins|__builtin__) (set|complex)|argparse Namespace|easydict EasyDict"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter Parameter|torch (Size|device))"
)
_REBUILT = "torch._utils _rebuild_tensor"
_ITEM_SIZES = {
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    "ComplexDoubleStorage": 16,
}


class Refused(Exception):
    """A file over a limit; the message completes the sentence "<file> ..."."""


class HoldsCode(Refused):
    """A file that calls something else than constructors of tensors and plain values; the message is its name."""


class _Node:
    """A simulated value that is no plain atom.

    Attributes:
        kind: "tuple", "list", "dict", "set", "global", "storage" or "object".
        value: items of a tuple, "module name" of a global, elements of a storage, the callable that made an object.
        weight: elements, counted as often as they occur.
        depth: nested tuples.
    """

    __slots__ = ("kind", "value", "weight", "depth")

    def __init__(self, kind: str, value: Any = None, weight: int = 1, depth: int = 0):
        self.kind, self.value, self.weight, self.depth = kind, value, weight, depth


def check(path: Path) -> None:
    """Check a file of either format of ``torch.save``.

    Raises:
        Refused: it is over a limit, or its structure contradicts itself.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) == ZIP:
            records = _records(file, size)
            name = next((n for n in records if n == "data.pkl" or n.endswith("/data.pkl")), None)
            if name is None:
                return  # torch says what is missing
            begin, length = records[name]
            prefix = name.removesuffix("data.pkl") + "data/"
            storages = {n.removeprefix(prefix): span[1] for n, span in records.items() if n.startswith(prefix)}
            file.seek(begin)
            _Machine(_pickle(file, length), storages, size).run()
        else:
            file.seek(0)
            machine = _Machine(file.read(_MAX_PICKLE), None, size)
            for _ in range(5):  # magic number, protocol, system, objects, keys of the storages
                machine.run()


def _pickle(file: BinaryIO, length: int) -> bytes:
    if length > _MAX_PICKLE:
        raise Refused(f"describes its weights in {length} bytes, more than the limit of {_MAX_PICKLE}")
    return file.read(length)


# --------------------------------------------------------------------------------------------------- zip


def _records(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Records of a zip file: name to (offset of the content, length).

    The layout must be that of ``torch.save``, nothing before the first record or after the directory, so that Python's and
    torch's readers agree on every record.

    Raises:
        Refused: another layout, compressed or overlapping records.
    """
    damaged = Refused("is damaged or cut short: it has no directory of its records at the end")
    file.seek(max(0, size - 98))
    end = file.read()
    if len(end) < 22 or end[-22:-18] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise damaged
    count, length, offset = struct.unpack("<8xHHII2x", end[-22:])[1:]
    stop = size - 22
    if end[-42:-38] == b"PK\x06\x07" and end[-98:-94] == b"PK\x06\x06":  # zip64
        count, length, offset = struct.unpack("<24xQQQQ", end[-98:-42])[1:]
        stop = size - 98
    if offset + length != stop:
        raise damaged
    if count > _MAX_RECORDS or length > 512 * _MAX_RECORDS:
        raise Refused(f"has {count} records, more than the limit of {_MAX_RECORDS}")
    try:
        infos = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, IndexError) as e:
        raise damaged from e
    records: dict[str, tuple[int, int]] = {}
    before = 0
    for info in sorted(infos, key=lambda i: i.header_offset):
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise Refused("is a compressed archive, which torch never writes")
        file.seek(info.header_offset)
        header = file.read(30)
        if header[:4] != ZIP or len(header) < 30 or info.header_offset < before:
            raise Refused("is damaged: its records overlap or begin elsewhere than its directory states")
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        before = begin + info.file_size
        if before > offset or info.filename in records:
            raise Refused("is damaged: its records overlap or are longer than the file")
        records[info.filename] = (begin, info.file_size)
    return records


# --------------------------------------------------------------------------------------------------- pickle

# Opcodes with a fixed argument, as struct formats; None: pushed as they are.
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d", b"h": "<B", b"j": "<I", b"q": "<B", b"r": "<I"}
_CONSTANTS: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
    b")": lambda: _Node("tuple", ()),
    b"]": lambda: _Node("list"),
    b"}": lambda: _Node("dict"),
    b"\x8f": lambda: _Node("set"),
}


class _Machine:
    """Simulation of pickles, with the opcodes of torch's weights-only unpickler.

    Args:
        data: the pickles, possibly followed by other bytes.
        storages: of a zip file: the storages' names to lengths in bytes; None for the legacy format.
        budget: bytes that all storages of the legacy format may have together.
    """

    def __init__(self, data: bytes, storages: dict[str, int] | None, budget: int):
        self.data, self.at, self.storages, self.budget = data, 0, storages, budget
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.work, self.claimed = 0, 0
        self.seen: dict[object, int] = {}

    def run(self) -> None:
        """Simulate up to the end of the next pickle.

        Raises:
            Refused: it is over a limit, or ends early.
        """
        self.stack, self.marks, self.memo = [], [], {}
        try:
            while (code := self.take(1)) != b".":
                self.spend(1)
                self.step(code)
        except (IndexError, KeyError, struct.error) as e:
            raise Refused("is damaged or cut short within its description of the weights") from e

    def take(self, count: int) -> bytes:
        out = self.data[self.at : self.at + count]
        if len(out) < count:
            raise IndexError
        self.at += count
        return out

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 1000)
        if end < 0:
            raise IndexError
        out, self.at = self.data[self.at : end], end + 1
        return out.decode("utf-8", "replace")

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > _MAX_WORK:
            raise Refused(f"describes its weights in more steps than the limit of {_MAX_WORK}")

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError
        return self.stack.pop()

    def items(self) -> list[Any]:
        """Everything above the last mark."""
        mark = self.marks.pop()
        out = self.stack[mark:]
        del self.stack[mark:]
        return out

    def step(self, code: bytes) -> None:
        if code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code]())
        elif code in _NUMBERS:
            form = _NUMBERS[code]
            number = struct.unpack(form, self.take(struct.calcsize(form)))[0]
            if code in b"hj":
                self.stack.append(self.memo[number])
            elif code in b"qr":
                self.memo[number] = self.stack[-1]
            else:
                self.stack.append(number)
        elif code == b"X":
            self.stack.append(self.take(struct.unpack("<I", self.take(4))[0]))
        elif code in b"U\x8a":
            data = self.take(self.take(1)[0])
            self.stack.append(data if code == b"U" else int.from_bytes(data, "little", signed=True))
        elif code == b"(":
            self.marks.append(len(self.stack))
            if len(self.marks) > _MAX_DEPTH:
                raise Refused(f"describes its weights with more than {_MAX_DEPTH} nested values")
        elif code in b"t\x85\x86\x87":
            items = self.items() if code == b"t" else [self.pop() for _ in range(code[0] - 0x84)][::-1]
            self.stack.append(self.tuple(items))
        elif code in b"aesu":
            self.extend(code)
        elif code in b"R\x81b":
            self.call(code)
        elif code == b"c":
            self.stack.append(_Node("global", f"{self.line()} {self.line()}"))
        elif code == b"Q":
            self.stack.append(self.storage(self.pop()))
        elif code == b"\x80":
            self.take(1)
        else:
            raise Refused("uses a pickle operation that torch.save does not write")

    def tuple(self, items: list[Any]) -> _Node:
        node = _Node("tuple", tuple(items), 1 + sum(map(_weight, items)), 1 + max(map(_depth, items), default=0))
        if node.weight > _MAX_WEIGHT or node.depth > _MAX_DEPTH:
            raise Refused(f"describes its weights with more than {_MAX_DEPTH} nested values")
        return node

    def extend(self, code: bytes) -> None:
        """APPEND, APPENDS, SETITEM and SETITEMS; keys cost their weight, because they are hashed."""
        if code in b"as":
            items = [self.pop() for _ in range(1 + (code == b"s"))][::-1]
        else:
            items = self.items()
        if code in b"su":
            self.spend(sum(map(_weight, items[::2])))
        target = self.stack[-1]
        if isinstance(target, _Node):
            target.weight += sum(map(_weight, items))

    def call(self, code: bytes) -> None:
        """REDUCE, NEWOBJ and BUILD."""
        arguments = self.pop()
        target = self.stack[-1]
        self.spend(4 + _weight(arguments))
        if code == b"b":
            if not isinstance(target, _Node) or str(target.value).startswith("torch."):
                raise Refused("sets the state of a tensor, which torch.save does not write")
            target.weight += _weight(arguments)
            return
        called = _global(target)
        items = arguments.value if isinstance(arguments, _Node) and arguments.kind == "tuple" else ()
        if called == "torch._tensor _rebuild_from_type_v2" and items:  # calls its first argument
            called = _global(items[0])
            items = items[2].value if len(items) > 2 and isinstance(items[2], _Node) else ()
        if called is None or not _CALLED.fullmatch(called):
            raise HoldsCode((called or "a call").replace(" ", "."))
        if called.startswith(_REBUILT):
            self.tensor(items)
        self.stack[-1] = _Node("object", called, _weight(arguments))

    def tensor(self, items: Any) -> None:
        """Check that a tensor (storage, offset, shape, strides, ...) lies within its storage; torch would enlarge that."""
        try:
            storage, offset, shape, strides = items[:4]
            extents = list(zip(shape.value, strides.value, strict=True))
            last = offset + sum((n - 1) * stride for n, stride in extents)
            fits = min((offset, *shape.value, *strides.value)) >= 0 and last < storage.value or 0 in shape.value
        except (AttributeError, TypeError, ValueError) as e:
            raise Refused("is damaged: a tensor in it is misshaped") from e
        if storage.kind != "storage" or not fits:
            raise Refused("claims more weights than it holds bytes")

    def storage(self, pid: Any) -> _Node:
        """BINPERSID: the storage (b"storage", type, key, device, elements, ...)."""
        parts: Any = pid.value if isinstance(pid, _Node) and pid.kind == "tuple" else ()
        if len(parts) >= 5 and isinstance(parts[4], int):
            kind = (_global(parts[1]) or "").rsplit(" ")[-1]
            size = parts[4] * _ITEM_SIZES.get(kind, 1)
            key = parts[2].decode("utf-8", "replace") if isinstance(parts[2], bytes) else parts[2]
            if self.storages is not None:
                limit = self.storages.get(str(key), 0)
            elif key in self.seen:  # torch takes the first
                limit = self.seen[key]
            else:
                limit = self.budget - self.claimed
                self.claimed += max(size, 0)
                self.seen[key] = size
            if not 0 <= size <= limit:
                raise Refused("claims more weights than it holds bytes")
            return _Node("storage", parts[4])
        raise Refused("is damaged: a storage in it is misdescribed")


def _global(value: Any) -> str | None:
    """The "module name" of a global, else None."""
    return value.value if isinstance(value, _Node) and value.kind == "global" else None


def _weight(value: Any) -> int:
    return value.weight if isinstance(value, _Node) else 1


def _depth(value: Any) -> int:
    return value.depth if isinstance(value, _Node) else 0
