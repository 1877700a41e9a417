"""Measures of a sweep's folder: paired figures, differences, what is skipped and what is refused;
and their statistics.
"""

import dataclasses
import errno
import math
import os
from pathlib import Path

import made_sweeps
import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps import measures, statistics
from fastar_nodes.lab.sweeps.features import open_reference
from fastar_nodes.lab.sweeps.judging import Reading
from fastar_nodes.lab.sweeps.measures import Means, evaluate, latest, read_results
from fastar_nodes.lab.sweeps.records import Shard, shard_key
from fastar_nodes.lab.sweeps.statistics import frechet
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.reports import quality

pytestmark = pytest.mark.slow


def COLOUR(parts):
    """Mean colour as features, and logits of it."""
    x = np.concatenate([part.astype(np.float32).mean((1, 2)) for part in parts])
    return x, x / 50


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Store:
    """A sweep that no test writes to."""
    return made_sweeps.write(tmp_path_factory.mktemp("sweep"), 88)


@pytest.fixture
def store(tmp_path) -> Store:
    return made_sweeps.write(tmp_path / "sweep")


def pictures_of(store: Store, name: str) -> np.ndarray:
    return np.concatenate([store.pictures(store.cell(name), s) for s in store.shards(store.cell(name))])


def means(**about) -> Means:
    return Means(**({"resamples": 20} | about))


def test_pairs_agree_with_compare(store):
    found = latest(evaluate(store, ["psnr", "ssim", "identical"], means()))
    for name in ("fasthybrid-0.8", "fasthybrid-0.9"):
        a, b = pictures_of(store, name), pictures_of(store, "mar-0")
        assert found[name, "psnr"].value == pytest.approx(quality.psnr(a, b))
        assert found[name, "ssim"].value == pytest.approx(quality.ssim(a, b))
        result = found[name, "psnr"]
        assert result.low < result.value < result.high and result.against == "mar-0" and result.images == 48
        assert found[name, "identical"].value == 0
    exact = found["fasthybrid-1.0", "psnr"]
    assert (exact.value, exact.word) == (None, "identical") and found["fasthybrid-1.0", "ssim"].value == 1
    assert found["fasthybrid-1.0", "identical"].value == 1
    lossless = found["cspd-0", "psnr"]
    assert (lossless.value, lossless.word) == (None, "same distribution")
    assert not any(name == "mar-0" for name, _ in found), "the plain sampler is not compared with itself"


@pytest.fixture
def reference(tmp_path):
    np.savez(tmp_path / "real.npz", arr_0=made_sweeps.pictures(1000, 100, 3.0))
    return open_reference(tmp_path / "real.npz")


def test_features_against_a_reference(shared, reference, monkeypatch):
    monkeypatch.setattr(shared, "append_results", lambda lines: None)
    found = latest(evaluate(shared, ["fid", "is"], means(inception=COLOUR, reference=reference)))
    real = reference.pictures.astype(np.float32).mean((1, 2))
    for name in ("mar-0", "fasthybrid-0.8"):
        own = pictures_of(shared, name).astype(np.float32).mean((1, 2))
        fid = found[name, "fid"]
        assert fid.value == pytest.approx(frechet(own, real)(np.ones(len(own))), rel=1e-4)
        assert fid.low < fid.value < fid.high and fid.against == "real.npz"
        assert found[name, "is"].value == pytest.approx(statistics.inception_score(own / 50)(np.ones(len(own))))
    first, other, same = (found[name, "fid"] for name in ("mar-0", "fasthybrid-0.8", "fasthybrid-1.0"))
    assert first.difference == (None, None, None)
    assert other.difference[0] == pytest.approx(other.value - first.value)
    assert other.difference[1] <= other.difference[0] <= other.difference[2]
    assert same.value == first.value and same.difference == (0, 0, 0)


def test_the_inception_score_by_hand():
    """Images of k of 4 classes without doubt score k, and images of which nothing is known 1."""
    for classes in (1, 2, 4):
        logits = 50.0 * np.eye(4)[np.arange(4000) % classes]
        assert statistics.inception_score(logits)(np.ones(4000)) == pytest.approx(classes, rel=0.02)
    assert statistics.inception_score(np.zeros((40, 4)))(np.ones(40)) == pytest.approx(1)
    weights = np.array([2.0, 0.0] * 2000)  # every second image twice, all of one class
    assert statistics.inception_score(50.0 * np.eye(2)[np.arange(4000) % 2])(weights) == pytest.approx(1)


