"""Number of blocks of a network, from parameter names of an untrusted file."""

from __future__ import annotations

from collections.abc import Iterable

# Building a network takes time per block. The deepest official one has 48 blocks; autoencoders have 5 levels of 2 blocks.
MOST_BLOCKS, MOST_LEVELS = 512, 16


def depth(names: Iterable[str], prefix: str, most: int = MOST_BLOCKS) -> int:
    """Count the blocks ``<prefix>0.``, ``<prefix>1.``, ...; 0 if there are none.

    Raises:
        ValueError: the blocks are not numbered from 0 without gaps, or there are more than ``most``.
    """
    found = {name[len(prefix) :].split(".", 1)[0] for name in names if name.startswith(prefix)}
    if len(found) > most:
        raise ValueError(f"it has {len(found)} blocks named {prefix}*, more than the limit of {most}")
    if found != {str(i) for i in range(len(found))}:
        raise ValueError(f"its blocks {prefix}* are not numbered 0 to {len(found) - 1}")
    return len(found)
