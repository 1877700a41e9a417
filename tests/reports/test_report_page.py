"""The example in docs/report.md is a report of today. ``python tests/reports/test_report_page.py`` writes it."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import fastar_nodes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "report.md"
SAMPLER, PRESET = "fasthybrid", "balanced"


def written() -> dict:
    """The entry that the page shows."""
    (found,) = re.findall(r"<!-- figure report: begin -->\n```json\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.S)
    return json.loads(found)


def test_the_example_has_the_settings_of_the_preset():
    pipe = fastar_nodes.load("demo")
    expected = asdict(pipe.settings(SAMPLER, preset=PRESET))
    assert written()["settings"] == expected, "write it again: python tests/reports/test_report_page.py"


def lines(run: dict) -> str:
    """An entry as JSON, one line for each of its names."""
    entries = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in run.items()]
    return "{\n" + ",\n".join(entries) + "\n}"


def write() -> None:
    """Write the example into the page."""
    from fastar_nodes.cli.main import main
    from fastar_nodes.lab.docs.blocks import with_block

    out = Path("build")
    out.mkdir(exist_ok=True)
    names = ["--samplers", f"mar,{SAMPLER}", "--label", "cat", "--seed", "7", "--set", f"preset={PRESET}"]
    assert main(["compare", *names, "--json", str(out / "example.json"), "--out", str(out / "example.png")]) == 0
    run = json.loads((out / "example.json").read_text(encoding="utf-8"))["runs"][-1]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_block(page, "report", f"```json\n{lines(run)}\n```"), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
