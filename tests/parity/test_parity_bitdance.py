"""BitDance's recorded cases agree, and a changed number fails its case."""

import shutil
from pathlib import Path

import pytest
import torch
from fastar_nodes.lab.parity import bitdance
from fastar_nodes.lab.parity.cases import judge
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent / "bitdance"


@torch.no_grad()
def verdicts(folder: Path, *only: str) -> dict[str, str]:
    """Case to ok, FAIL or not yet, of the cases whose names behind the family begin with one of ``only``."""
    chosen = [case for case in bitdance.cases(folder) if case.name.partition("/")[2].startswith(only or ("",))]
    return {outcome.name: outcome.verdict for outcome in map(judge, chosen)}


@pytest.mark.slow
def test_all_recorded_cases_agree():
    found = verdicts(HERE)
    assert set(found.values()) == {"ok"}, found
    kinds = {"A.b6": 3, "A.b7": 4, "B.b6": 3, "B.b7": 3, "f": 2, "i1": 8, "i4": 4, "prompts": 2, "keys": 7}
    assert {kind: sum(name.startswith(f"bitdance/{kind}") for name in found) for kind in kinds} == kinds
    assert {f"bitdance/{letter}.b{n}" for letter in "AB" for n in (1, 2, 3, 4, 5, 8)} <= set(found)


def test_the_quick_cases_agree():
    found = verdicts(HERE, "A.b1", "A.b4", "A.b6.cfg2.5", "B.b7.sq", "i4.cfg", "prompts", "keys.B_4x")
    assert set(found.values()) == {"ok"} and len(found) == 9, found


# Recorded file, tensor, what is added to its last number, and the case that fails.
SPOILT = [
    ("bitdance_t2i_io.safetensors", "b1.pos.8x8", 1e-6, "A.b1"),
    ("bitdance_t2i_io.safetensors", "b2.embeds", 1e-4, "A.b2"),
    ("bitdance_t2i_io.safetensors", "b3.causal.1", 1e-4, "A.b3"),
    ("bitdance_t2i_io.safetensors", "b3.hidden", 1e-4, "A.b3"),
    ("bitdance_t2i_io.safetensors", "b3.logits", 1e-3, "A.b3"),
    ("bitdance_t2i_io.safetensors", "b4.hidden", 1e-4, "A.b4"),
    ("bitdance_t2i_io.safetensors", "b5.out", 1e-4, "A.b5"),
    ("bitdance_t2i_io.safetensors", "b6.cfg1.n4.path", 1e-3, "A.b6.cfg1.n4"),
    ("bitdance_t2i_io.safetensors", "b6.cfg1.n4.pre", 1e-3, "A.b6.cfg1.n4"),
    ("bitdance_diffusers_io.safetensors", "b7.sq.cfg1.cond", 1e-3, "B.b7.sq.cfg1"),
    ("bitdance_diffusers_io.safetensors", "b7.sq.cfg1.pre", 1e-3, "B.b7.sq.cfg1"),
    ("bitdance_diffusers_io.safetensors", "b7.sq.cfg1.tokens", 2, "B.b7.sq.cfg1"),
    ("bitdance_diffusers_io.safetensors", "b7.sq.cfg1.image", 1e-3, "B.b7.sq.cfg1"),
    ("bitdance_diffusers_io.safetensors", "b7.sq.cfg1.image_u8", 2, "B.b7.sq.cfg1"),
    ("bitdance_diffusers_io.safetensors", "b8.encoded", 1e-4, "B.b8"),
    ("bitdance_diffusers_io.safetensors", "b8.in_order", 2, "B.b8"),
    ("bitdance_imagenet_io.safetensors", "i4.freqs_cis", 1e-4, "i4.rope"),
    ("bitdance_imagenet_io.safetensors", "i4.cfg.pre0", 1e-3, "i4.cfg"),
    ("bitdance_imagenet_io.safetensors", "i4.cfg.start0", 1e-1, "i4.cfg"),
    ("bitdance_formula_io.safetensors", "f1.out", 1e-4, "f1"),
    ("bitdance_formula_io.safetensors", "f2.image", 1e-4, "f2"),
]


@pytest.mark.parametrize(("name", "tensor", "add", "case"), SPOILT, ids=lambda value: str(value)[:30])
@pytest.mark.fast_cases(4)
def test_a_changed_number_fails_its_case(tmp_path, name, tensor, add, case):
    for path in HERE.iterdir():
        if path.name != name:
            (tmp_path / path.name).symlink_to(path)

    data = load_file(HERE / name)
    flat = data[tensor].view(-1)
    if flat.dtype == torch.int8:
        flat[-1] = -flat[-1]
    elif flat.dtype == torch.uint8:
        flat[-1] = flat[-1] + add if flat[-1] < 128 else flat[-1] - add
    else:
        flat[-1] += add
    save_file(data, tmp_path / name)
    assert verdicts(tmp_path, case)[f"bitdance/{case}"] == "FAIL"


def test_a_missing_file_is_one_failed_case(tmp_path):
    shutil.copy(HERE / "bitdance_t2i_io.safetensors", tmp_path)
    assert verdicts(tmp_path) == {"bitdance/bitdance_t2i_io": "FAIL"}