def test_two_evaluations_at_once_lose_nothing(store):
    """Another one begins and ends while this one measures its second cell."""
    lines: list[str] = []

    def log(text: str) -> None:
        if not lines:
            evaluate(Store(store.folder.path), ["identical"], means())
        lines.append(text)

    evaluate(store, ["psnr"], means(), log)
    found = latest(read_results(store))
    assert sorted(found) == sorted((c.id, m) for c in store.cells()[1:] for m in ("psnr", "identical"))


def test_without_a_reference_the_plain_sampler_is_one(shared, monkeypatch):
    monkeypatch.setattr(shared, "append_results", lambda lines: None)
    found = latest(evaluate(shared, ["fid"], means(inception=COLOUR)))
    assert ("mar-0", "fid") not in found
    assert found["fasthybrid-1.0", "fid"].value == pytest.approx(0, abs=1e-6)
    assert found["fasthybrid-0.8", "fid"].against == "mar-0"
    assert found["cspd-0", "fid"].value > 0


class FakeJudge:
    """Reads brightness; whole where it is above 100. Every fourth image has the same scene."""

    def measures(self, size, labels):
        return ("judge-class", "judge-scene", "judge-whole", "judge-distinct", "judge-nearest", "judge-frechet")

    def read(self, pictures, labels):
        x = pictures.astype(np.float32).mean((1, 2))
        flags = {"judge-class": labels < 5, "judge-scene": labels < 3, "judge-whole": x.mean(1) > 100}
        return Reading(x, flags, np.arange(len(x)) % 4, pictures)

    def reference(self, labels, side):
        return made_sweeps.pictures(500, len(labels), 0.0, side=side).astype(np.float32).mean((1, 2))


def test_the_judge_reads_labels_and_pictures(shared, monkeypatch):
    monkeypatch.setattr(shared, "append_results", lambda lines: None)
    names = [name for name in measures.MEASURES if name.startswith("judge")]
    found = latest(evaluate(shared, names, means(judge=FakeJudge())))
    labels = np.arange(88) % 10
    assert found["mar-0", "judge-class"].value == pytest.approx((labels < 5).mean())
    whole = pictures_of(shared, "cspd-0").astype(np.float32).mean((1, 2, 3)) > 100
    assert found["cspd-0", "judge-whole"].value == pytest.approx(whole.mean())
    assert found["cspd-0", "judge-frechet"].difference[0] is not None
    assert ("mar-0", "judge-prompt") not in found, "a measure that these images do not have"
    assert found["mar-0", "judge-distinct"].value == pytest.approx(4 / 88)

    images = pictures_of(shared, "mar-0").reshape(88, -1) / 255
    distances = np.sqrt(np.square(images[:, None] - images).mean(2))
    np.fill_diagonal(distances, np.inf)
    assert found["mar-0", "judge-nearest"].value == pytest.approx(distances.min(1).mean(), rel=1e-4)


def test_the_demo_judge_recognises_its_own_pictures():
    """Only where the checkout has it: rendered scenes are of their class, noise is not whole."""
    judging = pytest.importorskip("fastar_nodes.lab.sweeps.judging")
    from fastar_nodes.lab.training import picture_book

    judge = judging.PictureBookJudge()
    labels = np.arange(40) % 10
    rgb, _ = picture_book.render(picture_book.scenes(11, 40, labels=labels), 128)
    features, flags, scenes, _ = judge.read(rgb, labels)
    assert len(set(scenes.tolist())) >= 38
    assert features.shape == (40, 64) and [*flags] == ["judge-class", "judge-scene", "judge-whole"]
    assert flags["judge-class"].mean() > 0.9 and flags["judge-scene"].mean() > 0.7 and flags["judge-whole"].mean() > 0.9
    assert judge.measures((64, 64), labels) == judging.OF_LABELS and not judge.measures((96, 96), labels)
    assert not judge.measures((64, 128), labels) and not judge.measures((64, 64), np.array(["a lovely cat"]))
    assert not judge.measures((64, 64), labels + 100)


