"""Every hostile file of :mod:`attacks` is refused in one sentence, and none runs code.

Only those of ``TAKES_MEMORY`` need more than 64 MB beyond the file and a normal load, as SECURITY.md says.
"""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="some attacks are on text encoders")
budget = pytest.importorskip("budget")
if not budget.available():
    pytest.skip("needs fork and /proc", allow_module_level=True)

import seeds  # noqa: E402
from attacks import ATTACKS  # noqa: E402
from budget import measure, problem  # noqa: E402

pytestmark = pytest.mark.slow
STEMS = {"llamagen": "gpt"}
# torch's reader makes as many bytes as the file states.
TAKES_MEMORY = ("hidden_megabytes", "bytearray_of_megabytes")


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else (path,)) if p.is_file())


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a valid file of every kind, and by the file's
    stem ("tar" for a folder) its loader and a normal load.
    """
    folder = tmp_path_factory.mktemp("valid")
    found = {}
    for seed in seeds.build(folder):
        seed.load(seed.path)  # imports and caches
        stem = "tar" if seed.path.stem == "words" else seed.path.stem
        found[stem] = seed.load, measure(lambda seed=seed: seed.load(seed.path))
    return folder, found


@pytest.mark.parametrize(("make", "loader", "words"), ATTACKS, ids=[make.__name__ for make, _, _ in ATTACKS])
def test_attack(make, loader: str, words: str, loaders, tmp_path: Path) -> None:
    folder, found = loaders
    stem = STEMS.get(loader, loader)
    load, normal = found[stem]
    (tmp_path / "seeds").mkdir()
    for path in folder.glob(f"{stem}*"):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, tmp_path / "seeds" / path.name)
    path = make(tmp_path)
    outcome = measure(lambda: load(path))
    assert normal.kind == "ok"

    wrong = problem(outcome, size_of(path), normal)
    if make.__name__ in TAKES_MEMORY:
        assert wrong.startswith("took "), wrong
    else:
        assert not wrong
    assert outcome.kind == "refused" and words in outcome.message, outcome
    assert not (tmp_path / "canary").exists()
