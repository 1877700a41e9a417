"""Inception and references: what is read, and what is refused in a sentence."""

import zipfile

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps import features
from fastar_nodes.lab.sweeps.features import WEIGHTS, open_reference
from fidelity import Inception
from payload import Payload

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def random_pictures(n: int, h: int = 12, w: int = 16) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, h, w, 3), dtype=np.uint8)


@pytest.fixture
def weights(tmp_path, monkeypatch, fake_fidelity):
    """Where torch.hub keeps Inception's weights."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints" / WEIGHTS


def test_inception_reads_all_pictures_in_parts(weights):
    torch.save(Inception.state(), weights)
    pictures = random_pictures(120)
    found, logits = features.Inception(CPU)(iter([pictures[:7], pictures[7:]]))
    wanted = pictures.astype(np.float32).mean((1, 2))
    assert np.allclose(found, wanted, rtol=1e-5) and found.dtype == np.float32
    assert np.allclose(logits, wanted.sum(1, keepdims=True).repeat(4, 1), rtol=1e-5)


def test_missing_weights_are_named_with_their_address(weights):
    with pytest.raises(UserError, match=f"measures: .*{WEIGHTS} is missing; download https://github.com/toshas"):
        features.Inception(CPU)


def test_a_file_with_code_or_other_weights_is_refused(weights, tmp_path):
    torch.save({"fc.weight": torch.ones(4, 3), "bad": Payload(tmp_path / "canary")}, weights)
    with pytest.raises(UserError, match="^measures: "):
        features.Inception(CPU)
    assert not (tmp_path / "canary").exists()
    torch.save({"other": torch.ones(2)}, weights)
    with pytest.raises(UserError, match=f"{WEIGHTS} cannot be read or holds a different network"):
        features.Inception(CPU)


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
