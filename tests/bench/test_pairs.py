"""Pairs of shards and of images: figures of a sweep whose values are worked out by hand."""

import made_sweeps
import numpy as np
import pytest
from fastar_nodes.bench.curve import paired
from fastar_nodes.bench.measures import Means, evaluate, latest
from fastar_nodes.bench.records import Shard, shard_key
from fastar_nodes.bench.store import Store

SIDE = 16
LABELS = np.zeros(1, np.int64)


def store_of(folder, shards: dict[str, list[tuple[np.ndarray, dict]]]) -> Store:
    """A sweep of a plain sampler and an accelerator, one image a shard."""
    store = Store(folder)
    cells = {"mar-0": made_sweeps.cell("mar-0", "mar", {}, 4, SIDE)}
    cells["fast"] = made_sweeps.cell("fast", "fasthybrid", {}, 4, SIDE)
    store.write_manifest({"batch": 1}, list(cells.values()))
    for name, own in shards.items():
        for first, (image, times) in enumerate(own):
            record = Shard(shard_key(cells[name].key, first, 1), first, 1, "")
            store.write_shard(cells[name], record, image[None], LABELS, times)
    return store


def grey(level: int) -> np.ndarray:
    return np.full((SIDE, SIDE, 3), level, np.uint8)


def by(worker: str, seconds: float) -> dict:
    return {"worker": worker, "seconds": seconds}


def test_a_pair_is_of_one_worker(tmp_path):
    """Worker b draws ten times as slowly. Of four images, a drew both of the first two; the others are of two workers,
    and their ratios, 0.2 and 20, would say something of the machines.
    """
    plain = [(grey(9), by(*one)) for one in (("a", 2.0), ("a", 6.0), ("a", 2.0), ("b", 20.0))]
    fast = [(grey(9), by(*one)) for one in (("a", 1.0), ("a", 2.0), ("b", 10.0), ("a", 1.0))]
    found = paired(store_of(tmp_path, {"mar-0": plain, "fast": fast}))["fast"]
    assert (found.speedup, found.low, found.high, found.pairs) == (2.5, 2.25, 2.75, 2), "2 and 3"


def test_without_a_pair_the_medians_are_compared(tmp_path):
    plain = [(grey(9), by("a", seconds)) for seconds in (2.0, 4.0, 6.0)]
    fast = [(grey(9), by("b", seconds)) for seconds in (1.0, 2.0, 9.0)]
    found = paired(store_of(tmp_path, {"mar-0": plain, "fast": fast}))["fast"]
    assert (found.speedup, found.low, found.pairs) == (2.0, None, 0)


def test_one_equal_image_is_not_a_cell_of_equal_images(tmp_path):
    """Three of four images are equal, the last is 51 levels darker: a mean squared error of 51^2 / 4, and
    20 log10(255 / 51) + 10 log10(4) = 13.979 + 6.021 = 20.0 dB.
    """
    plain = [(grey(100), by("a", 1.0))] * 4
    fast = [*plain[:3], (grey(49), by("a", 1.0))]
    store = store_of(tmp_path, {"mar-0": plain, "fast": fast})
    found = latest(evaluate(store, ["psnr", "ssim", "identical"], Means(resamples=20)))

    assert (
        found["fast", ("psnr", "")].value == pytest.approx(20.0, abs=0.001) and found["fast", ("psnr", "")].word == ""
    )
    assert found["fast", ("ssim", "")].word == "" and 0 < found["fast", ("ssim", "")].value < 1
    assert found["fast", ("identical", "")].value == 0.75


def test_equal_images_are_called_identical(tmp_path):
    store = store_of(tmp_path, {name: [(grey(100), by("a", 1.0))] * 4 for name in ("mar-0", "fast")})
    found = latest(evaluate(store, ["psnr", "ssim", "identical"], Means(resamples=20)))
    assert found["fast", ("psnr", "")].word == "identical" and found["fast", ("ssim", "")].value == 1
