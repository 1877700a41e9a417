"""The number of the algorithms: images and counts of every sampler, recorded for the present one.

``python tests/lab/test_algorithm.py`` records new samplers, and all of them anew after an intended change, for which
``ALGORITHM`` in runs/registry.py is raised first. Images may differ from the recorded ones by rounding, because
processors and versions of PyTorch do.
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
from small_settings import BLOCKS, MASKED, TOKENS, small
from tiny_files import GPT_SIZE, write_gpt
from tiny_sweeps import source, write_files, write_mar

pytestmark = pytest.mark.slow
RECORDED = Path(__file__).with_name("algorithm.json")


def settings_of(name: str) -> dict[str, Any]:
    """Settings at which every part of a method works."""
    values = small(name)
    if name in MASKED:
        # LazyMAR's head cache skips nothing in few diffusion steps.
        values = {"steps": 6, "diffusion_steps": 24 if "lazymar" in name else 6, **values}
    if name == "bitdance":
        values = {**values, "diffusion_steps_end": 2}
    return values


# Tar's plain sampler is LlamaGen's.
NAMES = (*MASKED, *TOKENS, *BLOCKS)


def drawn(folder: Path) -> dict[str, tuple[np.ndarray, dict[str, int]]]:
    """Two images of every sampler on tiny models, and the counts."""
    files = write_files(folder)
    drafts = {MAR: write_mar(folder / "draft.safetensors", 9), LLAMAGEN: write_gpt(folder / "low.safetensors", 4)}
    par = write_gpt(folder / "par.safetensors", 5, 8, replace(GPT_SIZE, special=3))
    blocks = one_file(folder / "bitdance.safetensors")
    out = {}
    for name in NAMES:
        family = SAMPLERS[name].families[0]
        of_family = {MAR: (files.mar, files.kl), LLAMAGEN: (files.llamagen, files.vq), BITDANCE: (blocks, "auto")}
        model, decoder = of_family[family]
        draft = drafts.get(family, "auto")
        spec = Spec(str(model), (name,), decoder=str(decoder), draft=str(draft), seed=3)
        models = Models(spec, source(spec))
        prepared = models.prepare(choose(name, settings_of(name)), family, str(par if name == "par" else model))
        condition, _ = Conditions(spec, models).of(prepared.ready, 0, 2)
        pictures, report = draw(prepared, condition, spec.seed, 0)
        out[name] = pictures, dict(sorted(report.counts.items()))
    return out


def near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether images differ by rounding only: a token of another value at most."""
    return a.shape == b.shape and float((np.abs(a.astype(int) - b) <= 2).mean()) > 0.9


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return drawn(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("name", NAMES)
def test_pictures_and_counts_are_those_of_the_number(found, name):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded["algorithm"] == ALGORITHM, "record the images of the new number"
    pictures, counts = found[name]
    assert name in recorded["samplers"], "record the new sampler: python tests/lab/test_algorithm.py"
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

    # Under the same number only new samplers are recorded.
    before = json.loads(RECORDED.read_text(encoding="utf-8"))
    if before["algorithm"] == ALGORITHM:
        samplers |= {name: found for name, found in before["samplers"].items() if name in samplers}
    RECORDED.write_text(json.dumps({"algorithm": ALGORITHM, "samplers": samplers}, indent=1) + "\n", encoding="utf-8")
