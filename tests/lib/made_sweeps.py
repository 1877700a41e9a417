"""Folders of sweeps with images made here: a plain sampler, an accelerator at three thresholds,
and a lossless one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastar_nodes.lab.sweeps.records import Cell, Shard, shard_key
from fastar_nodes.lab.sweeps.store import Store

SIDE, BATCH = 16, 8


def pictures(first: int, count: int, noise: float, seed: int = 0, side: int = SIDE) -> np.ndarray:
    """Smooth images, the same for one index, with noise that grows with ``noise``: uint8 [count, side, side, 3]."""
    out = []
    for i in range(first, first + count):
        own = np.random.default_rng([7, i])
        base = own.uniform(40, 200, (1, 1, 3)) + 40 * np.sin(np.arange(side) / own.uniform(2, 6))[:, None, None]
        out.append(base + noise * np.random.default_rng([8, i, seed]).normal(size=(side, side, 3)))
    return np.clip(np.stack(out), 0, 255).astype(np.uint8)


def cell(name: str, sampler: str, asked: Mapping[str, Any], images: int, side: int = SIDE, **about: Any) -> Cell:
    """A cell of the sweep."""
    values: dict[str, Any] = {
        "id": name,
        "key": f"key of {name}",
        "title": name,
        "model": "demo",
        "model_digest": "0" * 32,
        "family": "mar",
        "sampler": sampler,
        "asked": dict(asked),
        "settings": {"steps": 8, **asked},
        "seed": 7,
        "images": images,
        "size": (side, side),
        "baseline": "mar-0" if sampler != "mar" else None,
        "lossless": "",
    }
    return Cell(**(values | about))


def cells(images: int, side: int = SIDE) -> dict[Cell | str, tuple[Cell, float, float]]:
    """By id the cell, the noise of its images and its sequential calls of a shard."""
    word = "same distribution"
    made = [
        (cell("mar-0", "mar", {}, images, side), 0.0, 1000),
        (cell("fasthybrid-0.8", "fasthybrid", {"threshold": 0.8}, images, side), 12.0, 250),
        (cell("fasthybrid-0.9", "fasthybrid", {"threshold": 0.9}, images, side), 5.0, 400),
        (cell("fasthybrid-1.0", "fasthybrid", {"threshold": 1.0}, images, side), 0.0, 900),
        (cell("cspd-0", "cspd", {}, images, side, lossless=word), 40.0, 600),
    ]
    return {c.id: (c, noise, calls) for c, noise, calls in made}


def write(folder: Path, images: int = 48, finished: int | None = None, timed: bool = True, side: int = SIDE) -> Store:
    """Write a sweep.

    Args:
        finished: images of the last cell that are finished; None for all.
        timed: whether seconds are recorded: a thousandth of the calls for an image.
    """
    store, made = Store(folder), cells(images, side)
    store.write_manifest({"batch": BATCH}, [c for c, _, _ in made.values()])
    for name, (c, noise, calls) in made.items():
        for first, count in store.ranges(c):
            if finished is not None and name == "cspd-0" and first + count > finished:
                break
            record = Shard(shard_key(c.key, first, count), first, count, "", counts={"head_calls": calls})
            labels = np.arange(first, first + count, dtype=np.int64) % 10
            drawn = pictures(first, count, noise, side=side)
            times = {"seconds": calls / 1000 * count, "worker": "one"} if timed else {}
            store.write_shard(c, record, drawn, labels, times)
    return store


# A cell of five images, in shards of two.
SMALL = cell("mar-0000", "mar", {}, 5, title="MAR", size=(8, 6), settings={"cfg": 2.0}, seed=0)


def random_pictures(first: int, count: int) -> np.ndarray:
    return np.random.default_rng(first).integers(0, 256, (count, *SMALL.size, 3), dtype=np.uint8)


def draw(store: Store, first: int, count: int, labels: Sequence[Any] = range(5)) -> Shard:
    """Write a shard of the small cell."""
    counts = {"transformer_passes": 3, "head_rows": 4 * count, "accepted": count, "rejected": count}
    shard = Shard(shard_key(SMALL.key, first, count), first, count, "", counts=counts)
    own = np.array(labels[first : first + count])
    return store.write_shard(SMALL, shard, random_pictures(first, count), own, {"seconds": 1.0, "worker": "a"})


def filled(address: object, labels: Sequence[Any] = range(5)) -> Store:
    """A sweep of the small cell."""
    store = Store(address)
    store.write_manifest({"batch": 2}, [SMALL])
    for first, count in store.ranges(SMALL):
        draw(store, first, count, labels)
    return store
