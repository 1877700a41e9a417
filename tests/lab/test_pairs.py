"""Pairs of shards and of images: figures of a sweep whose values are worked out by hand."""

from dataclasses import asdict

import made_sweeps
import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps import work
from fastar_nodes.lab.sweeps.curve import curve
from fastar_nodes.lab.sweeps.measures import Means, evaluate, latest
from fastar_nodes.lab.sweeps.records import Shard, shard_key
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.times import paired
from fastar_nodes.runs.baseline import ComparedRun
from fastar_nodes.runs.registry import SAMPLERS

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


def test_a_batch_that_was_cut_short_is_not_timed(tmp_path):
    """Of 5 images in shards of 4 the last one was drawn alone, in 3 s; the others took 1 s each."""
    store = Store(tmp_path)
    plain = made_sweeps.cell("mar-0", "mar", {}, 5, SIDE)
    store.write_manifest({"batch": 4}, [plain])
    for first, count, seconds in ((0, 4, 4.0), (4, 1, 3.0)):
        record = Shard(shard_key(plain.key, first, count), first, count, "")
        images = np.stack([grey(9)] * count)
        store.write_shard(plain, record, images, np.zeros(count, np.int64), by("a", seconds))
    assert paired(store)["mar-0"].seconds == 1.0


def test_one_equal_image_is_not_a_cell_of_equal_images(tmp_path):
    """Three of four images are equal, the last is 51 levels darker: a mean squared error of 51^2 / 4, and
    20 log10(255 / 51) + 10 log10(4) = 13.979 + 6.021 = 20.0 dB.
    """
    plain = [(grey(100), by("a", 1.0))] * 4
    fast = [*plain[:3], (grey(49), by("a", 1.0))]
    store = store_of(tmp_path, {"mar-0": plain, "fast": fast})
    found = latest(evaluate(store, ["psnr", "ssim", "identical"], Means(resamples=20)))

    assert found["fast", "psnr"].value == pytest.approx(20.0, abs=0.001) and found["fast", "psnr"].word == ""
    assert found["fast", "ssim"].word == "" and 0 < found["fast", "ssim"].value < 1
    assert found["fast", "identical"].value == 0.75


def planned(*cells: tuple[str, str, dict]) -> dict[str, str | None]:
    """The baseline of each cell, from its name, its sampler and settings. A name with a colon is a variant."""
    made = []
    for name, sampler, own in cells:
        settings = asdict(SAMPLERS[sampler].settings()) | own
        made.append(made_sweeps.cell(name, sampler, {}, 4, SIDE, settings=settings, baseline=None))
    found = work._with_baselines(made, [cell.key for cell in made if ":" in cell.id])
    return {cell.id: cell.baseline for cell in found}


def test_the_baseline_is_the_one_with_most_settings_in_common_and_serial_before_parallel():
    def run(sampler, settings):
        return ComparedRun("a model", sampler, settings, 8)

    few, many, own = run("mar", {"steps": 8}), run("mar", {"steps": 64}), run("fasthybrid", {"steps": 8})
    assert work.most_alike([few, many, own]) == [0, 1, 0]

    serial, parallel = run("llamagen", {}), run("llamagen", {"parallel": 8})
    both = run("zipar", {"window": 2, "parallel": 8})
    assert work.most_alike([serial, parallel, both]) == [0, 0, 0]
    assert work.most_alike([parallel, both]) == [0, 0], "where there is no serial one"


def test_controls_are_compared_with_the_plain_cell():
    """MAR of fewer steps is what a method of fewer steps has to beat; it needs figures of its own."""
    mar, control = ("mar", "mar", {"steps": 64}), ("mar:16", "mar", {"steps": 16})
    same, fewer = ("fast", "fasthybrid", {"steps": 64}), ("lazymar:16", "lazymar", {"steps": 16})
    assert planned(control, same, mar) == {"mar:16": "mar", "fast": "mar", "mar": None}
    assert planned(mar, control, fewer) == {"mar": None, "mar:16": "mar", "lazymar:16": "mar:16"}
    assert planned(control, fewer) == {"mar:16": None, "lazymar:16": "mar:16"}, "the only plain cell"
    assert planned(mar, control) == {"mar": None, "mar:16": "mar"}
    parallel = ("llamagen:parallel", "llamagen", {"parallel": 16})
    assert planned(("llamagen", "llamagen", {}), parallel)["llamagen:parallel"] == "llamagen"


