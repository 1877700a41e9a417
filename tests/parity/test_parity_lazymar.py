"""LazyMAR against recorded runs of the published code, and that a spoilt record is seen."""

import pytest
import torch
from fastar_nodes.tools.parity import lazymar as parity_lazymar
from fastar_nodes.tools.parity import mar as parity_mar
from fastar_nodes.tools.parity.cases import judge
from safetensors.torch import load_file, save_file

RUNS = "lazymar_runs.safetensors"


def verdicts(folder, kind: str = "mar/lazymar") -> dict[str, str]:
    with torch.no_grad():
        found = [judge(case) for case in parity_mar.cases(folder) if case.name.startswith(kind)]
    return {outcome.name.removeprefix("mar/lazymar."): outcome.verdict for outcome in found}


@pytest.fixture
def folder(mar_fixtures, tmp_path):
    """The recorded runs beside their model: the tiny MAR with every class row eight times and three more head blocks."""
    state = load_file(mar_fixtures / parity_mar.MODEL)
    for name, value in list(state.items()):
        if name.startswith(("encoder_pos", "decoder_pos")):
            state[name] = torch.cat([value[:, :8].repeat_interleave(8, 1), value[:, 8:]], 1)
        for j in range(3):
            if f"res_blocks.{j}." in name:
                value = value.clone()
                if "adaLN" in name:
                    value[2 * len(value) // 3 :] *= 0.02
                state[name.replace(f"res_blocks.{j}.", f"res_blocks.{j + 3}.")] = value
    save_file(state, tmp_path / parity_lazymar.MODEL)
    (tmp_path / parity_mar.MODEL_CONFIG).write_bytes((mar_fixtures / parity_mar.MODEL_CONFIG).read_bytes())
    (tmp_path / parity_lazymar.DATA).write_bytes((mar_fixtures / RUNS).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "tag", ["full", *(pytest.param(tag, marks=pytest.mark.slow) for tag in ("tokcache", "baseline"))]
)
def test_choices_conditions_and_whole_runs_agree(folder, tag):
    """``full`` has all caches, ``tokcache`` all but the head's, ``baseline`` none."""
    parts = ("run",) if tag == "baseline" else ("chosen", "conditions", "run")
    assert verdicts(folder, f"mar/lazymar.{tag}.") == dict.fromkeys((f"{tag}.{part}" for part in parts), "ok")


@pytest.mark.slow
def test_a_spoilt_record_fails_where_it_is_spoilt(folder):
    data = load_file(folder / parity_lazymar.DATA)
    mask, scores = data["tokcache.prune_keep_mask"], data["tokcache.prune_vcos"]
    # A row that was left out for its similarity, in the place of the least similar one that was not asked for.
    last, score = mask[-1, 0].bool(), scores[-1, 0]
    best = int(score.where(~last, -2.0).argmax())
    mask[-1, 0, best], mask[-1, 0, int(score.where(last, 2.0).argmin())] = 1, 0
    save_file(data, folder / parity_lazymar.DATA)
    assert verdicts(folder, "mar/lazymar.tokcache.chosen") == {"tokcache.chosen": "FAIL"}


def test_a_missing_model_is_one_failed_case(folder):
    (folder / parity_lazymar.MODEL).unlink()
    assert verdicts(folder) == {"mar/lazymar": "FAIL"}