def test_the_demo_judge_recognises_what_prompts_ask_for():
    """Scenes that fulfil the prompts do; the same images beside other prompts do not."""
    judging = pytest.importorskip("fastar_nodes.lab.sweeps.judging")
    from fastar_nodes.lab.training import captions, picture_book

    judge = judging.PictureBookJudge()
    wanted = captions.wishes(47, 3)
    prompts = np.array(wanted.captions())
    assert judge.measures((128, 128), prompts) == judging.OF_PROMPTS

    rgb, _ = picture_book.render(captions.fulfilling(wanted, 5), 128)
    features, flags, *_ = judge.read(rgb, prompts)
    assert [*flags] == ["judge-class", "judge-prompt", "judge-whole"]
    assert flags["judge-class"].mean() > 0.95 and flags["judge-prompt"].mean() > 0.9

    wrong = judge.read(rgb, np.roll(prompts, 1)).flags
    assert wrong["judge-prompt"].mean() == 0 and wrong["judge-whole"].mean() > 0.9
    assert judge.reference(prompts, 128).shape == features.shape


def test_new_pictures_are_measured_and_old_figures_kept(tmp_path):
    part = made_sweeps.write(tmp_path, finished=16)
    lines: list[str] = []
    evaluate(part, ["identical"], means(), lines.append)
    assert lines[-1] == "cspd-0: 1 measured; 16 of its 48 images are finished"
    whole = made_sweeps.write(tmp_path)
    evaluate(whole, ["identical"], means())
    own = [r for r in read_results(whole) if r.cell == "cspd-0"]
    assert [r.images for r in own] == [16, 48], "the earlier line is still there"
    assert latest(read_results(whole))["cspd-0", "identical"].images == 48


def test_a_cell_is_written_when_it_is_measured(store, monkeypatch):
    def stop(text: str) -> None:
        if text.startswith("fasthybrid-0.8"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(store, ["psnr"], means(), stop)
    assert [r.cell for r in read_results(store)] == ["fasthybrid-0.8"]


def test_what_cannot_be_measured_is_refused_before_a_picture_is_read(store, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "pictures", lambda *_: pytest.fail("no image should be read"))
    wrong = dataclasses.replace(reference, pictures=np.zeros((4, 32, 16, 3), np.uint8))
    with pytest.raises(UserError, match="^reference: "):
        evaluate(store, ["fid"], means(inception=COLOUR, reference=wrong))
    empty, alone = Store(tmp_path / "empty"), Store(tmp_path / "alone")
    for words in ("holds no sweep", "no finished shard"):
        with pytest.raises(UserError, match=words):
            evaluate(empty, ["psnr"], means())
        empty.write_manifest({"batch": 8}, [made_sweeps.cell("mar-0", "mar", {}, 8)])
    cell = made_sweeps.cell("fasthybrid", "fasthybrid", {}, 8, baseline=None)
    alone.write_manifest({"batch": 8}, [cell])
    record = Shard(shard_key(cell.key, 0, 8), 0, 8, "")
    alone.write_shard(cell, record, made_sweeps.pictures(0, 8, 0), np.zeros(8, np.int64), {})
    for names in (["psnr"], ["fid", "ssim"]):
        with pytest.raises(UserError, match="there is no cell of the unaccelerated sampler"):
            evaluate(alone, names, means(inception=COLOUR))


def test_cells_of_another_size_than_the_references_are_left_out(reference, tmp_path):
    """PAR's images beside those of other families, for example."""
    store = Store(tmp_path)
    cells = [made_sweeps.cell(name, "mar", {}, 8, side) for name, side in (("mar-0", 16), ("large", 32))]
    store.write_manifest({"batch": 8}, cells)
    for cell in cells:
        record = Shard(shard_key(cell.key, 0, 8), 0, 8, "")
        drawn = made_sweeps.pictures(0, 8, 0, side=cell.size[0])
        store.write_shard(cell, record, drawn, np.zeros(8, np.int64), {})
    lines = []
    found = evaluate(store, ["fid"], means(inception=COLOUR, reference=reference), lines.append)
    assert [result.cell for result in found] == ["mar-0"]
    assert (
        "fid of large: reference: real.npz holds images of 16 x 16 pixels, but the images of large have 32 x 32"
        in lines[-1]
    )


def normal(n: int, d: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, d)) * scale + shift).astype(np.float32)


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3, 2, 400)
    found = statistics.estimate(statistics.mean(values), 400, 2000).figure()
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(400)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.08)
    assert (found.high + found.low) / 2 == pytest.approx(values.mean(), abs=half / 10)


