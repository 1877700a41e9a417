"""The number of the algorithms: images and counts of every sampler, recorded for the present one.

After an intended change raise ``ALGORITHM`` in runs/registry.py and run ``python
tests/lab/test_algorithm.py``, which records them anew. Images may differ from
the recorded ones by rounding, because processors and versions of PyTorch do.
"""

import base64
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
    import checkout  # noqa: F401 - makes the package importable

import numpy as np
import pytest
from block_models import one_file
from fastar_nodes.lab.sweeps.spec import Spec
from fastar_nodes.lab.sweeps.work import Conditions, Models, draw
from fastar_nodes.runs.choice import choose
from fastar_nodes.runs.registry import ALGORITHM, BITDANCE, LLAMAGEN, MAR, SAMPLERS
from tiny_files import GPT_SIZE, write_gpt
from tiny_sweeps import source, write_files, write_mar

pytestmark = pytest.mark.slow
RECORDED = Path(__file__).with_name("algorithm.json")
STEPS = {"steps": 6, "diffusion_steps": 6}
LAZY = {"refresh_period": 3, "start_step": 1, "computed_ratio": 0.3, "ratio_schedule": "stretched"}
LAZY |= {"head_cache": True}
HYBRID = {"lookahead": 2, "threshold": 0.7, "guided_steps": 2, "lookahead_start": 0}
STAGED = {"diffusion_steps_end": 3, "reconstruction_steps": 2, "first_share": 0.5, "detail_share": 0.25}
DRAFTED = {"mode": "lossless", "draft_length": 3, "prefill_ratio": 0.2}
# Settings at which every part of a method works. Tar's plain sampler is LlamaGen's.
SETTINGS: dict[str, dict[str, Any]] = {
    "mar": STEPS,
    "fasthybrid": {**STEPS, **HYBRID},
    "lazymar": {**STEPS, **LAZY},
    "gtr": {**STEPS, **STAGED},
    "cspd": {**STEPS, **DRAFTED},
    "fasthybrid+lazymar": {**STEPS, **HYBRID, **LAZY},
    "gtr+lazymar": {**STEPS, **STAGED, **LAZY},
    "cspd+lazymar": {**STEPS, **DRAFTED, **LAZY},
    "llamagen": {},
    "par": {},
    "zipar": {"window": 2},
    "mulosd": {"tau": 0.05},
    "bitdance": {"diffusion_steps": 6, "diffusion_steps_end": 3, "cfg": 2.0},
}


def drawn(folder: Path) -> dict[str, tuple[np.ndarray, dict[str, int]]]:
    """Two images of every sampler on tiny models, and the counts."""
    files = write_files(folder)
    small = {MAR: write_mar(folder / "draft.safetensors", 9), LLAMAGEN: write_gpt(folder / "low.safetensors", 4)}
    par = write_gpt(folder / "par.safetensors", 5, 8, replace(GPT_SIZE, special=3))
    blocks = one_file(folder / "bitdance.safetensors")
    out = {}
    for name, values in SETTINGS.items():
        family = SAMPLERS[name].families[0]
        of_family = {MAR: (files.mar, files.kl), LLAMAGEN: (files.llamagen, files.vq), BITDANCE: (blocks, "auto")}
        model, decoder = of_family[family]
        draft = small.get(family, "auto")
        spec = Spec(str(model), (name,), decoder=str(decoder), draft=str(draft), seed=3)
        models = Models(spec, source(spec))
        prepared = models.prepare(choose(name, values), family, str(par if name == "par" else model))
        condition, _ = Conditions(spec, models).of(prepared.ready, 0, 2, {})
        pictures, report = draw(prepared, condition, spec.seed, 0)
        out[name] = pictures, dict(sorted(report.counts.items()))
    return out


def near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether images differ by rounding only: a token of another value at most."""
    return a.shape == b.shape and float((np.abs(a.astype(int) - b) <= 2).mean()) > 0.9


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return drawn(tmp_path_factory.mktemp("weights"))


def test_all_samplers_are_recorded():
    assert set(SETTINGS) == set(SAMPLERS) - {"tar"} and SAMPLERS["tar"].run is SAMPLERS["llamagen"].run


@pytest.mark.parametrize("name", SETTINGS)
def test_pictures_and_counts_are_those_of_the_number(found, name):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded["algorithm"] == ALGORITHM, "record the images of the new number"
    pictures, counts = found[name]
    expected = recorded["samplers"][name]
    before = np.frombuffer(base64.b64decode(expected["pictures"]), np.uint8).reshape(expected["shape"])
    remedy = "raise ALGORITHM in runs/registry.py if the change is intended"
    assert near(pictures, before), remedy
    assert set(counts) == set(expected["counts"]), remedy
    # A decision on the brink may fall the other way on another processor.
    assert all(abs(counts[k] - n) <= 0.1 * n + 2 for k, n in expected["counts"].items()), remedy


def test_pictures_of_another_seed_are_not_near(found):
    """The comparison can fail."""
    for pictures, _ in found.values():
        assert not near(pictures[:1], pictures[1:])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        results = drawn(Path(made))
    coded = {name: base64.b64encode(p.tobytes()).decode() for name, (p, _) in results.items()}
    samplers = {n: {"shape": p.shape, "pictures": coded[n], "counts": counts} for n, (p, counts) in results.items()}
    RECORDED.write_text(json.dumps({"algorithm": ALGORITHM, "samplers": samplers}, indent=1) + "\n", encoding="utf-8")
