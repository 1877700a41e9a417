"""Every hostile file of :mod:`attacks` is refused in one sentence, within the memory of the file and 64 MB."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="some attacks are on text encoders")
budget = pytest.importorskip("budget")
if not budget.available():
    pytest.skip("needs fork and /proc", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))

import seeds  # noqa: E402
from attacks import ATTACKS  # noqa: E402
from budget import measure, problem  # noqa: E402

STEMS = {"llamagen": "gpt", "upsampler": "up"}


@pytest.fixture(scope="session")
def loaders(tmp_path_factory: pytest.TempPathFactory):
    """A valid file of every kind, and its loader by the file's stem ("tar" and "t5" for folders)."""
    folder = tmp_path_factory.mktemp("valid")
    return folder, {"tar" if s.path.stem == "words" else s.path.stem: s.load for s in seeds.build(folder)}


@pytest.mark.parametrize(("make", "loader", "words"), ATTACKS, ids=[make.__name__ for make, _, _ in ATTACKS])
def test_attack(make, loader: str, words: str, loaders, tmp_path: Path) -> None:
    folder, load = loaders
    assert make.__doc__
    import shutil

    stem = STEMS.get(loader, loader)
    (tmp_path / "seeds").mkdir()
    for path in folder.glob(f"{stem}*"):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, tmp_path / "seeds" / path.name)
    path = make(tmp_path)
    size = sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else (path,)) if p.is_file())
    outcome = measure(lambda: load[stem](path))
    assert not problem(outcome, size), problem(outcome, size)
    assert outcome.kind == "refused" and words in outcome.message, outcome
    assert not (tmp_path / "canary").exists()
