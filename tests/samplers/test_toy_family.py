"""A stranger's family: a loader, a record and its names, and it is loaded, drawn, compared, swept and seen in nodes."""

import shutil
import subprocess
import sys
from pathlib import Path

from fastar_nodes.runs.families import Family

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "lib" / "toy_family"
# What the copy of the package has of its own; everything else is this checkout's.
COPIED = ("model_loaders", "runs")


KIND = """    "toy": Kind(
        noun="a toy", field="checkpoint", prefixes=("toy_scale",), loader="Load Toy", decoder="demo-kl"
    ),
"""


def with_toy(package: Path) -> Path:
    """A copy of the package with the toy's loader, its record, its kind of files and its name."""
    package.mkdir()
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, package / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (package / path.name).symlink_to(path)

    folder = package / "model_loaders" / "toy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(TOY / "loader.py", folder)
    shutil.copy(TOY / "record.py", package / "runs" / "families" / "toy.py")

    _insert(package / "model_loaders" / "kinds.py", "KINDS: dict[str, Kind] = {\n", KIND)
    _insert(package / "runs" / "families" / "__init__.py", '    "bitdance",\n', '    "toy",\n')
    return package


def _insert(path: Path, line: str, more: str) -> None:
    """Write ``more`` behind a line of a file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(line) == 1, path
    path.write_text(text.replace(line, line + more), encoding="utf-8")


def test_a_stranger_adds_a_family_by_a_loader_a_record_and_its_names(tmp_path):
    package = with_toy(tmp_path / "fastar_nodes")
    folder = tmp_path / "models"
    folder.mkdir()
    command = [sys.executable, "-B", str(TOY / "drive.py"), str(package), str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tests" / "lib")},
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]


class Oblong(Family):
    """Images of 2 rows of 3 tokens."""

    kind = "oblong"

    def grid(self, model, settings=None):
        return 2, 3


def test_sizes_in_pixels_are_height_and_width():
    assert Oblong("oblong", "an oblong model", load_file=None, files="mar").sizes(None, 16) == ((32, 48),)
