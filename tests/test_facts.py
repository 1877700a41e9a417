"""What the pages state about the pack is what the code says: versions, counts, sizes, names and figures."""

import json
import re
import sys
from pathlib import Path

import pytest
from fastar_nodes.cli import checks
from fastar_nodes.errors import UserError
from fastar_nodes.lab.docs import blocks, headlines, models_table
from fastar_nodes.lab.work import fits
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.runs import presets
from fastar_nodes.runs.memory import fitting
from fastar_nodes.samplers.mar.settings import FastHybridSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEMPLATES = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS += ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")


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
    *first, last = (card.memory for card in fitting.CARDS)
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
    ("docs/benchmarks.md", r"keeps (\d+) GiB for the driver", lambda: f"{fitting.TAKEN:g}"),
    ("docs/benchmarks.md", r"With \*lookahead_start\* (\d+), the first", lambda: preset("balanced", "lookahead_start")),
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
    assert blocks.with_block(readme, models_table.NAME, models_table.table()) == readme


def test_every_family_that_draws_is_in_the_table_of_models():
    named = {name for row in models_table.ROWS for name in row.entries}
    known = {entry.id: entry.family for entry in fits.drawing_entries()}
    assert named <= set(known)
    # De-tokenizers are downloads beside a language model.
    assert {known[name] for name in named} == set(known.values()) - {"dtok"}


def test_readme_names_templates_by_their_numbers():
    """(02) and so on, and those that need a download."""
    readme = text_of("README.md")
    told = readme[readme.index("## First click") : readme.index("## Which model first")]
    named = set(re.findall(r"\b(\d\d)\b(?=[,)])", told))
    numbers = {name[:2] for name in TEMPLATES}
    needing = [name[:2] for name in TEMPLATES if "download" in name]
    assert f"Only templates {' and '.join(needing)} need a download" in readme
    assert named | {"01", *needing} == numbers


def test_readme_is_short():
    """Without tables."""
    prose = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= 700


def test_the_docs_are_short():
    """Without tables, which grow with samplers and models, the comparison of papers and code, and generated pages."""
    words = {}
    left_out = {ROOT / "docs" / name for name in ("papers.md", "settings.md", "tables.md", "full_size.md")}
    for page in {*(ROOT / "docs").rglob("*.md")} - left_out:
        prose = [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
        words[page.name] = len(" ".join(prose).split())

    most = 8200
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


def test_the_summaries_are_the_tables():
    """Every page has what ``lab headlines`` writes from docs/tables.md."""
    for path, text in headlines.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m fastar_nodes.lab headlines"


def test_a_summary_of_a_row_that_is_gone_is_an_error():
    tables = headlines.Tables(
        headlines.TABLES.read_text(encoding="utf-8").replace("| FastHybrid, balanced ", "| gone ")
    )
    with pytest.raises(UserError, match="^headlines: the figure .* has no row 'FastHybrid, balanced' with a column"):
        headlines.summary(tables)


def test_a_summary_takes_the_row_that_it_names():
    rows = "| batch | sampler | speed-up |\n|---|---|---|\n| 1 | MAR | |\n| 1 | PAR | 2.5x (2 to 3) |"
    text = f"<!-- figure a: begin -->\n{rows}\n<!-- figure a: end -->"
    assert headlines.Tables(text).cell("a", "1 | PAR", "speed-up") == "2.5x"
