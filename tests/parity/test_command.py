"""lab parity: recorded cases pass, modified ones fail."""

import json
import shutil

import pytest
import torch
from fastar_nodes.lab.parity.cases import Case, Check, judge
from safetensors.torch import load_file, save_file


def verdicts(answer) -> dict[str, str]:
    """Verdict by case: ok, FAIL or yet."""
    return {line.split()[0]: line.split()[-1] for line in answer.out.splitlines()}


@pytest.mark.slow
def test_all_recorded_cases_agree(lab, mar_fixtures):
    answer = lab("parity", mar_fixtures)
    found = verdicts(answer)
    assert answer.code == 0, answer
    assert set(found.values()) == {"ok"}
    kinds = {"encdec": 6, "head": 25, "diffusion_tables": 13, "sample_tokens": 1, "vae": 2, "keys": 5, "cspd": 6}
    for kind, count in kinds.items():
        assert sum(name.startswith(f"mar/{kind}.") for name in found) == count, kind
    for line in answer.out.splitlines():
        name, error, tolerance, _ = line.split()
        assert float(error) <= float(tolerance) and (
            float(tolerance) <= 1e-4 or ".s1" in name or ".s2" in name or name.endswith((".a", ".b"))
        )
    above = verdicts(lab("parity", mar_fixtures.parent))  # one folder per family
    assert found.items() <= above.items() and {*above.values()} <= {"ok", "yet"}


def _copy(mar_fixtures, tmp_path, *names):
    folder = tmp_path / "case"
    folder.mkdir()
    for name in names:
        shutil.copy(mar_fixtures / name, folder)
    return folder


@pytest.mark.parametrize(
    "file, name, at, change, failed",
    [
        ("encdec", "half.dec_out", (1, 5, 7), 3e-4, 1),  # this case alone
        ("tiny_mar_f16", "decoder_blocks.0.attn.qkv.weight", 0, 0.05, 6),  # all
    ],
)
def test_a_changed_number_and_other_weights_fail(lab, mar_fixtures, tmp_path, file, name, at, change, failed):
    folder = _copy(mar_fixtures, tmp_path, "encdec.safetensors", "tiny_mar_f16.safetensors", "tiny_mar_config.json")
    state = load_file(folder / f"{file}.safetensors")
    state[name][at] += change
    save_file(state, folder / f"{file}.safetensors")
    answer = lab("parity", folder)
    found = [case for case, verdict in verdicts(answer).items() if verdict == "FAIL"]
    assert answer.code == 1 and len(found) == failed and "Traceback" not in answer.err
    assert len(verdicts(answer)) == 6 and (failed > 1 or found == ["mar/encdec.half.cond"])


def test_damaged_missing_and_wrong_files_fail_without_a_traceback(lab, mar_fixtures, tmp_path):
    folder = _copy(mar_fixtures, tmp_path, "head.safetensors", "mask_schedule.json", "mar_b_keys.json")
    data = (folder / "head.safetensors").read_bytes()
    (folder / "diffusion_tables.safetensors").write_bytes(data[: len(data) // 2])
    keys = json.loads((folder / "mar_b_keys.json").read_text())
    keys["encoder_norm.weight"] = [769]
    keys.pop("mask_token")
    (folder / "mar_b_keys.json").write_text(json.dumps(keys))
    schedule = json.loads((folder / "mask_schedule.json").read_text())
    schedule["L64_n8"]["n_pred"][3] += 1
    (folder / "mask_schedule.json").write_text(json.dumps(schedule))
    answer = lab("parity", folder)
    found = verdicts(answer)
    wrong = {name for name, verdict in found.items() if verdict == "FAIL"}
    assert answer.code == 1 and "Traceback" not in answer.err
    assert wrong == {"mar/head", "mar/diffusion_tables", "mar/keys.mar_b", "mar/mask_schedule.L64_n8"}
    assert "tiny_mar_f16.safetensors is not beside it" in answer.err
    key_line = next(line for line in answer.out.splitlines() if "keys.mar_b" in line)
    assert float(key_line.split()[1]) == 3  # one of ours and one of theirs differ in shape, one is missing


def test_unreadable_folders_are_exit_code_2(lab, sentence, tmp_path):
    assert "is missing" in sentence(lab("parity", tmp_path / "nosuch"))
    (tmp_path / "empty").mkdir()
    assert "no parity case" in sentence(lab("parity", tmp_path / "empty"))
    (tmp_path / "file").write_text("x")
    assert "not a folder" in sentence(lab("parity", tmp_path / "file"))
    said = sentence(lab("parity", "~nosuchuser/x"))
    assert said.startswith("DIR: the home folder in ~nosuchuser/x is unknown")


def test_tars_folder_is_known_by_its_files(lab, tmp_path):
    """Its VQ case has the name of LlamaGen's, which needs other files."""
    (tmp_path / "tar").mkdir()
    for name in ("ar_tiny_io", "vq_tiny_io"):
        save_file({"x": torch.zeros(1)}, tmp_path / "tar" / f"{name}.safetensors")
    answer = lab("parity", tmp_path)
    assert answer.code == 1 and verdicts(answer) == {"tar/ar_tiny_io": "FAIL", "tar/vq_tiny_io": "FAIL"}
    assert "ar_tiny_state.safetensors is not beside it" in answer.err


def test_not_a_number_fails():
    bad, good = torch.tensor([float("nan")]), torch.zeros(1)
    for checks in ([Check(bad, good)], [Check(good, bad)], [Check(good, torch.zeros(2))], []):
        assert judge(Case("x", lambda checks=checks: checks)).verdict == "FAIL"
    assert judge(Case("x", lambda: [Check(good, good)])).verdict == "ok"
    assert judge(Case("x", None)).verdict == "not yet"
