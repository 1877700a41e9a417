"""NextStep's recorded cases agree, and a changed number fails its case."""

import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.lab.parity import nextstep
from fastar_nodes.lab.parity.cases import judge
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent / "nextstep"


@torch.no_grad()
def verdicts(folder: Path, *only: str) -> dict[str, str]:
    """Case to ok, FAIL or not yet, of the cases whose names behind the family begin with one of ``only``."""
    chosen = [case for case in nextstep.cases(folder) if case.name.partition("/")[2].startswith(only or ("",))]
    return {outcome.name: outcome.verdict for outcome in map(judge, chosen)}


def test_all_recorded_cases_agree():
    found = verdicts(HERE)
    assert set(found.values()) == {"ok"}, found
    kinds = {"s4": 9, "s6": 9, "e": 5, "prep": 2, "prompts": 2, "keys": 2}
    assert {kind: sum(name.startswith(f"nextstep/{kind}") for name in found) for kind in kinds} == kinds
    assert {f"nextstep/s{n}" for n in (1, 2, 3, 5)} <= set(found)


# Recorded file, tensor, what is added to its last number, and the case that fails.
IO, EDITS = nextstep.IO, nextstep.EDITS
SPOILT = [
    (IO, "s1.image", 1e-4, "s1"),
    (IO, "s1.mean.psz2", 1e-4, "s1"),
    (IO, "s1.sample", 1e-4, "s1"),
    (IO, "s2.tokens", 1e-6, "s2"),
    (IO, "s3.v", 1e-4, "s3"),
    (IO, "s4.em.cfg1.out", 1e-4, "s4.em.cfg1"),
    (IO, "s4.em0.cfg4.out", 1e-3, "s4.em0.cfg4"),
    (IO, "s5.hidden", 1e-4, "s5"),
    (IO, "s5.c", 1e-4, "s5"),
    (IO, "s6.flow.ode.tokens", 1e-3, "s6.flow.ode"),
    (IO, "s6.flow.ode.cond", 1e-3, "s6.flow.ode"),
    (IO, "s6.flow.ode.image_u8", 2, "s6.flow.ode"),
    (IO, "s6.flow.ode.ids", 1, "s6.flow.ode"),
    (EDITS, "e3.source", 1e-3, "e3"),
    (EDITS, "e3.latents", 1e-3, "e3"),
    (EDITS, "prep_0.center", 1, "prep_0"),
]


@pytest.mark.parametrize(("name", "tensor", "add", "case"), SPOILT, ids=lambda value: str(value)[:30])
@pytest.mark.fast_cases(every=4)
def test_a_changed_number_fails_its_case(tmp_path, name, tensor, add, case):
    for path in HERE.iterdir():
        if path.name != name:
            (tmp_path / path.name).symlink_to(path)

    data = load_file(HERE / name)
    flat = data[tensor].view(-1)
    flat[-1] = flat[-1] - add if data[tensor].dtype == torch.uint8 and flat[-1] > 127 else flat[-1] + add
    save_file(data, tmp_path / name)
    assert verdicts(tmp_path, case)[f"nextstep/{case}"] == "FAIL"


def test_a_missing_file_is_one_failed_case(tmp_path):
    shutil.copy(HERE / IO, tmp_path)
    assert verdicts(tmp_path) == {"nextstep/nextstep_io": "FAIL"}
