"""Check of a file of ``torch.save``, before torch reads it.

torch's weights-only reader executes no code, but it inflates compressed records, calls ``bytearray`` with any number,
and computes the hash of a tuple of tuples for hours. :func:`check` accepts what ``torch.save`` writes for weights and
plain values. Storages need no check: torch maps the file, so they cannot exceed it.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from .formats import INSTEAD, SUFFIXES

_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
_MAX_STEPS = 400_000  # a tensor takes about 35
_MAX_INSIDE = 1000  # values inside a tuple, counted as often as they are named; a tensor has about 10

_OPERATIONS = frozenset(
    """
    PROTO STOP MARK GLOBAL REDUCE NEWOBJ BUILD BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    """.split()
)
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_PUT = ("BINPUT", "LONG_BINPUT")
_GET = ("BINGET", "LONG_BINGET")

# Classes of dictionaries and of arguments, which torch.save makes empty and then fills.
_CONTAINERS = ("collections OrderedDict", "argparse Namespace", "easydict EasyDict")
_KNOWN = re.compile(
    r"torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch (Size|device|\w+Storage|(u?int|long|short|b?float|double|half|bool|complex)\d*|float8_\w+)"
    r"|torch\.storage UntypedStorage"
)
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


class Refused(Exception):
    """A file that is not read.

    The message completes the sentence "<file> ..."; ``remedy`` says what to do, if it is known.
    """

    def __init__(self, found: str, remedy: str = ""):
        super().__init__(found)
        self.remedy = remedy


def check(path: Path) -> None:
    """Check a zip file of ``torch.save``.

    Raises:
        Refused: if it holds something else than weights and plain values, or is over a limit.
        Exception: if it is damaged; zipfile, torch and pickletools raise many.
    """
    with path.open("rb") as file:
        records = zipfile.ZipFile(file).infolist()
        _expect_stored(records, path.stat().st_size)

        # The pickle as torch finds it: another reader could take another record for it.
        file.seek(0)
        reader: Any = torch._C.PyTorchFileReader(file)
        file.seek(reader.get_record_offset("data.pkl"))
        _scan(file.read(_MAX_PICKLE))


def _expect_stored(records: list[zipfile.ZipInfo], size: int) -> None:
    """Raise :class:`Refused` unless a zip file of ``size`` bytes is a checkpoint, and all of it is stored as it is."""
    names = [record.filename for record in records]
    if any(name.endswith("/constants.pkl") for name in names):
        raise Refused("is a TorchScript program", "save its state_dict with torch.save, or choose a .safetensors file")
    if names and all(name.endswith(".npy") for name in names):
        raise Refused("is an archive of NumPy arrays", "save them as tensors in a .safetensors file")

    if not any(name.endswith("/data.pkl") for name in names):
        inside = [name for name in names if name.lower().endswith(SUFFIXES)]
        if inside:
            raise Refused(f"is a zip archive that holds {inside[0][:80]}", "unpack it and choose the file inside")
        raise Refused("is a zip archive without a checkpoint", "choose another file")

    if any(record.compress_type for record in records):
        raise Refused("is a compressed archive, which torch never writes")
    if sum(record.file_size for record in records) > size:
        raise Refused("claims more bytes than it has")
    if any(record.file_size > _MAX_PICKLE for record in records if record.filename.endswith("/data.pkl")):
        raise Refused(f"describes its weights in more bytes than the limit of {_MAX_PICKLE}")


def _scan(pickled: bytes) -> None:
    """Raise :class:`Refused` for a pickle that ``torch.save`` does not write, or that is over a limit.

    Of each value on its stack it is known how many are inside: the sum for a tuple, whose hash takes as long, else 1,
    and 0 for the class of a container. None is a mark.
    """
    stack: list[int | None] = []
    memo: dict[Any, int | None] = {}

    for step, (operation, argument, _) in enumerate(pickletools.genops(pickled), 1):
        name = operation.name
        if step > _MAX_STEPS:
            raise Refused(f"describes its weights in more steps than the limit of {_MAX_STEPS}")
        _expect_known(name, str(argument))

        if name in _PUT:
            memo[argument] = stack[-1]
            continue
        if stack and stack[-1] == 0 and name != "EMPTY_TUPLE":
            raise Refused("copies a dictionary, which torch.save does not write")

        if name in _GET:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(None)
        elif name == "GLOBAL" and argument in _CONTAINERS:
            stack.append(0)
        else:
            taken = _pop(stack, operation)
            inside = 1 + sum(taken) if name in _TUPLES else 1
            if inside > _MAX_INSIDE:
                raise Refused(f"nests more values in a tuple than the limit of {_MAX_INSIDE}")
            stack += [inside] * len(operation.stack_after)


def _pop(stack: list[int | None], operation: pickletools.OpcodeInfo) -> list[Any]:
    """What an operation takes from a stack, as pickletools describes it."""
    before = operation.stack_before
    taken: list[Any] = []

    if pickletools.markobject in before:
        while (value := stack.pop()) is not None:
            taken.append(value)
        before = before[: before.index(pickletools.markobject)]

    for _ in before:
        taken.append(stack.pop())
    return taken


def _expect_known(name: str, argument: str) -> None:
    """Raise :class:`Refused` for an operation, or a function or class, that checkpoints do not use."""
    if name == "PROTO" and argument != "2":
        raise Refused(
            f"is pickled with protocol {argument}, and torch's safe reader reads protocol 2, the default of torch.save",
            "if you trust it, load it with torch.load(weights_only=False) and save its weights again with torch.save",
        )
    if name not in _OPERATIONS:
        raise Refused("uses a pickle operation that torch.save does not write")
    if name != "GLOBAL" or argument in _CONTAINERS or _KNOWN.fullmatch(argument):
        return

    for beginning, (found, remedy) in _OTHER_TENSORS.items():
        if argument.startswith(beginning):
            raise Refused(f"holds {found}", remedy)

    raise Refused(
        f"holds {argument.replace(' ', '.')}, which is neither a tensor nor a plain value and may be code, so nothing "
        "was loaded",
        "use a .safetensors version of it, or if you trust it, load it with torch.load(weights_only=False) "
        "and save its state_dict alone",
    )
