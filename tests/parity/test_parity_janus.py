"""The recorded cases of Janus, a spoilt one, and transformers' layout of the same weights."""

import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.tools.parity import janus as parity_janus
from fastar_nodes.tools.parity.cases import judge
from janus_files import FOLDER, in_transformers_layout
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def verdicts(folder: Path) -> dict[str, str]:
    """Case to ok or FAIL."""
    return {outcome.name: outcome.verdict for outcome in map(judge, parity_janus.cases(folder))}


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