def test_a_grid_of_plain_cells_has_a_baseline_for_each_accelerator():
    """A list of cfg for all samplers: each is compared with the plain cell of its own cfg."""
    both = [(f"{sampler} {cfg}", sampler, {"cfg": cfg}) for cfg in (2.0, 3.0) for sampler in ("mar", "fasthybrid")]
    wanted = {"mar 2.0": None, "fasthybrid 2.0": "mar 2.0", "mar 3.0": None, "fasthybrid 3.0": "mar 3.0"}
    assert planned(*both) == wanted
    few = ("mar few", "mar", {"cfg": 3.0, "steps": 8})
    assert planned(*both, few) == wanted | {"mar few": "mar 3.0"}, "most in common, and no accelerator's"
    alone = [(f"mar {cfg}", "mar", {"cfg": cfg}) for cfg in (2.0, 3.0)]
    assert planned(*alone) == {"mar 2.0": None, "mar 3.0": "mar 2.0"}
    assert planned(("a", "fasthybrid", {}), ("b", "fasthybrid", {"threshold": 0.5})) == {"a": None, "b": None}


def write(folder, *cells) -> Store:
    """A sweep of these cells, with two grey images of each, in shards of one that took a second."""
    store = Store(folder)
    store.write_manifest({"batch": 1}, cells)
    for k, cell in enumerate(cells):
        for first in range(cell.images):
            record = Shard(shard_key(cell.key, first, 1), first, 1, "", counts={"transformer_passes": 8})
            store.write_shard(cell, record, grey(9 + k)[None], LABELS, by("a", 1.0 + k))
    return store


def test_a_cell_that_none_is_compared_with_has_no_speed_up(tmp_path):
    """Neither a speed-up of 1.00 nor images that are identical to its own."""
    lonely = made_sweeps.cell("par", "par", {}, 2, SIDE, baseline=None)
    plain = made_sweeps.cell("mar-0", "mar", {}, 2, SIDE)
    fast = made_sweeps.cell("fast", "fasthybrid", {}, 2, SIDE)
    store = write(tmp_path / "a", lonely, plain, fast)
    assert {name: time.speedup for name, time in paired(store).items()} == {"par": None, "mar-0": 1.0, "fast": 2 / 3}
    assert paired(store, lonely)["par"].speedup == 1.0 and paired(store, lonely)["fast"].speedup == 1 / 3
    assert paired(write(tmp_path / "b", lonely), lonely)["par"].speedup is None

    evaluate(store, ["psnr"], Means(resamples=10))
    points = {point.cell.id: point for point in curve(store, "psnr").points}
    assert points["par"].result is None and points["mar-0"].result.word == "identical" and points["fast"].result.value


def test_a_cell_that_cannot_be_measured_does_not_stop_the_others(tmp_path):
    """One has one image, one nothing to be compared with, and the file of one is damaged."""
    plain, fast = (made_sweeps.cell(name, sampler, {}, 2, SIDE) for name, sampler in (("mar-0", "mar"), ("f", "gtr")))
    few = made_sweeps.cell("few", "fasthybrid", {}, 1, SIDE)
    lonely = made_sweeps.cell("lonely", "par", {}, 2, SIDE, baseline=None)
    damaged = made_sweeps.cell("damaged", "cspd", {}, 2, SIDE)
    store = write(tmp_path, few, lonely, damaged, plain, fast)
    (tmp_path / "cells" / "damaged" / "shard-0000000-0000000.npz").write_bytes(b"no images")

    lines: list[str] = []
    failed: list[str] = []
    found = evaluate(store, ["psnr", "identical"], Means(resamples=10), lines.append, failed=failed)
    assert {result.cell for result in found} == {"f"} and len(found) == 2
    told = "\n".join(lines)
    assert "left out: psnr of few, identical of few: only 1 image, but the measure needs 2 or more" in told
    assert "left out: psnr of lonely, identical of lonely: the sweep has no cell of the unaccelerated sampler" in told
    assert len(failed) == 1 and failed[0].startswith("damaged is not measured: ") and failed[0] in told
    assert "of mar-0" not in told, "the plain sampler is not compared with itself"
    with pytest.raises(UserError, match="damaged"):
        evaluate(store, ["psnr"], Means(resamples=10))

    alone = write(tmp_path / "alone", few, plain)
    with pytest.raises(UserError, match="^measures: nothing can be measured: only 1 image"):
        evaluate(alone, ["psnr"], Means(resamples=10))
