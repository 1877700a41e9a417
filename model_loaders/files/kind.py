"""What is said of a kind of weight files."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of weight files: how a file of it is recognised, chosen and converted to a dtype."""

    noun: str  # what messages call a file of the kind
    field: str  # the input that selects its files; messages begin with it
    # Beginnings of parameter names that a file of the kind has, each at least once (of a tuple any); () if it is not
    # identified.
    prefixes: tuple[str | tuple[str, ...], ...] = ()
    general: bool = False  # whether files of other kinds have these names, too: they are tried first
    folder: bool = False  # whether it may be a model folder
    loader: str = ""  # the node that loads it, if it has one of its own
    decoder: str = ""  # catalogue id of its official decoder
    # 16-bit dtypes that the authors' code offers, and in which tests/model_loaders/test_precision.py compares the
    # kind with fp32; "auto" takes the first one that a GPU computes at full speed, and never another. See also
    # networks/precision.py.
    checked: tuple[str, ...] = ()
    overflows: bool = False  # whether it overflows in fp16
    blocks: bool = False  # whether it has blocks whose weights may be quantised
    four_bits: bool = False  # whether its images were measured with weights of 4 bits
    untested: bool = False  # whether it was trained in bf16 and never tried in fp16
    remedy: str = ""  # what to choose in place of a file of the kind where another one is expected
