"""Texts with a byte order mark, as Excel, PowerShell and editors on Windows write them, read as those without one."""

import codecs
import json
import re
import sys
from pathlib import Path

import pytest
from fastar_nodes.lab.gpu import store as gpu_store
from fastar_nodes.lab.sweeps.folder import Folder
from fastar_nodes.lab.sweeps.spec import read_prompts, read_spec
from fastar_nodes.model_loaders.files.checkpoint import parse_json, read_json, read_text

ROOT = Path(__file__).resolve().parents[1]
MARKED = {
    "UTF-8": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
}
PROMPTS = ["a red cat", "ein blauer Fuß"]
SPEC = {"samplers": ["mar"], "images": 5, "set": {"cfg": 2.5}}
TOML = 'samplers = ["mar"]\nimages = 5\n[set]\ncfg = 2.5\n'


@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_prompts(tmp_path, marked):
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in PROMPTS]
    for name, text in {"a.txt": "\r\n".join(PROMPTS), "a.jsonl": "\r\n".join(lines)}.items():
        (tmp_path / name).write_bytes(marked(text))
        assert [entry["prompt"] for entry in read_prompts(tmp_path / name)] == PROMPTS


@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_prompts_in_the_folders_of_benchmarks(tmp_path, marked):
    for folder in ("dpg", "hps"):
        (tmp_path / folder).mkdir()
    for i, prompt in enumerate(PROMPTS):
        (tmp_path / "dpg" / f"{i}.txt").write_bytes(marked(prompt))
    (tmp_path / "hps" / "photo.json").write_bytes(marked(json.dumps(PROMPTS)))
    for folder in ("dpg", "hps"):
        assert [entry["prompt"] for entry in read_prompts(tmp_path / folder)] == PROMPTS


@pytest.mark.parametrize("marked", MARKED.values(), ids=MARKED)
def test_specs_of_sweeps(tmp_path, marked):
    texts = {"a.json": json.dumps(SPEC)}
    if sys.version_info >= (3, 11):
        texts["a.toml"] = TOML
    for name, text in texts.items():
        (tmp_path / name).write_bytes(marked(text))
        spec = read_spec(tmp_path / name)
        assert spec.samplers == ("mar",) and spec.images == 5 and spec.set == {"cfg": (2.5,)}


def test_files_of_model_folders(tmp_path):
    (tmp_path / "config.json").write_bytes(MARKED["UTF-8"]('{"heads": 2}'))
    (tmp_path / "merges.txt").write_bytes(MARKED["UTF-8"]("a b\r\nb c\r\n"))
    assert read_json(tmp_path / "config.json", "checkpoint") == {"heads": 2}
    assert read_text(tmp_path / "merges.txt", "checkpoint") == "a b\nb c\n"
    assert parse_json('\ufeff{"heads": 2}', "the entry config", "checkpoint") == {"heads": 2}


def test_files_of_results(tmp_path):
    (tmp_path / "manifest.json").write_bytes(MARKED["UTF-8"]('{"images": 5}'))
    assert Folder(tmp_path).read_json("manifest.json") == {"images": 5}

    (tmp_path / "machine.json").write_bytes(MARKED["UTF-8"]('{"cpu": "x"}'))
    assert gpu_store.machine_of(tmp_path) == {"cpu": "x"}


def test_every_reader_of_texts_leaves_out_a_mark():
    """In the pack, lab/ and the examples; files below /proc have none."""
    plain = re.compile(r"""read_text\((encoding="utf-8")?\)""")
    paths = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in ("tests", ".venv")]
    lines = [(path, line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 30_000
    assert [(path.name, line) for path, line in lines if plain.search(line) and "/proc/" not in line] == []
