"""Time-lapses: which token is shown when, on one clock, and what is refused."""

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.reports import timelapse
from fastar_nodes.reports.record import Report
from fastar_nodes.reports.timelapse import FPS, time_lapse

STEPS = np.array([[[0, 1], [3, -1]]], np.int32)
RED = (200, 0, 0)

# Images are enlarged smoothly: the pixels at the edges of tokens are of a mixed colour.
EDGES = 0.05


def a_run(seconds: float = 1.0, steps: np.ndarray = STEPS, side: int = 64) -> tuple[np.ndarray, str, Report]:
    """A red image, its label and its report."""
    report = Report("mar", "m", {}, 1, len(steps), "cpu", seconds=seconds, maps={"step": steps})
    return np.full((len(steps), side, side, 3), RED, np.uint8), "run", report


def lapse(*runs, duration: float = 1.0, result: str = "") -> np.ndarray:
    return time_lapse(*(list(parts) for parts in zip(*runs, strict=True)), duration=duration, result=result)


def red(frames: np.ndarray) -> np.ndarray:
    """Share of red pixels by frame, of those that are red in the last one."""
    area = (frames == RED).all(-1).reshape(len(frames), -1).sum(1)
    return area / area[-1]


def shown(run, clock: float) -> list[bool]:
    """Which of the four tokens of a run are shown."""
    picture = timelapse._Run(*run).at(clock)[0]
    return [picture[y, x].tolist() == list(RED) for y in (0, -1) for x in (0, -1)]


def test_a_token_is_shown_when_its_step_has_ended_and_a_given_one_from_the_start():
    run = a_run(seconds=8.0)  # four steps of two seconds
    times = {0: "0001", 1.99: "0001", 2: "1001", 4: "1101", 7.9: "1101", 8: "1111", 99: "1111"}
    for clock, expected in times.items():
        assert shown(run, clock) == [c == "1" for c in expected], clock


def test_the_last_seconds_show_the_finished_pictures():
    frames = lapse(a_run(0.3), duration=0.5)
    assert frames.dtype == np.uint8 and len(frames) == FPS // 2 + 1 + 2 * FPS
    assert (frames[FPS // 2 :] == frames[-1]).all() and (frames[FPS // 2 - 1] != frames[-1]).any()
    assert red(frames)[0] == pytest.approx(1 / 4, abs=EDGES) and (np.diff(red(frames)) >= 0).all()


@pytest.mark.slow  # test_figures.py has two runs on one clock
def test_runs_share_one_clock():
    """A run of half the seconds is complete in the middle; the grid has an image as large for each."""
    every = np.arange(4, dtype=np.int32).reshape(1, 2, 2)
    slow, fast = a_run(4.0, every), a_run(2.0, every)
    shares = red(lapse(slow, fast, duration=2.0))
    assert shares[FPS] == pytest.approx((1 / 2 + 1) / 2, abs=EDGES) and shares[FPS - 1] < shares[FPS]
    assert shares[FPS // 2] == pytest.approx((1 / 4 + 1 / 2) / 2, abs=EDGES) and shares[2 * FPS] == 1


def test_passes_and_seconds_are_those_so_far_and_a_finished_run_gets_a_badge(monkeypatch):
    seen = []

    class Spy(timelapse.Canvas):
        def copy(self):
            seen.append([])
            copy = Spy(*self.image.size)
            copy.image.paste(self.image)
            return copy

        def write(self, x, y, text, *more, **about):
            if seen:
                seen[-1].append(text)

    monkeypatch.setattr(timelapse, "Canvas", Spy)
    slow, fast = a_run(3.0), a_run(1.5)
    slow[2].counts["transformer_passes"], fast[2].counts["transformer_passes"] = 256, 64
    fast[2].first_run = True
    lapse(slow, fast, result="64 passes instead of 256")

    assert len(seen) == FPS + 1
    assert seen[0] == ["0 of 256 passes", "0.00 s", "0 of 64 passes", "0.00 s"]
    assert seen[FPS // 3] == ["85 of 256 passes", "1.00 s", "42 of 64 passes", "1.00 s"]
    assert seen[FPS // 2] == ["128 of 256 passes", "1.50 s", "finished", "64 passes", "1.50 s (first run)"]
    last = ["finished", "256 passes", "3.00 s", "finished", "64 passes", "1.50 s (first run)"]
    assert seen[-1] == [*last, "64 passes instead of 256"]


@pytest.mark.parametrize("images, side", [(1, 1024), (5, 1024), (5, 64)])
@pytest.mark.fast_cases("5-1024")
def test_pictures_and_batches_of_all_sizes_are_equally_large(images, side):
    frames = lapse(a_run(steps=STEPS.repeat(images, axis=0), side=side))
    assert 490 <= min(frames.shape[1:3]) and max(frames.shape[1:3]) <= 680 and red(frames)[0] < 0.3


@pytest.mark.parametrize("broken", [{"maps": {}}, {"seconds": 0.0}, {"seconds": float("nan")}, None])
def test_a_run_without_steps_or_seconds_is_refused(broken):
    pictures, label, report = a_run()
    for name, value in (broken or {}).items():
        setattr(report, name, value)
    with pytest.raises(UserError, match="^report: .*'run'"):
        lapse((pictures, label, report if broken else None))
