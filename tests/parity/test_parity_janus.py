"""The recorded cases of Janus, a spoilt one, and transformers' layout of the same weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.tools.parity import janus as parity_janus
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).with_name("janus")

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def verdicts(folder: Path) -> dict[str, str]:
    """Case to ok or FAIL."""
    return {outcome.name: outcome.verdict for outcome in map(judge, parity_janus.cases(folder))}


def in_transformers_layout(folder: Path) -> Path:
    """The weights of ``original`` under transformers' names, with what pictures do not need."""
    rules = json.loads((FOLDER / "janus_rename.json").read_text())["rules"]
    state = {}
    for name, tensor in load_file(FOLDER / "original/model.safetensors").items():
        rule = next(rule for rule in rules if re.fullmatch(rule["from"], name))
        if rule["op"] == "copy":
            state[re.sub(rule["from"], rule["to"], name)] = tensor
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    text = json.loads((FOLDER / "original/config.json").read_text())["language_config"]
    (folder / "config.json").write_text(json.dumps({"model_type": "janus", "text_config": text}))
    shutil.copyfile(FOLDER / "transformers/tokenizer.json", folder / "tokenizer.json")
    return folder


def test_all_recorded_cases_agree():
    found = verdicts(FOLDER)
    assert set(found.values()) == {"ok"}, found
    kinds = {"j1": 1, "j2": 1, "j3": 2, "j4": 10, "j5": 3, "j6": 1, "j7": 1, "j8": 3, "j9": 1, "j10": 2, "j11": 2}
    counted = {kind: sum(name.split("/")[1].split(".")[0] == kind for name in found) for kind in kinds}
    assert counted == kinds and len(found) == sum(kinds.values()) + 2


def test_transformers_layout_and_a_changed_number(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "x", ignore=shutil.ignore_patterns("transformers", "sharded"))
    in_transformers_layout(tmp_path / "x/transformers")
    (tmp_path / "x/janus_sharded_io.safetensors").unlink()
    io = load_file(tmp_path / "x/janus_io.safetensors")
    io["j2.logits"][1, -1, 0] += 1e-4
    save_file(io, tmp_path / "x/janus_io.safetensors")
    found = verdicts(tmp_path / "x")
    assert [name for name, verdict in found.items() if verdict != "ok"] == ["janus/j2"]
    assert "janus/j9" in found
