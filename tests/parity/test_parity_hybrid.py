"""Harmon and UniPic against recorded runs of the reference, and that swapped diffusion tables are seen."""

import importlib.util
import json
import shutil

import pytest
import torch
from fastar_nodes.tools.parity import hybrid as parity
from fastar_nodes.tools.parity.cases import judge

FAMILIES = ("harmon", "unipic")
# Settled by arithmetic alone, or without the large networks.
QUICK = ("tables", "schedule", "pos_embed", "shapes", "prompts")

pytestmark = pytest.mark.usefixtures("one_thread")


def verdicts(folder, *kinds: str) -> dict[str, str]:
    cases = [case for case in parity.cases(folder) if case.name.split("/")[1].split(".")[0] in kinds]
    with torch.no_grad():
        return {case.name: judge(case).verdict for case in cases}


@pytest.fixture(params=FAMILIES)
def folder(request, root):
    return root / "tests" / "parity" / request.param


def test_networks_and_runs_agree(folder):
    found = verdicts(folder, "inside", "sample", "sample_official")
    assert set(found.values()) == {"ok"} and len(found) >= 5


def test_tables_schedules_shapes_and_prompts_agree(folder):
    found = verdicts(folder, *QUICK)
    words = "ok" if importlib.util.find_spec("tokenizers") else "not yet"
    odd = {name: verdict for name, verdict in found.items() if verdict != "ok"}
    qwen = {f"{folder.name}/prompts.qwen": "not yet"}
    assert odd == (qwen if words == "ok" else {**qwen, f"{folder.name}/prompts.tiny": words})
    assert len(found) > 20


@pytest.mark.slow
def test_the_other_family_s_largest_beta_fails(folder, tmp_path):
    for name in ("hybrid_tables.safetensors", "hybrid_config.json", parity.MODEL, "hybrid_sample_official.safetensors"):
        shutil.copy(folder / name, tmp_path)
    shutil.copy(folder / "hybrid_sample_official.json", tmp_path)
    config = json.loads((tmp_path / "hybrid_config.json").read_text())
    config["diffusion"]["max_beta"] = 1.199 - config["diffusion"]["max_beta"]
    (tmp_path / "hybrid_config.json").write_text(json.dumps(config))
    found = verdicts(tmp_path, "tables", "sample_official")
    clipped = {name for name in found if name.endswith("c")}
    assert {name for name, verdict in found.items() if verdict == "ok"} == clipped and clipped


def test_a_missing_file_is_a_failed_case(folder, tmp_path):
    shutil.copy(folder / "hybrid_tables.safetensors", tmp_path)
    outcome = judge(parity.cases(tmp_path)[0])
    assert outcome.verdict == "FAIL" and "hybrid_config.json" in outcome.why
