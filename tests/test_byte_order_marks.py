"""Texts with a byte order mark, as Excel, PowerShell and editors on Windows write them, read as those without one."""

import codecs

import pytest
from fastar_nodes.lab.sweeps.spec import read_prompts
from fastar_nodes.model_loaders.files.checkpoint import parse_json, read_json, read_text

MARKED = {
    "UTF-8": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
}
PROMPTS = ["a red cat", "ein blauer Fuß"]


@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_prompts(tmp_path, marked):
    (tmp_path / "a.txt").write_bytes(marked("\r\n".join(PROMPTS)))
    assert read_prompts(tmp_path / "a.txt") == PROMPTS


def test_files_of_model_folders(tmp_path):
    (tmp_path / "config.json").write_bytes(MARKED["UTF-8"]('{"heads": 2}'))
    (tmp_path / "merges.txt").write_bytes(MARKED["UTF-8"]("a b\r\nb c\r\n"))
    assert read_json(tmp_path / "config.json", "checkpoint") == {"heads": 2}
    assert read_text(tmp_path / "merges.txt", "checkpoint") == "a b\nb c\n"
    assert parse_json('\ufeff{"heads": 2}', "the entry config", "checkpoint") == {"heads": 2}
