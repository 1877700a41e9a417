"""The code of docs/python.md runs as it stands, block after block, on the demo."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def test_the_code_of_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for number, block in enumerate(blocks("docs/python.md")):
        exec(compile(block, f"docs/python.md, block {number}", "exec"), namespace)  # noqa: S102
        printed = capsys.readouterr().out
        # A comment behind a print quotes the beginning of what is printed.
        for quoted in re.findall(r"print\(error\)  # (.*?) \.\.\.$", block, re.M):
            assert printed.startswith(quoted)

    assert (tmp_path / "cat.png").is_file()
    assert namespace["pixels"].shape == (2, 128, 128, 3), "of the token model in the last block that decodes"


def test_other_pages_show_the_first_example():
    example = blocks("docs/python.md")[0]
    assert blocks("docs/command_line.md") == blocks("README.md") == [example]
