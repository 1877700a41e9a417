"""The documentation: commands parse, links lead somewhere, and what ships links to what ships."""

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from fastar_nodes.cli import main
from fastar_nodes.cli.planning import of_prompt, plan
from fastar_nodes.lab.commands import PROGRAM as LAB
from fastar_nodes.lab.docs import figures
from fastar_nodes.lab.release import release

ROOT = Path(__file__).resolve().parents[1]
TRACKED = release.tracked(ROOT) if (ROOT / ".git").exists() else []
PAGES = [path for path in TRACKED if path.suffix == ".md"]
# Documents with commands, and specs whose comments state them.
WITH_COMMANDS = [
    path for path in TRACKED if path in PAGES or path.suffix == ".toml" and path.parts[0] in ("docs", "lab")
]

if not TRACKED:
    pytest.skip("NOT TESTED: the documentation needs a git checkout", allow_module_level=True)


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_contributing_names_what_exists():
    """Files, and names of code: an underscore or a capital within a word says that it is one."""
    page = text_of(Path("CONTRIBUTING.md")).partition("## Packages")[2]
    pieces = re.findall(r"```python(.*?)```", page, re.S)
    pieces += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S))

    words = set(re.findall(r"\b[A-Za-z_]\w*(?:\.py)?\b", " ".join(pieces)))
    files = {word for word in words if word.endswith(".py")}
    names = {word for word in words - files if re.search(r"[a-z]_[a-z]|[a-z][A-Z]", word)}
    names = {name for name in names if not name.lower().startswith("my")}  # a reader's own
    assert len(files) > 20 and len(names) > 10

    assert files <= {path.name for path in TRACKED}
    code = " ".join(text_of(path) for path in TRACKED if path.suffix in (".py", ".json", ".toml"))
    assert names <= set(re.findall(r"\w+", code))


# ---------------------------------------------------------------------------------------------------------- commands


PACK = main.Program(main.MODULE, "", {"": main.COMMANDS}, "fastar_nodes.cli")
PROGRAMS = {program.name: program for program in (PACK, LAB)}
_COMMAND = re.compile(r"(?:(?:python3?|Scripts\\python|\$\(PY\)) -m fastar_nodes(\.lab)?|^fastar) ([a-z][^#|>*]*)")


def commands(text: str) -> Iterator[tuple[main.Program, list[str]]]:
    """The command lines in a text, each as its program and the words after it: in a line of its own, or as inline code.

    Inline code may go on in the next line, and so does a line that ends with a backslash.
    """
    text = re.sub(r"\\\n[ #]*", " ", text)
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    pieces = [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", outside)]
    pieces += [line for line in text.splitlines() if "`" not in line and line.count('"') % 2 == 0]

    for piece in pieces:
        for of_lab, found in _COMMAND.findall(piece):
            yield LAB if of_lab else PACK, shlex.split(found)


@cache
def parser_of(program: str, command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    PROGRAMS[program].module(command).arguments(parser)
    return parser


def documented() -> list[tuple[str, str, str]]:
    """Pages with the commands on them, and the list of figures with its commands."""
    found = []
    for path in WITH_COMMANDS:
        found += [(str(path), program.name, shlex.join(words)) for program, words in commands(text_of(path))]
    for name, figure in figures.listed().items():
        found += [(f"figure {name}", LAB.name, command) for command in figure.commands]

    return sorted(set(found))


DOCUMENTED = documented()
assert len({page for page, _, _ in DOCUMENTED}) >= 8, "documents with commands"


@pytest.mark.parametrize(("page", "program", "line"), DOCUMENTED)
def test_every_documented_command_parses_and_its_files_exist(page, program, line):
    command, *words = shlex.split(line)
    for word in words:
        if word.startswith(("docs/", "lab/", "tests/")):
            assert (ROOT / word).exists(), f"{page}: {line}"

    assert command in PROGRAMS[program].commands, f"{page}: there is no command {command}"
    if not words or "<" in line:
        return  # a command that is only named, or has a placeholder

    try:
        options = parser_of(program, command).parse_args(words)
    except (argparse.ArgumentError, SystemExit) as problem:
        pytest.fail(f"{page}: {line}: {problem}")

    if getattr(options, "samplers", None):
        sets, _ = of_prompt(options.sets)
        plan(options.samplers, sets, {})  # raises an error for an unknown sampler, setting or value


# ------------------------------------------------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace(" ", "-")
        found.add(re.sub(r"[^\w-]", "", words))

    return found


def links(text: str) -> list[str]:
    """The targets of the links and images of a page."""
    plain = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", plain)


def broken(page: Path, files: set[Path]) -> list[str]:
    """The relative links of a page that lead to none of these files, or to no heading of one."""
    wrong = []
    for link in links(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue

        name, _, anchor = link.partition("#")
        target = Path(*_parts(page.parent / name)) if name else page
        is_folder = any(target in file.parents for file in files)
        if target not in files and not is_folder:
            wrong.append(f"{page}: {link} leads nowhere")
        elif anchor and anchor not in anchors(text_of(target)):
            wrong.append(f"{page}: {link} is no heading of {target}")

    return wrong


def _parts(path: Path) -> list[str]:
    """The parts of a path without those that go up."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)

    return parts


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page):
    assert broken(page, set(TRACKED)) == []


def test_what_ships_links_to_what_ships():
    shipped = release.shipped(ROOT)
    wrong = []
    for page in shipped:
        if page.suffix == ".md":
            wrong += broken(page, set(shipped))

    assert wrong == []


def test_files_that_help_pages_name_ship():
    """A help page names a page of the docs by its path, because the editor shows the page without the repository."""
    shipped = {path.as_posix() for path in release.shipped(ROOT)}
    for page in (ROOT / "web" / "docs").glob("*.md"):
        for name in re.findall(r"\bdocs/[\w/]+\.\w+", page.read_text(encoding="utf-8")):
            assert name in shipped, f"{page.name}: {name}"
