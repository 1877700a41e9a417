"""verify: recorded cases pass, modified ones fail, other sizes work."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.model_loaders.mar import load_mar
from fastar_nodes.model_loaders.networks.mar import MAR
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.loop import Plan
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.tools.parity.cases import Case, Check, judge
from safetensors.torch import load_file, save_file
from tiny_files import MAR_SIZE, write


def verdicts(answer) -> dict[str, str]:
    """Verdict by case: ok, FAIL or yet."""
    return {line.split()[0]: line.split()[-1] for line in answer.out.splitlines()}


@pytest.mark.slow
def test_all_recorded_cases_agree(cli, mar_fixtures):
    answer = cli("verify", mar_fixtures)
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
    above = verdicts(cli("verify", mar_fixtures.parent))  # one folder per family
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
def test_a_changed_number_and_other_weights_fail(cli, mar_fixtures, tmp_path, file, name, at, change, failed):
    folder = _copy(mar_fixtures, tmp_path, "encdec.safetensors", "tiny_mar_f16.safetensors", "tiny_mar_config.json")
    state = load_file(folder / f"{file}.safetensors")
    state[name][at] += change
    save_file(state, folder / f"{file}.safetensors")
    answer = cli("verify", folder)
    found = [case for case, verdict in verdicts(answer).items() if verdict == "FAIL"]
    assert answer.code == 1 and len(found) == failed and "Traceback" not in answer.err
    assert len(verdicts(answer)) == 6 and (failed > 1 or found == ["mar/encdec.half.cond"])


def test_damaged_missing_and_wrong_files_fail_without_a_traceback(cli, mar_fixtures, tmp_path):
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
    answer = cli("verify", folder)
    found = verdicts(answer)
    wrong = {name for name, verdict in found.items() if verdict == "FAIL"}
    assert answer.code == 1 and "Traceback" not in answer.err
    assert wrong == {"mar/head", "mar/diffusion_tables", "mar/keys.mar_b", "mar/mask_schedule.L64_n8"}
    assert "tiny_mar_f16.safetensors is not beside it" in answer.err
    key_line = next(line for line in answer.out.splitlines() if "keys.mar_b" in line)
    assert float(key_line.split()[1]) == 3  # one of ours and one of theirs differ in shape, one is missing


def test_unreadable_folders_are_exit_code_2(cli, sentence, tmp_path):
    assert "not there" in sentence(cli("verify", tmp_path / "nosuch"))
    (tmp_path / "empty").mkdir()
    assert "no parity case" in sentence(cli("verify", tmp_path / "empty"))
    (tmp_path / "file").write_text("x")
    assert "no folder" in sentence(cli("verify", tmp_path / "file"))


def test_what_this_version_lacks_is_not_yet():
    outcome = judge(Case("x", None))
    assert outcome.verdict == "not yet" and outcome.line.split() == ["x", "-", "-", "not", "yet"]


def test_tars_folder_is_known_by_its_files(cli, tmp_path):
    """Its VQ case has the name of LlamaGen's, which needs other files."""
    (tmp_path / "tar").mkdir()
    for name in ("ar_tiny_io", "vq_tiny_io"):
        save_file({"x": torch.zeros(1)}, tmp_path / "tar" / f"{name}.safetensors")
    answer = cli("verify", tmp_path)
    assert answer.code == 1 and verdicts(answer) == {"tar/ar_tiny_io": "FAIL", "tar/vq_tiny_io": "FAIL"}
    assert "ar_tiny_state.safetensors is not beside it" in answer.err


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_cases_of_another_size_are_read_from_their_tensors(cli, tmp_path, cfg):
    """A network of 16 tokens, three images and other steps, in the same layout."""
    folder = tmp_path
    write(MAR(MAR_SIZE), folder / "tiny_mar_f16.safetensors", 4)
    (folder / "tiny_mar_config.json").write_text('{"encoder_num_heads": 2}')
    model = load_mar(folder / "tiny_mar_f16.safetensors", "fp32", heads=2)
    g = torch.Generator().manual_seed(0)
    batch, tokens, channels, count = 3, 16, 4, 20
    labels = torch.tensor([2, 0, 9])
    orders = torch.stack([torch.randperm(tokens, generator=g) for _ in range(batch)])
    first = torch.randn(batch, tokens, channels, generator=g)
    steps = torch.randn(batch, count, tokens, channels, generator=g).half().float()
    settings = MARSettings(ar_steps=5, diffusion_steps=count, cfg=cfg, cfg_schedule="linear", t_max=950)
    noise = SimpleNamespace(orders=lambda *_: orders, first=lambda *_: first, steps=lambda *_: steps)
    out = finish(mar(model, from_ids(labels.tolist()), settings, noise)).latents * model.latent_scale

    plan = Plan(orders, settings)
    firsts, rows = [], []
    for step in range(plan.steps):
        for image in range(batch):
            where = plan.ahead(step)[image].sort().values
            firsts.append(first[image, where])
            rows.append(steps[image][:, where])
        if cfg != 1:  # the reference also draws for the null branch
            rows += [torch.full_like(row, 9.0) for row in rows[-batch:]]
    left = [1 + (cfg - 1) * (tokens - max(1, tokens - end)) / tokens for end in plan.ends]
    save_file(
        {
            "e.orders": orders,
            "e.labels": labels,
            "e.n_pred": torch.tensor(plan.sizes),
            "e.cfg_iter": torch.tensor(left, dtype=torch.float64),
            "e.init_noise_cat": torch.cat(firsts),
            "e.step_noise_cat_f16": torch.cat(rows, 1).half(),
            "e.out": out.contiguous(),
        },
        folder / "sample_tokens.safetensors",
    )
    answer = cli("verify", folder)
    assert answer.code == 0 and verdicts(answer) == {"mar/sample_tokens.e": "ok"}, answer


def test_not_a_number_fails():
    bad, good = torch.tensor([float("nan")]), torch.zeros(1)
    for checks in ([Check(bad, good)], [Check(good, bad)], [Check(good, torch.zeros(2))], []):
        assert judge(Case("x", lambda checks=checks: checks)).verdict == "FAIL"
    assert judge(Case("x", lambda: [Check(good, good)])).verdict == "ok"
