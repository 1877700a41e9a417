"""What the pages state about the pack is what the code says: versions, counts, sizes, names and figures."""

import json
import re
import sys
from pathlib import Path

import pytest
from fastar_nodes.cli import checks
from fastar_nodes.lab.docs import figures, models_table
from fastar_nodes.lab.work import fits
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.runs import presets
from fastar_nodes.samplers.mar.settings import FastHybridSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEMPLATES = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS += ("thirteen", "fourteen", "fifteen", "sixteen")


def text_of(page: str) -> str:
    """The text of a page in one line."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))


def comfyui() -> str:
    """The oldest supported version of ComfyUI."""
    return PROJECT["tool"]["comfy"]["requires-comfyui"].removeprefix(">=").removesuffix(".0")


def version() -> str:
    """The version of the pack."""
    return PROJECT["project"]["version"]


def python() -> str:
    """The oldest supported version of Python."""
    return PROJECT["project"]["requires-python"].removeprefix(">=")


def cards() -> str:
    """The sizes of cards that are compared."""
    *first, last = fits.CARDS
    return f"{', '.join(map(str, first))} and {last}"


def preset(name: str, setting: str) -> str:
    """A value of FastHybrid's presets for the demo."""
    return str(presets.values(FastHybridSettings, name, demo=True)[setting])


# Page, pattern with one group, and what the group has to be.
FACTS = [
    ("README.md", r"needs ComfyUI (\d+\.\d+) or newer", comfyui),
    ("CHANGELOG.md", r"Nodes for ComfyUI (\d+\.\d+) or newer", comfyui),
    ("CHANGELOG.md", r"(\w+) templates, Apps and blueprints", lambda: NUMBERS[len(TEMPLATES)]),
    ("CHANGELOG.md", r"## \[(\d+\.\d+\.\d+)\]", version),
    ("CITATION.cff", r" version: (\d+\.\d+\.\d+)", version),
    ("docs/scale.md", r"Python (\d+\.\d+) needs the package tomli", python),
    ("docs/check.md", r"exceed its estimate by (\d+) MB", lambda: f"{checks.MARGIN / 1e6:g}"),
    ("docs/benchmarks.md", r"cards of (\d[\d, and]+) GB", cards),
    ("docs/benchmarks.md", r"keeps (\d+) GiB for the driver", lambda: f"{fits.TAKEN:g}"),
    ("docs/benchmarks.md", r"With \*lookahead_start\* (\d+) of", lambda: preset("balanced", "lookahead_start")),
]


@pytest.mark.parametrize(("page", "pattern", "fact"), FACTS, ids=[f"{page}, {pattern}" for page, pattern, _ in FACTS])
def test_a_page_states_what_the_code_says(page, pattern, fact):
    stated = re.findall(pattern, text_of(page))
    assert stated, f"{page} does not state it any more: {pattern}"
    assert set(stated) == {fact()}


def test_a_template_names_the_size_of_its_download():
    """Of Janus-4o nobody states it."""
    known = {entry.id: entry for entry in hub.entries("janus")}
    stated = [re.findall(r"download of (.* GB(?: or more)?) ", name) for name in TEMPLATES if "download" in name]
    assert stated == [[f"{known['janus-pro-1b'].size / 1e9:.1f} GB"], [known["janus-4o-7b"].note]]


@pytest.mark.slow
def test_readme_has_the_table_of_models():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.with_block(readme, models_table.NAME, models_table.table()) == readme


def test_every_family_that_draws_is_in_the_table_of_models():
    named = {name for row in models_table.ROWS for name in row.entries}
    known = {entry.id: entry.family for entry in fits.drawing_entries()}
    assert named <= set(known)
    # De-tokenizers are downloads beside a language model.
    assert {known[name] for name in named} == set(known.values()) - {"dtok"}


def test_readme_names_templates_by_their_numbers():
    """(02) and so on, and those that need a download."""
    readme = text_of("README.md")
    named = set(re.findall(r"\b(\d\d)\b(?=[,)])", readme[readme.index("## First click") : readme.index("## Models")]))
    numbers = {name[:2] for name in TEMPLATES}
    needing = [name[:2] for name in TEMPLATES if "download" in name]
    assert f"Only templates {' and '.join(needing)} need a download" in readme
    assert named | {"01", *needing} == numbers


def test_readme_is_short():
    words = re.sub(r"\||-{3,}", " ", (ROOT / "README.md").read_text(encoding="utf-8")).split()
    assert len(words) <= 700


def test_the_docs_are_short():
    """Without tables, which grow with samplers, counts and models, the comparison of papers and code, and settings.md,
    which is written from the settings.
    """
    words = {}
    for page in {*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / name for name in ("papers.md", "settings.md")}:
        prose = [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
        words[page.name] = len(" ".join(prose).split())

    most = 7600
    longest = ", ".join(f"{name} {count}" for name, count in sorted(words.items(), key=lambda item: -item[1]))
    assert sum(words.values()) <= most, (
        f"without tables, docs/ has {sum(words.values())} words, more than {most}: {longest}. Shorten a page, "
        "or make a table of what has rows."
    )


def test_the_default_preset_of_the_accelerators():
    """The page of the command line names the preset that the nodes begin with."""
    (stated,) = re.findall(
        r"Without one, accelerators run with \*(\w+)\*, as the nodes do", text_of("docs/command_line.md")
    )

    schemas = json.loads((ROOT / "tests" / "nodes" / "schemas.json").read_text(encoding="utf-8"))
    begins = set()
    for about in schemas.values():
        for name, _, value, *choices in about["widgets"]:
            if name == "preset" and "fast" in choices[0]:
                begins.add(value)
    assert begins == {stated}


def measured(figure: str, row: str, column: str) -> str:
    """A cell of a table in docs/benchmarks.md, without its interval."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    begin, end = figures.markers(figure)
    lines = [line for line in page[page.index(begin) : page.index(end)].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (found,) = (line for line in cells if line[0] == row)
    return found[cells[0].index(column)].partition(" (")[0]


def test_readme_states_what_the_tables_say():
    one = "speed-up, batch 1"
    calls = "head calls, batch 1"
    passes = measured("llamagen", "LlamaGen, parallel", "passes, batch 1")
    plain = measured("llamagen", "LlamaGen", "passes, batch 1")
    faster = float(measured("llamagen", "LlamaGen, parallel", one))
    readme = text_of("README.md")
    assert f"LlamaGen needs {passes} passes instead of {plain}, and is {faster:.1f} times as fast" in readme

    hybrid = "FastHybrid, balanced"
    fewer = f"{measured('mar', hybrid, calls)} times instead of {int(measured('mar', 'MAR', calls)):,}"
    faster = float(measured("mar", hybrid, one))
    told = re.search(
        r"median PSNR of ([\d.]+) dB, and one image in ten is below ([\d.]+);", text_of("docs/benchmarks.md")
    )
    close, low = (float(number) for number in told.groups())
    assert f"{fewer}. It is {faster:.1f} times as fast," in readme
    assert f"most images differ little from MAR's (PSNR {close:.0f} dB; a tenth below {low:.0f})" in readme

    lazy = "LazyMAR, fast"
    right = float(measured("mar", lazy, "scene, %"))
    assert f"{float(measured('mar', lazy, one)):.1f} times as fast, and {right:.0f} % of its images" in readme
    assert abs(right - float(measured("mar", "MAR", "scene, %"))) < 1, "as many as MAR's"
