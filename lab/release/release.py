"""Check that the pack is ready to be published.

Prints the size of the shipped archive and every open item. Exit code 0 if
there is none, 1 otherwise. The checklist is in CONTRIBUTING.md ("Publishing").
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ..work.preset_work import missing_rows

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 45_000_000
MOST_CHECKPOINT_BYTES = 40_000_000
# The pack's image in the registry, drawn by lab/docs/pictures.py: square, at most 400 x 400 pixels.
ICON = "docs/icon.png"
# First parts of paths that must not be shipped.
DEVELOPMENT = ("lab", "tests", ".github", ".ci")


def tracked(root: Path = ROOT) -> list[Path]:
    """Files that git does not ignore, relative to ``root`` and sorted, whether they are committed yet or not."""
    return _existing(_listed(root, "--exclude-standard"), root)


def shipped(root: Path = ROOT) -> list[Path]:
    """Files of the shipped archive, relative to ``root`` and sorted: what git does not ignore, less ``.comfyignore``.

    Untracked files count, so that the result before a commit is that after it.
    """
    names = _listed(root, "--exclude-standard") - _listed(root, "--ignored", "--exclude-from=.comfyignore")
    return _existing(names, root)


def _listed(root: Path, *options: str) -> set[str]:
    """Names of files that git lists."""
    command = ["git", "ls-files", "-z", "--cached", "--others", *options]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=60).stdout
    return set(output.decode().split("\0")) - {""}


def _existing(names: set[str], root: Path) -> list[Path]:
    """The files and links among names, sorted."""
    return sorted(Path(name) for name in names if (root / name).is_file() or (root / name).is_symlink())


def size(files: Sequence[Path], root: Path = ROOT) -> tuple[int, int]:
    """Bytes of all files, and lines of the Python files."""
    lines = sum(len((root / f).read_text(encoding="utf-8-sig").splitlines()) for f in files if f.suffix == ".py")
    return sum((root / f).stat().st_size for f in files), lines


def icon_address(repository: str) -> str:
    """Address of :data:`ICON` in a public repository on GitHub; the registry reads addresses only."""
    owner_and_name = repository.rstrip("/").removesuffix(".git").removeprefix("https://github.com/")
    return f"https://raw.githubusercontent.com/{owner_and_name}/HEAD/{ICON}"


def owner_fields(project: dict[str, Any], readme: str) -> list[str]:
    """What only the owner of the repository can fill in, and what is empty or wrong of it.

    The address of the repository is stated once, in ``pyproject.toml``; the icon and README follow from it.
    """
    urls = project["project"].get("urls", {})
    comfy = project["tool"]["comfy"]
    repository = urls.get("Repository") or "https://github.com/OWNER/NAME"
    icon = icon_address(repository)
    clone = f"git clone --depth 1 {repository} fastar-nodes"
    required = {
        "[project.urls] Repository: the address of the public repository": urls.get("Repository"),
        "[tool.comfy] PublisherId: the id of the publisher at registry.comfy.org": comfy.get("PublisherId"),
        f"[tool.comfy] Icon: {icon}": comfy.get("Icon") == icon,
        f"README.md: {clone}": clone in readme,
    }
    return [what for what, value in required.items() if not value]


def version_problems(version: str, changelog: str, tag: str | None) -> list[str]:
    """Disagreements of the version in ``pyproject.toml`` with the changelog's first entry and with a git tag."""
    problems = []
    heading = re.search(r"^## \[([^\]]+)\] - (.+)$", changelog, re.M)
    if heading is None or heading[1] != version:
        problems.append(f"CHANGELOG.md: the first entry is not [{version}], the version in pyproject.toml")
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading[2].strip()):
        problems.append(f"CHANGELOG.md: [{version}] has no date (YYYY-MM-DD)")

    if tag is not None and tag != f"v{version}":
        problems.append(f"tag: {tag} is not v{version}, the version in pyproject.toml")
    return problems


def archive_problems(files: Sequence[Path], root: Path = ROOT) -> list[str]:
    """What must not be in the archive: development files, links, which unpack as text or are refused, and bytecode."""
    problems = []
    for file in files:
        if file.parts[0] in DEVELOPMENT:
            problems.append(f"archive: {file} is a development file; add it to .comfyignore")
        if (root / file).is_symlink():
            problems.append(f"archive: {file} is a link; put the file there")
        if "__pycache__" in file.parts or file.suffix == ".pyc":
            problems.append(f"archive: {file} is bytecode; remove it from git")
    return problems


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tag", help="the git tag of the release, for example v0.1.0")


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8-sig"))
    version, files = project["project"]["version"], shipped()
    volume, lines = size(files)
    print(f"{version}: {len(files)} files, {volume / 1e6:.1f} MB, {lines} lines of Python")
    problems = owner_fields(project, (ROOT / "README.md").read_text(encoding="utf-8-sig"))
    problems += version_problems(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8-sig"), options.tag)
    if volume > MOST_BYTES:
        problems.append(f"archive: {volume / 1e6:.1f} MB is more than {MOST_BYTES / 1e6:.0f} MB")
    problems += archive_problems(files)
    missing = missing_rows()
    if missing:
        problems.append(
            f"docs/full_size.md: its table of presets lacks {len(missing)} rows ({missing[0]} ...); run make figures "
            "ONLY=presets"
        )
    for problem in problems:
        print(f"open: {problem}")

    return int(bool(problems))
