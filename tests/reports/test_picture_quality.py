"""PSNR, SSIM and differences: against formulas written plainly, and the words that take their place."""

import json
import math

import numpy as np
import pytest
from fastar_nodes.reports import quality as q
from fastar_nodes.reports.grid import compare_grid
from fastar_nodes.reports.record import Report, to_json, to_table
from fastar_nodes.runs.baseline import qualities


def noise(seed, n=1, side=24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def report(sampler="mar", seed=7, model="tiny", conditions=("cat",), edits=(), **settings) -> Report:
    return Report(sampler, model, settings, seed, 1, "cpu", 2.0, conditions=conditions, edits=edits)


def plain_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Equation 13 of Wang et al. 2004 for each window of each channel, one window at a time."""
    at = np.arange(11) - 5
    window = np.exp(-(at[:, None] ** 2 + at[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2, found = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for channel in range(3):
        for y in range(a.shape[0] - 10):
            for x in range(a.shape[1] - 10):
                p, r = (z[y : y + 11, x : x + 11, channel].astype(float) for z in (a, b))
                mp, mr = (window * p).sum(), (window * r).sum()
                vp, vr = (window * (p - mp) ** 2).sum(), (window * (r - mr) ** 2).sum()
                cov = (window * (p - mp) * (r - mr)).sum()
                found.append((2 * mp * mr + c1) * (2 * cov + c2) / ((mp**2 + mr**2 + c1) * (vp + vr + c2)))
    return float(np.mean(found))


def test_ssim_is_the_published_formula():
    first, other = noise(0, 2), noise(1, 2)
    near = np.clip(first.astype(int) + other // 8 - 16, 0, 255).astype(np.uint8)
    for b in (other, near):
        expected = np.mean([plain_ssim(x, y) for x, y in zip(first, b, strict=True)])
        assert q.ssim(first, b) == pytest.approx(expected, abs=1e-9)
    assert q.ssim(first, first) == pytest.approx(1)
    assert q.ssim(first, near) > q.ssim(first, other) + 0.5


def test_psnr_of_a_known_error():
    a = np.full((2, 4, 4, 3), 100, np.uint8)
    assert q.psnr(a, a + np.uint8(10)) == pytest.approx(10 * math.log10(255**2 / 100))
    half = a.copy()
    half[0] += 10  # the error is averaged over the batch before the logarithm
    assert q.psnr(half, a) == pytest.approx(10 * math.log10(255**2 / 50))
    assert q.psnr(a, a) == math.inf


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (0, 63, 47, 2), (2, 63, 0, 1), (2, 30, 47, 0)], ids=str)
def test_one_changed_pixel_counts_wherever_it_is(at):
    """Every image, row, column and channel: 3 images of 64 x 48 pixels, one value of which differs by 60."""
    a = np.full((3, 64, 48, 3), 100, np.uint8)
    b = a.copy()
    b[at] += 60
    assert q.psnr(a, b) == pytest.approx(10 * math.log10(255**2 / (60**2 / a.size)))
    assert q.ssim(a, b) < 1 - 1e-10 and not q.measure(a, b).identical
    assert np.argwhere(q.difference(a, b)).tolist() == [list(at)]


def test_pictures_below_one_window_have_no_ssim():
    assert q.measure(noise(0, side=10), noise(1, side=10)).ssim is None
    assert q.measure(noise(0, side=11), noise(1, side=11)).ssim is not None


def test_a_difference_is_amplified_and_cut():
    a = np.array([[[[0, 10, 200]]]], np.uint8)
    b = np.array([[[[3, 0, 0]]]], np.uint8)
    assert q.difference(a, b).tolist() == [[[[12, 40, 255]]]] and (q.difference(a, b) == q.difference(b, a)).all()


CASES = {
    "figures": (report("zipar"), ""),
    q.DISTRIBUTION: (report("cspd", mode="lossless"), q.DISTRIBUTION),
    "speculation": (report("mar", speculation=8), q.DISTRIBUTION),
    "published": (report("cspd", mode="published"), ""),
    q.OTHER_SEED: (report("zipar", seed=8), q.OTHER_SEED),
    q.OTHER_MODEL: (report("zipar", model="large"), q.OTHER_MODEL),
    "drafted": (report("cspd", mode="published", model="tiny, drafted by small"), ""),
    "no report": (None, ""),
    # Which image is meant: a small draft enlarged, the order of a checkerboard.
    q.OTHER_IMAGE: (report("mulosd", tau=0.3), q.OTHER_IMAGE),
    "a draft that is redrawn in order": (report("mulosd", tau=1.01, resample_window=0), ""),
    "checkerboard": (report("gtr"), q.OTHER_IMAGE),
    "the plain order": (report("gtr", reconstruction_steps=0), ""),
    "approximation": (report("lazymar", refresh_period=9), ""),
    "annealed diffusion steps": (report("mar", diffusion_steps_end=10), ""),
}
# Settings of two runs, by which they are meant to draw one image or not.
SETTINGS = [
    ("mar", {"steps": 32}, "lazymar", {"steps": 12}, q.OTHER_IMAGE),
    ("mar", {"steps": 32}, "lazymar", {"steps": 32}, ""),
    ("mar", {"order": "random"}, "mar", {"order": "halton"}, q.OTHER_IMAGE),
    ("mar", {"cfg": 2.0}, "fasthybrid", {"cfg": 3.0}, q.OTHER_IMAGE),
    ("mar", {"t_max": 999}, "fasthybrid", {"t_max": 950}, q.OTHER_IMAGE),
    ("mar", {"t_max": None}, "fasthybrid", {"t_max": 950}, ""),  # None: the model's own, here 950
    ("bitdance", {"diffusion_steps": 50}, "bitdance", {"diffusion_steps": 25}, q.OTHER_IMAGE),
    ("nextstep", {"diffusion_steps": 28}, "nextstep", {"diffusion_steps": 20}, q.OTHER_IMAGE),
    ("nextstep", {"solver": "em0"}, "nextstep", {"solver": "sde"}, q.OTHER_IMAGE),
    ("nextstep", {"cfg_img": 1.0}, "nextstep", {"cfg_img": 2.0}, q.OTHER_IMAGE),
    ("nextstep", {"time_shift": 1.0}, "nextstep", {"time_shift": 3.2}, q.OTHER_IMAGE),
    ("nextstep", {"use_norm": False}, "nextstep", {"use_norm": True}, q.OTHER_IMAGE),
    ("nextstep", {"diffusion_steps_end": 28}, "nextstep", {"diffusion_steps_end": 10}, ""),  # DiSA approximates
    ("llamagen", {"temperature": 1.0, "parallel": 0}, "zipar", {"temperature": 1.0, "parallel": 16}, ""),
    ("llamagen", {"top_k": 0}, "llamagen", {"top_k": 10}, q.OTHER_IMAGE),
    ("mar", {"steps": 32}, "cspd", {"steps": 16, "mode": "lossless"}, q.OTHER_IMAGE),
]


@pytest.mark.parametrize(("sampler", "own", "other", "theirs", "word"), SETTINGS)
def test_figures_need_one_aim(sampler, own, other, theirs, word):
    """Fewer steps, another order or other guidance draw another image on purpose: its PSNR would say nothing."""
    runs = [report(sampler, **own), report(other, **theirs)]
    _, found = qualities([noise(0), noise(1)], runs, 0)
    assert found.word == word and (found.psnr is None) == bool(word)
    assert qualities([noise(0), noise(0)], runs, 0)[1].identical, "equal images are identical, whatever was meant"


def test_psnr_of_several_images_is_their_median_with_a_low_quantile():
    """Errors of 10, 20, 40 and 0 at every pixel: 28.13, 22.11, 16.09 dB, and 100 for an equal image.

    A tenth of the way from the first to the last of four values is 0.3 of the way to the second.
    """
    base = np.full((4, 16, 16, 3), 100, np.uint8)
    images = base.copy()
    for image, error in zip(images, (10, 20, 40, 0), strict=True):
        image += np.uint8(error)

    found = q.measure(images, base)
    each = [20 * math.log10(255 / error) for error in (40, 20, 10)]
    assert found.psnrs == pytest.approx([each[2], each[1], each[0], 100])
    assert found.psnr == pytest.approx((each[1] + each[2]) / 2)
    assert found.psnr_low == pytest.approx(each[0] + 0.3 * (each[1] - each[0]))
    assert q.closeness(found)[0] == "25.1 dB (low 17.9)"
    assert found.to_dict()["psnr_low"] == pytest.approx(found.psnr_low, abs=1e-4)
    assert "one image in ten has a PSNR below the value marked low" in q.explain_quality([found])

    alone = q.measure(images[:1], base[:1])
    assert alone.psnr_low is None and q.closeness(alone)[0] == "28.1 dB" and "psnr_low" not in alone.to_dict()
    assert "low" not in q.explain_quality([alone])


# Two runs, whether they have the same label and the same edit, to the word in place of the figures.
EDITS = {
    "the same edit": (report(edits=("right half",)), report("zipar", edits=("right half",)), ""),
    "another mask or start": (report(edits=("right half",)), report("zipar", edits=("left half",)), q.OTHER_EDIT),
    "an edit beside a whole image": (report(), report("zipar", edits=("right half",)), q.OTHER_EDIT),
    "a whole image beside an edit": (report(edits=("right half",)), report("zipar"), q.OTHER_EDIT),
    "an edit beside the image that it changed": (report(edits=("right half",)), None, q.OTHER_EDIT),
    "an edit to another label": (report(), report(conditions=("boat",), edits=("half",)), q.OTHER_CONDITION),
    "another label": (report(), report("zipar", conditions=("boat",)), q.OTHER_CONDITION),
    "an edit of another seed": (report(edits=("a",)), report(seed=8, edits=("a",)), q.OTHER_SEED),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_measured_against_the_same_edit_only(name):
    base, other, word = EDITS[name]
    _, found = qualities([noise(0), noise(1)], [base, other], 0)
    assert found.word == word and (found.psnr is None) == (found.ssim is None) == bool(word)
    assert word in q.explain_quality([found])


@pytest.mark.parametrize("name", CASES)
def test_where_numbers_mean_nothing_a_word_takes_their_place(name):
    other, word = CASES[name]
    first, second = noise(0), noise(1)
    base, found = qualities([first, second], [report(), other], 0)
    assert base is None and found.word == word and (found.psnr is None) == bool(word)
    # Equal images are identical, whatever the method.
    assert qualities([first, first], [report(), other], 0)[1].identical


def test_other_sizes_and_cells_without_a_baseline():
    found = qualities([noise(0), noise(1, 2), noise(2)], [report()] * 3, [0, 0, None])
    assert [f.word if f else None for f in found] == [None, q.OTHER_SIZE, None]


def test_tables_and_json_have_the_figures():
    runs = [report(), report("zipar"), report("cspd", mode="lossless"), report("lazymar")]
    pictures = [noise(0), noise(1), noise(2), noise(0)]
    found = qualities(pictures, runs, 0)
    table = to_table(runs, quality=found)
    assert "PSNR" in table and f"{found[1].psnr:.1f} dB" in table and f"{found[1].ssim:.3f}" in table
    assert q.DISTRIBUTION in table.splitlines()[4] and q.IDENTICAL in table.splitlines()[5]
    assert "PSNR" not in to_table(runs)
    first, second, third, last = json.loads(to_json(runs, quality=found))["runs"]
    assert "quality" not in first and last["quality"] == {"identical": True, "ssim": 1.0, "word": q.IDENTICAL}
    assert second["quality"]["psnr"] == pytest.approx(found[1].psnr, abs=1e-4) and "psnr" not in third["quality"]
    explained = q.explain_quality(found)
    assert all(word in explained for word in ("PSNR", q.DISTRIBUTION, q.IDENTICAL)) and q.OTHER_SEED not in explained


def test_a_grid_shows_figures_and_differences():
    first = np.full((1, 64, 64, 3), 90, np.uint8)
    second = first + np.uint8(20)
    runs, pictures = [report(), report("zipar")], [first, second]
    found = qualities(pictures, runs, 0)
    kinds = (((), False), (found, False), (found, True))
    plain, figures, both = (compare_grid(pictures, ["a", "b"], runs, quality=q, differences=d) for q, d in kinds)
    assert plain.shape[0] < figures.shape[0] < both.shape[0]
    apart = (both == 80).all(-1)  # 4 x 20
    assert apart.sum() == 384 * 384 and not (figures == 80).all(-1).any()
