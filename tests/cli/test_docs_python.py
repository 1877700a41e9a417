"""The code of docs/python.md runs as it stands, block after block: on tiny models, and on the demo."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def run_the_page(folder: Path, monkeypatch, capsys) -> dict:
    """Run all blocks in a folder; returns the names that they define."""
    monkeypatch.chdir(folder)
    namespace: dict = {}
    for number, block in enumerate(blocks("docs/python.md")):
        exec(compile(block, f"docs/python.md, block {number}", "exec"), namespace)  # noqa: S102
        printed = capsys.readouterr().out
        # A comment behind a print quotes the beginning of what is printed.
        for quoted in re.findall(r"print\(error\)  # (.*?) \.\.\.$", block, re.M):
            assert printed.startswith(quoted)

    assert (folder / "cat.png").is_file()
    return namespace


def test_the_code_of_the_page_runs_and_prints_what_it_says(tiny_demo, tmp_path, monkeypatch, capsys):
    names = run_the_page(tmp_path, monkeypatch, capsys)
    assert names["pixels"].shape == (2, 16, 16, 3), "of the token model in the last block that decodes"


@pytest.mark.slow
def test_the_code_of_the_page_runs_on_the_demo(tmp_path, monkeypatch, capsys):
    names = run_the_page(tmp_path, monkeypatch, capsys)
    assert names["pixels"].shape == (2, 512, 512, 3), "of the token model in the last block that decodes"


def test_the_readme_shows_the_first_example():
    assert blocks("README.md") == blocks("docs/python.md")[:1]
