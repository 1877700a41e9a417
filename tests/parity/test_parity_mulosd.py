"""The recorded cases of MuLo-SD's geometry and of LANTERN's acceptance, and spoilt ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.tools.parity import mulosd as parity_mulosd
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent


def verdicts(folder: Path) -> dict[str, str]:
    return {outcome.name: outcome.verdict for outcome in map(judge, parity_mulosd.cases(folder))}


def test_all_recorded_cases_agree():
    geometry, acceptance = verdicts(HERE / "tar"), verdicts(HERE / "llamagen")
    assert geometry == {f"tar/mulosd_geometry.{i}": "ok" for i in range(8)}
    kinds = [
        f"{how}.{setting}" for how in ("greedy", "sample") for setting in ("off", "k8_d0.2", "k32_d0.4", "pp_k32_l3")
    ]
    names = ["nearest", *(f"case1.{kind}" for kind in kinds)]
    assert acceptance == {f"llamagen/lantern_accept.{name}": "ok" for name in names}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("R_X", lambda cells: cells[1:]),
        ("islands", lambda parts: parts[::-1]),
        ("waves", lambda parts: [*parts[:-1], [*parts[-1], 0]]),
        ("l", lambda radius: radius + 1),
        ("R_T", lambda cells: cells[1:]),
    ],
)
def test_a_changed_geometry_fails_its_case_alone(tmp_path, field, change):
    cases = json.loads((HERE / "tar" / "mulosd_geometry.json").read_text())
    cases[4][field] = change(cases[4][field])
    (tmp_path / "mulosd_geometry.json").write_text(json.dumps(cases))
    assert [name for name, verdict in verdicts(tmp_path).items() if verdict == "FAIL"] == ["tar/mulosd_geometry.4"]


@pytest.mark.parametrize(
    ("tensor", "spoilt"),
    [
        ("case1.greedy.k32_d0.4.best", ["case1.greedy.k32_d0.4"]),
        ("case1.sample.off.next_p", ["case1.sample.off"]),
        ("case1.sample.k8_d0.2.best", ["case1.sample.k8_d0.2"]),
        ("codebook", ["nearest"]),
    ],
)
def test_a_changed_number_fails_its_case_alone(tmp_path, tensor, spoilt):
    data = load_file(HERE / "llamagen" / "lantern_accept_io.safetensors")
    data[tensor].view(-1)[1] += 1
    save_file(data, tmp_path / "lantern_accept_io.safetensors")
    assert [n for n, verdict in verdicts(tmp_path).items() if verdict == "FAIL"] == [
        f"llamagen/lantern_accept.{name}" for name in spoilt
    ]


def test_damaged_and_empty_files_fail_without_a_traceback(tmp_path):
    data = (HERE / "llamagen" / "lantern_accept_io.safetensors").read_bytes()
    (tmp_path / "lantern_accept_io.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "mulosd_geometry.json").write_text("[]")
    wrong = {"tar/mulosd_geometry": "FAIL", "llamagen/lantern_accept": "FAIL"}
    assert verdicts(tmp_path) == wrong
    shutil.copyfile(HERE / "tar" / "README.md", tmp_path / "mulosd_geometry.json")
    save_file({"x": torch.zeros(1)}, tmp_path / "lantern_accept_io.safetensors")
    assert verdicts(tmp_path) == {"tar/mulosd_geometry": "FAIL", "llamagen/lantern_accept.nearest": "FAIL"}