def test_a_paired_difference_is_narrower_than_its_parts():
    base = np.random.default_rng(3).normal(size=500)
    other = base + 0.1 + 0.01 * np.random.default_rng(4).normal(size=500)
    a, b = (statistics.estimate(statistics.mean(x), 500, 300) for x in (other, base))
    difference, own = a.minus(b).figure(), a.figure()
    assert difference.low < 0.1 + 0.002 and difference.high > 0.1 - 0.002 and difference.low > 0
    assert difference.high - difference.low < (own.high - own.low) / 20
    assert a.minus(statistics.estimate(statistics.mean(base[:400]), 400, 300)) is None


def test_a_biased_statistic_is_shifted_to_its_figure():
    """A resample of n features has a Frechet distance as of about
    n / 2; the figure lies within its interval all the same.
    """
    x, y = normal(200, 8, 21), normal(5000, 8, 22)
    statistic = statistics.frechet(x, y)
    plain, shifted = (statistics.estimate(statistic, 200, 100, biased=b).figure() for b in (False, True))
    assert plain.value == shifted.value and plain.low > plain.value, "the resamples alone are all worse"
    assert shifted.low < shifted.value < shifted.high
    other = statistics.estimate(statistics.frechet(x + 0.1, y), 200, 100, biased=True)
    assert other.minus(statistics.estimate(statistic, 200, 100, biased=True)).biased


def test_infinite_ends_are_none():
    found = statistics.estimate(statistics.mean(np.array([0.0] * 9 + [1.0])), 10, 100).figure(statistics.to_psnr)
    assert found.value == pytest.approx(10 * math.log10(255**2 / 0.1))
    assert found.high is None and found.low < found.value


def test_shares_have_an_interval_where_all_images_agree():
    none = statistics.Estimate(0.0, np.zeros(10), 100).share()
    assert none.low == 0 and none.high == pytest.approx(0.0370, abs=1e-4)  # Wilson 1927, n = 100
    all_of_them = statistics.Estimate(1.0, np.ones(10), 100).share()
    assert all_of_them.high == 1 and all_of_them.low == pytest.approx(1 - none.high)
    half = statistics.Estimate(0.5, np.zeros(10), 100).share()
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


def test_few_images_have_the_distance_of_many_features(monkeypatch):
    """The matrix of the images [N, N] and that of the features [D, D] give the same, for all weights of a bootstrap."""
    x, y = normal(20, 60, 13) @ normal(60, 60, 14), normal(35, 60, 15, shift=0.2)
    fast = statistics.frechet(x, y)
    monkeypatch.setattr(statistics, "_cross_of_images", statistics._cross_of_features)
    slow = statistics.frechet(x, y)
    for weights in [np.ones(20), *statistics.resamples(20, 5)]:
        assert fast(weights) == pytest.approx(slow(weights), rel=1e-6)
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    values = np.linalg.eigvals(a @ b).real.clip(0)
    wanted = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * np.sqrt(values).sum()
    assert fast(np.ones(20)) == pytest.approx(wanted, rel=1e-5)


def test_a_folder_that_is_not_writable_is_refused_before_a_picture_is_read(store, monkeypatch):
    monkeypatch.setattr(Store, "pictures", lambda *_: pytest.fail("no image should be read"))

    def read_only(self, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(UserError, match="^folder: .*cannot be written .Read-only file system.; choose a folder that"):
        evaluate(store, ["psnr"], means())


def test_weights_are_repetitions():
    x, y = normal(30, 4, 11), normal(50, 4, 12)
    weights = next(statistics.resamples(30, 1))
    repeated = np.repeat(x, weights.astype(int), axis=0)
    found = statistics.frechet(x, y)(weights)
    assert found == pytest.approx(statistics.frechet(repeated, y)(np.ones(30)), rel=1e-9)
