"""CSpD's published mode against recorded runs of the reference, and that a spoilt record is seen."""

import shutil

import pytest
import torch
from fastar_nodes.tools.parity import cspd as parity_cspd
from fastar_nodes.tools.parity import mar as parity_mar
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file

FILES = (parity_cspd.DATA, parity_cspd.DRAFT, parity_mar.MODEL, parity_mar.MODEL_CONFIG)


def verdicts(folder) -> dict[str, str]:
    with torch.no_grad():
        found = [judge(case) for case in parity_cspd.cases(folder, parity_mar.MODEL, parity_mar.MODEL_CONFIG)]
    return {outcome.name.removeprefix("mar/cspd."): outcome.verdict for outcome in found}


@pytest.fixture
def copied(mar_fixtures, tmp_path):
    """The files these cases need, free to be spoilt."""
    for name in FILES:
        shutil.copy(mar_fixtures / name, tmp_path)
    return tmp_path


def test_ratios_draws_and_whole_runs_agree(mar_fixtures):
    assert verdicts(mar_fixtures) == {
        f"{tag}.{kind}": "ok" for tag in ("t1", "t42") for kind in ("ratio", "again", "run")
    }


def test_the_records_hold_accepted_and_rejected_drafts(mar_fixtures):
    data = load_file(mar_fixtures / parity_cspd.DATA)
    accepted = (data["t42.verify_prob_cat"] > data["t42.verify_guess_cat"]).float().mean()
    assert 0.5 < accepted < 0.9 and not (data["t1.verify_prob_cat"] > data["t1.verify_guess_cat"]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "fails"),
    [
        ("t42.verify_mp_cat", lambda x: x + 0.01, {"t42.ratio", "t42.again"}),
        ("t42.verify_guess_cat", lambda x: 1 - x, {"t42.again", "t42.run"}),
        ("t42.out", lambda x: x + 3e-4, {"t42.run"}),
        ("t1.orders", lambda x: x.flip(1), {"t1.run"}),
    ],
)
def test_a_spoilt_record_fails(copied, name, change, fails):
    data = load_file(copied / parity_cspd.DATA)
    data[name] = change(data[name]).contiguous()
    save_file(data, copied / parity_cspd.DATA)
    found = verdicts(copied)
    assert {case for case, verdict in found.items() if verdict == "FAIL"} == fails and len(found) == 6


@pytest.mark.slow
def test_another_draft_fails(copied):
    state = load_file(copied / parity_cspd.DRAFT)
    state["z_proj.weight"] *= 1.05
    save_file(state, copied / parity_cspd.DRAFT)
    found = verdicts(copied)
    assert found["t42.run"] == "FAIL" and found["t42.ratio"] == "ok"
