"""The scheduler of Ray on a simulated cluster of preemptible machines."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.scale.store import Store
from fastar_nodes.tools import scheduling
from fastar_nodes.tools.scheduling import Conditions, simulate

sys.path.append(str(Path(__file__).parents[1] / "scale"))
import made_sweeps  # noqa: E402

pytestmark = pytest.mark.slow

CELLS = [made_sweeps.cell(f"c{k}", "fasthybrid", {"threshold": k}, 48, model=f"m{k // 10}") for k in range(20)]
IMAGES, BATCH = 50_000, 50


def seconds(mean: float) -> dict[str, list[float]]:
    """Recorded seconds per image of every cell: cells differ by a factor of four, shards of a cell by tens of per cent."""
    chooser = random.Random(3)
    return {
        c.id: [mean * (0.5 + 1.5 * k / 20) * chooser.lognormvariate(0, 0.3) for _ in range(40)]
        for k, c in enumerate(CELLS)
    }


def run(mean: float = 0.3, images: int = IMAGES, **about) -> scheduling.Outcome:
    return simulate(CELLS, seconds(mean), images, BATCH, Conditions(**about))


def test_64_workers_with_5_per_cent_preempted_an_hour():
    """Issue: utilisation of 95 % or more, and no repeated work beyond the shards in flight."""
    found = run()
    print("\n".join(found.lines()))
    assert found.finished == 20 * IMAGES / BATCH and found.twice == 0
    assert found.preemptions >= 3 and found.utilisation >= 0.95
    assert found.begun - found.finished == found.cut_off <= found.preemptions


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_drawn_twice_when_most_machines_are_preempted(seed):
    found = run(images=10_000, workers=16, preempted=0.9, begin=20.0, away=60.0, seed=seed)
    assert found.preemptions > 30, "they are"
    assert found.finished == 20 * 10_000 / BATCH and found.twice == 0
    assert 20 < found.begun - found.finished == found.cut_off <= found.preemptions
    assert found.useful + found.lost <= found.existed


def test_without_preemption_only_the_beginning_and_the_end_are_lost():
    found = run(images=5_000, workers=8, preempted=0.0, begin=30.0)
    assert (found.preemptions, found.cut_off, found.lost) == (0, 0, 0) and found.begun == found.finished
    assert found.existed == pytest.approx(8 * found.seconds)
    longest = max(max(times) for times in seconds(0.3).values()) * BATCH
    assert 8 * 30.0 <= found.existed - found.useful <= 8 * (30.0 + longest)


def test_one_worker_draws_everything_in_the_sum_of_its_shards():
    found = run(images=500, workers=1, preempted=0.0, begin=0.0)
    assert found.seconds == pytest.approx(found.useful)


def test_long_beginnings_lower_the_utilisation():
    few = {"images": 5_000, "workers": 16}
    assert run(begin=1200.0, **few).utilisation < 0.9 < run(begin=10.0, **few).utilisation


def test_the_command_takes_recorded_times(tmp_path, capsys):
    made_sweeps.write(tmp_path)
    assert scheduling.main([str(tmp_path), "--images", "4000", "--workers", "4", "--begin", "1"]) == 0
    assert "2500 shards" in capsys.readouterr().out
    store = Store(tmp_path)
    assert scheduling.recorded(store)["mar-0"] == [1 / 8] * 6
    assert scheduling.main([str(tmp_path / "none")]) == 2 and "holds no sweep" in capsys.readouterr().err
    empty = made_sweeps.write(tmp_path / "part", finished=0)
    with pytest.raises(UserError, match="cspd-0 has no finished shard"):
        scheduling.recorded(empty)
