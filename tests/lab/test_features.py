"""Extractors and references: what is read, and what is refused in a sentence."""

import sys
import zipfile
from types import ModuleType

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.features import INCEPTION, WEIGHTS, figure, load_extractor, open_reference
from fidelity import Inception
from payload import Payload

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def random_pictures(n: int, h: int = 12, w: int = 16) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, h, w, 3), dtype=np.uint8)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user, importable as ``my_extractor``."""
    made = ModuleType("my_extractor")
    monkeypatch.setitem(sys.modules, "my_extractor", made)
    return made


def test_a_function_gets_all_pictures_in_parts(module):
    sizes = []

    def average(pictures: torch.Tensor) -> torch.Tensor:
        assert pictures.dtype == torch.uint8
        sizes.append(len(pictures))
        return pictures.float().mean((1, 2))

    module.average = average
    pictures = random_pictures(120)
    found, logits = load_extractor("my_extractor:average", None, CPU)(iter([pictures]))
    assert np.allclose(found, pictures.astype(np.float32).mean((1, 2)), rtol=1e-5)
    assert logits is None and sizes == [50, 50, 20] and found.dtype == np.float32


WRONG = [torch.zeros(shape) for shape in ((2, 12, 16, 3), (1, 4))]
WRONG += [[1, 2], torch.full((2, 3), float("nan"))]


@pytest.mark.parametrize("returned", WRONG, ids=range(4))
def test_what_a_function_returns_is_checked(module, returned):
    module.function = lambda pictures: returned
    with pytest.raises(UserError, match="^extractor: my_extractor:function"):
        load_extractor("my_extractor:function", None, CPU)(iter([random_pictures(2)]))


@pytest.mark.parametrize("name", ["clip", "no_such_module:f", "my_extractor:missing", "my_extractor:"])
def test_unusable_names_are_refused(module, name):
    with pytest.raises(UserError, match="^extractor: "):
        load_extractor(name, None, CPU)


def test_inception_is_read_from_the_named_file(fake_fidelity, tmp_path):
    torch.save({"fc.weight": torch.ones(4, 3), "fc.bias": torch.zeros(4)}, tmp_path / "weights.pth")
    pictures = random_pictures(3)
    found, logits = load_extractor(INCEPTION, tmp_path / "weights.pth", CPU)(iter([pictures]))
    wanted = pictures.astype(np.float32).mean((1, 2))
    assert np.allclose(found, wanted, rtol=1e-5)
    assert np.allclose(logits, wanted.sum(1, keepdims=True).repeat(4, 1), rtol=1e-5)


def test_inception_is_looked_for_where_torch_hub_keeps_it(fake_fidelity, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UserError, match=f"inception: .*{WEIGHTS} is missing; download https://github.com/toshas"):
        load_extractor(INCEPTION, None, CPU)
    (tmp_path / "checkpoints").mkdir()
    torch.save(Inception.state(), tmp_path / "checkpoints" / WEIGHTS)
    assert load_extractor(INCEPTION, None, CPU).name == INCEPTION


def test_a_file_with_code_or_other_weights_is_refused(fake_fidelity, tmp_path):
    torch.save({"fc.weight": torch.ones(4, 3), "bad": Payload(tmp_path / "canary")}, tmp_path / "code.pth")
    with pytest.raises(UserError, match="inception: "):
        load_extractor(INCEPTION, tmp_path / "code.pth", CPU)
    assert not (tmp_path / "canary").exists()
    torch.save({"other": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="other.pth cannot be read, or holds another network"):
        load_extractor(INCEPTION, tmp_path / "other.pth", CPU)


def test_rows_of_features_are_handed_to_torch_fidelity(fake_fidelity):
    """Its figures are asked for with one extractor that changes nothing, on the CPU, without its cache."""
    own, other = np.random.default_rng(1).normal(size=(2, 30, 4)).astype(np.float32)
    assert figure("fid", own, other) == pytest.approx(float(((own.mean(0) - other.mean(0)) ** 2).sum()), rel=1e-5)
    assert figure("is", own) == pytest.approx(float(own.mean()), rel=1e-4)
    assert figure("kid", own, other) == pytest.approx(float(own.sum() - other.sum()), rel=1e-4)
    assert (figure("precision", own, other), figure("recall", own, other)) == (0.25, 0.75)
    asked = fake_fidelity.asked
    assert [a.get("kid_subset_size") for a in asked] == [None, None, 30, None, None]
    assert all(not a["cuda"] and not a["cache"] and a["feature_extractor"] == "fastar-rows" for a in asked)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_is_read(tmp_path, save):
    save(tmp_path / "r.npz", arr_0=random_pictures(4))
    found = open_reference(tmp_path / "r.npz")
    assert np.array_equal(found.pictures, random_pictures(4)) and found.name == "r.npz"


ARRAYS = [{"arr_0": np.zeros((2, 4, 4, 3))}, *({"arr_0": np.zeros(n, np.uint8)} for n in ((2, 4, 4), (0, 4, 4, 3)))]


@pytest.mark.parametrize("arrays", [{"mu": np.zeros(3), "sigma": np.eye(3)}, *ARRAYS])
def test_other_arrays_are_refused(tmp_path, arrays):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match="^reference: .*bad.npz"):
        open_reference(tmp_path / "bad.npz")


def test_damaged_and_missing_references_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("text")
    for name in ("none.npz", "text.npz", "."):
        with pytest.raises(UserError, match="^reference: "):
            open_reference(tmp_path / name)
    np.savez(tmp_path / "whole.npz", arr_0=random_pictures(4))
    with zipfile.ZipFile(tmp_path / "cut.npz", "w") as file, zipfile.ZipFile(tmp_path / "whole.npz") as whole:
        file.writestr("arr_0.npy", whole.read("arr_0.npy")[:-10])
    with pytest.raises(UserError, match="cut.npz"):
        open_reference(tmp_path / "cut.npz")
