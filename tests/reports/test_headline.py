"""The result of a comparison in one line: what it gained and what became of the image."""

from dataclasses import replace

import pytest
from fastar_nodes.reports.quality import DISTRIBUTION, IDENTICAL, OTHER_IMAGE, OTHER_SEED, Quality
from fastar_nodes.reports.record import Report, repeated
from fastar_nodes.reports.summary import alone, fewer_calls, headline


def run(seconds=1.0, subject="", images=1, model="m", **counts) -> Report:
    out = Report("mar", model, {}, 7, images, "cpu", seconds, subject=subject)
    out.add(**counts)
    return out


def told(base: Report, other: Report, quality: Quality | None) -> str:
    return headline(["MAR", "other"], [base, other], 0, [None, quality])


LINES = {
    "fewer passes, on every machine": (
        run(1.0, transformer_passes=256),
        run(2.0, transformer_passes=57),
        Quality(word=IDENTICAL),
        "57 passes instead of 256, identical image",
    ),
    "as many passes, and fewer calls": (
        run(1.0, transformer_passes=32, head_calls=1536),
        run(0.7, transformer_passes=32, head_calls=744),
        Quality(36.9, 0.99),
        "744 diffusion calls instead of 1,536, nearly the same image",
    ),
    "another image in less than half of the seconds": (
        run(4.5, transformer_passes=32),
        run(1.0, "balloon", transformer_passes=12),
        Quality(word=OTHER_IMAGE),
        "About 4.5 times as fast, a different balloon",
    ),
    "a draft model's passes are not the large model's": (
        run(1.0, transformer_passes=32),
        run(1.0, "house", transformer_passes=39, draft_passes=27),
        Quality(15.5, 0.7),
        "12 passes of the large model instead of 32, a different house",
    ),
    "only the seconds": (
        run(1.6, transformer_passes=32),
        run(1.0, transformer_passes=32),
        Quality(25.0, 0.9),
        "About 1.6 times as fast, a similar image",
    ),
    "nothing": (
        run(1.0, transformer_passes=32),
        run(1.0, transformer_passes=32),
        Quality(word=IDENTICAL),
        "No gain, identical image",
    ),
    "lossless": (run(1.0), run(0.25), Quality(word=DISTRIBUTION), "About 4.0 times as fast, same distribution"),
    "images without figures": (run(4.0), run(1.0), None, "About 4.0 times as fast"),
    "another seed": (run(4.0), run(1.0), Quality(word=OTHER_SEED), ""),
}


def test_different_seeds_are_told_with_the_remedy():
    """Unless the runs differ in nothing else: they show what a seed changes."""
    other = replace(run(1.0), sampler="fasthybrid")
    assert told(run(4.0), other, Quality(word=OTHER_SEED)) == "Different seeds: give both samplers the same seed"


@pytest.mark.parametrize("name", LINES)
def test_the_result(name):
    base, other, quality, line = LINES[name]
    assert told(base, other, quality) == line


def test_repeats_in_turn_are_told_first():
    """Ratios 1.5, 2.5 and 1.25, and 0.8 of three slower ones. What may be either way is no speed-up."""
    base = repeated([run(seconds, transformer_passes=256) for seconds in (3.0, 5.0, 5.0)])
    fast = repeated([run(seconds, transformer_passes=57) for seconds in (2.0, 2.0, 4.0)])
    assert told(base, fast, Quality(word=IDENTICAL)) == "About 1.5 times as fast, identical image"
    slow = repeated([run(seconds, transformer_passes=256) for seconds in (3.75, 6.25, 6.25)])
    assert told(base, slow, Quality(word=IDENTICAL)) == "About 0.80 times as fast, identical image"
    mixed = repeated([run(seconds, transformer_passes=57) for seconds in (2.0, 6.0, 4.0)])
    assert told(base, mixed, Quality(word=IDENTICAL)) == "57 passes instead of 256, identical image"


def test_of_several_runs_the_largest_gain_is_told_with_its_label():
    runs = [run(head_calls=1536), run(head_calls=744), None, run(head_calls=300)]
    found = [None, Quality(36.9, 0.99), None, Quality(word=OTHER_IMAGE)]
    labels = ["MAR", "FastHybrid", "no report", "LazyMAR"]
    assert headline(labels, runs, 0, found) == "LazyMAR: 300 diffusion calls instead of 1,536, a different image"
    assert headline(labels[:1], runs[:1], 0, [None]) == ""
    assert headline(labels[:2], [None, runs[1]], 0, [None, None]) == "", "nothing is known of the baseline"


@pytest.mark.parametrize(
    ("psnr", "words"),
    [
        (60.0, "the same image within rounding"),
        (59.9, "nearly the same image"),
        (30.0, "nearly the same image"),
        (29.9, "a similar image"),
        (20.0, "a similar image"),
        (19.9, "a different cat"),
    ],
)
def test_closeness_in_words(psnr, words):
    base, other = run(head_calls=9), run(1.0, "cat", head_calls=3)
    assert told(base, other, Quality(psnr, 0.9)) == f"3 diffusion calls instead of 9, {words}"


def test_a_batch_alone_says_how_many_images_its_passes_drew():
    assert alone(run(images=20, transformer_passes=32)) == "20 images in 32 passes"
    assert alone(run(transformer_passes=32)) == alone(run(images=20)) == alone(None) == ""


def test_what_a_run_saves_on_every_machine_does_not_depend_on_seconds():
    plain = run(9.0, transformer_passes=32, head_calls=1536)
    gain = fewer_calls(run(1.0, transformer_passes=12, head_calls=173), plain)
    assert gain is not None and gain.text == "12 passes instead of 32"
    assert fewer_calls(run(1.0, transformer_passes=32, head_calls=1536), plain) is None
