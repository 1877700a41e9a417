"""Check that the pack is ready to be published.

Prints the size of the shipped archive and every open item. Exit code 0 if
there is none, 1 otherwise. The checklist is in CONTRIBUTING.md ("Publishing").
"""

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ..work.preset_work import missing_rows

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 50_000_000
MOST_CHECKPOINT_BYTES = 45_000_000
# The pack's images in the registry, drawn by lab/docs/pictures.py: square, at most 400 x 400 pixels, and 21:9.
ICON = "docs/icon.png"
BANNER = "docs/banner.png"
PROJECT, README, CHANGELOG = "pyproject.toml", "README.md", "CHANGELOG.md"
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


def by_folder(files: Sequence[Path]) -> dict[str, list[Path]]:
    """The files by the first part of their paths, "." for those of the root."""
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(file.parts[0] if len(file.parts) > 1 else ".", []).append(file)
    return found


def write_archive(files: Sequence[Path], path: Path) -> None:
    """Write files of the repository as a zip archive. tests/comfyui/test_archive.py runs a template from one."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(ROOT / file, file.as_posix())


def address(repository: str, image: str) -> str:
    """Address of an image in a public repository on GitHub; the registry reads addresses only."""
    owner_and_name = repository.rstrip("/").removesuffix(".git").removeprefix("https://github.com/")
    return f"https://raw.githubusercontent.com/{owner_and_name}/HEAD/{image}"


def line_of(file: str, text: str) -> str:
    """The file and the line in it that begins with a text, "pyproject.toml:45"; the file alone if none does."""
    lines = (ROOT / file).read_text(encoding="utf-8-sig").splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.startswith(text)]
    return f"{file}:{found[0]}" if found else file


def owner_fields(project: dict[str, Any], readme: str) -> list[str]:
    """What only the owner of the repository can fill in, and what is empty or wrong of it.

    The address of the repository is stated once, in ``pyproject.toml``; the icon and README follow from it.
    """
    urls = project["project"].get("urls", {})
    comfy = project["tool"]["comfy"]
    repository = urls.get("Repository") or "https://github.com/OWNER/NAME"
    icon, banner = address(repository, ICON), address(repository, BANNER)
    clone = f"git clone --depth 1 {repository} fastar-nodes"
    todo = (
        (PROJECT, "# Empty fields", "[project.urls] Repository: the address of the repository", urls.get("Repository")),
        (PROJECT, "PublisherId", "[tool.comfy] PublisherId: your id at registry.comfy.org", comfy.get("PublisherId")),
        (PROJECT, "Icon", f"[tool.comfy] Icon: {icon}", comfy.get("Icon") == icon),
        (PROJECT, "Banner", f"[tool.comfy] Banner: {banner}", comfy.get("Banner") == banner),
        (README, "- **Git**", clone, clone in readme),
    )
    return [f"{line_of(file, at)} {what}" for file, at, what, done in todo if not done]


def version_problems(version: str, changelog: str, tag: str | None) -> list[str]:
    """Disagreements of the version in ``pyproject.toml`` with the changelog's first entry and with a git tag."""
    problems = []
    heading = re.search(r"^## \[([^\]]+)\] - (.+)$", changelog, re.M)
    if heading is None or heading[1] != version:
        problems.append(f"CHANGELOG.md: the first entry is not [{version}], the version in pyproject.toml")
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading[2].strip()):
        problems.append(f"{line_of(CHANGELOG, '## [')} [{version}] has no date (YYYY-MM-DD)")

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
    parser.add_argument("--archive", metavar="FILE", type=Path, help="also write the shipped archive as a zip file")


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    project = tomllib.loads((ROOT / PROJECT).read_text(encoding="utf-8-sig"))
    version, files = project["project"]["version"], shipped()
    volume, lines = size(files)
    print(f"{version}: {len(files)} files, {volume / 1e6:.1f} MB, {lines} lines of Python")
    for folder, part in by_folder(files).items():
        print(f"  {folder}: {len(part)} files, {size(part)[0] / 1e6:.1f} MB")
    if options.archive is not None:
        write_archive(files, options.archive)
    problems = owner_fields(project, (ROOT / README).read_text(encoding="utf-8-sig"))
    problems += version_problems(version, (ROOT / CHANGELOG).read_text(encoding="utf-8-sig"), options.tag)
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
