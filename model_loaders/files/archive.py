"""Check of a file of ``torch.save`` before torch reads it.

torch's weights-only reader executes no code from a file. :func:`check` refuses what would keep it busy for hours or
fill the memory: compressed records, and a pickle that is too long or takes too many steps. Storages need no check:
torch maps the file, so they cannot exceed it.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch

from .wrappers import listed

_MAX_PICKLE = 1 << 24  # bytes; a checkpoint of 1000 tensors has 150 kB
_MAX_STEPS = 400_000  # a tensor takes about 35

# Only a value that is named again can take longer than its bytes: a large dictionary is copied again and again, or the
# hash of tuples that each hold another one twice takes hours. torch.save often names texts, functions and pairs of
# numbers again, and seldom anything else, which therefore counts as many steps.
_REPEATED = 20_000
_NAMES = ("GLOBAL", "BINUNICODE", "SHORT_BINSTRING")
_NUMBERS = ("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_SMALL_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


# What helps with a file that holds more than weights.
TRUST = (
    "use a .safetensors version of the file; or, if you trust the file, load it with torch.load(weights_only=False) "
    "and save only its state_dict"
)


class Refused(Exception):
    """A file that torch must not read.

    The message completes the sentence "<file> ..."; ``remedy`` says what to do.
    """

    def __init__(self, found: str, remedy: str = "save only its weights with torch.save, or choose a different file"):
        super().__init__(found)
        self.remedy = remedy


def check(path: Path) -> None:
    """Check a zip file of ``torch.save``, in the context of the classes that it may hold beside torch's own.

    Raises:
        Refused: if it is no checkpoint, holds other classes or functions or a compressed record, or exceeds a limit.
        Exception: if it is damaged; zipfile, torch and pickletools raise many.
    """
    with path.open("rb") as file:
        records = zipfile.ZipFile(file).infolist()
        pickles = [record.file_size for record in records if record.filename.endswith("/data.pkl")]
        if not pickles:
            raise Refused(
                "is a zip archive that torch.save did not write",
                "unpack it, and choose the weight file inside, if there is one",
            )
        if any(record.compress_type for record in records):
            raise Refused("is a compressed archive, which torch never writes")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise Refused("is cut short: it has fewer bytes than its list of contents states")
        if max(pickles) > _MAX_PICKLE:
            raise Refused(f"has a description of its weights that is longer than the limit of {_MAX_PICKLE} bytes")

        file.seek(0)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if unknown:
            raise Refused(f"holds {listed(unknown, 2)}, which may run code, so nothing was loaded", TRUST)

        # The pickle as torch finds it: another reader could take another record for it.
        file.seek(0)
        reader: Any = torch._C.PyTorchFileReader(file)
        file.seek(reader.get_record_offset("data.pkl"))
        _expect_few_steps(file.read(_MAX_PICKLE))


def _expect_few_steps(pickled: bytes) -> None:
    """Raise :class:`Refused` for a pickle that takes too many steps."""
    cheap: set[Any] = set()  # what of the pickle's memo is a text, a function or a few numbers
    is_cheap = False  # the value that was pushed last
    in_a_row = 0  # how many numbers and texts were pushed one after the other
    steps = 0

    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        steps += 1

        if name in ("BINPUT", "LONG_BINPUT"):
            cheap.add(argument) if is_cheap else cheap.discard(argument)
            continue
        if name in ("BINGET", "LONG_BINGET") and argument not in cheap:
            steps += _REPEATED
        if steps > _MAX_STEPS:
            raise Refused(f"has a description of its weights with more than the limit of {_MAX_STEPS} steps")

        is_single = name in _NAMES or name in _NUMBERS
        is_cheap = is_single or in_a_row >= _SMALL_TUPLES.get(name, 4)
        in_a_row = min(in_a_row + 1, 3) if is_single else 0
