"""The steps of check on a pretended CUDA device, in fp32 and bf16; as tests/samplers/test_cuda_dry_run.py."""

import dataclasses

import pytest
import torch
from fastar_nodes.cli import checks
from fastar_nodes.cli.subject import Subject
from fastar_nodes.pipeline import Pipeline
from fastar_nodes.runs import loading
from fastar_nodes.runs.conditions import ConditionBuilder
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs
from pretended_cuda import CUDA, MEMORY, pretended_cuda
from waits import moved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None, reason="PyTorch is a CPU build: run make dry-run, which installs one for CUDA"
    ),
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mar", "hybrid", "llamagen", "par"])
def test_steps_on_a_pretended_device(files, monkeypatch, kind, dtype):
    family = {"par": "llamagen"}.get(kind, kind)
    choice = str(getattr(files, kind))
    decoder = str(files.kl if kind in ("mar", "hybrid") else files.vq)
    source = loading.Source(lambda name, _: loading.typed_path(name, "model"), torch.device("cpu"), "fp32")
    ready = loading.load(family, choice, source, decoder)

    def few(pipe, name, preset="custom", **settings):
        """Few steps: every operation passes through Python."""
        known = knobs(SAMPLERS[name].settings)
        fewer = {setting: 2 for setting in ("steps", "diffusion_steps") if setting in known}
        return published(pipe, name, preset, **settings, **fewer)

    published = Pipeline.settings
    monkeypatch.setattr(Pipeline, "settings", few)
    memory = {"memory_allocated": lambda *_: MEMORY.live, "memory_reserved": lambda *_: MEMORY.live}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, value)

    with pretended_cuda():
        on = dataclasses.replace(ready, model=moved(ready.model, dtype), decoder=moved(ready.decoder))
        there = dataclasses.replace(source, device=CUDA)
        readers = ConditionBuilder(there)
        check = checks.Check(Subject(choice, family), there, readers, 7)
        check.pipe = Pipeline(on, loading.Drafts(there, "auto", choice), readers)
        lines = {line.check: line for step in (checks.first_step, checks.image) for line in step(check)}

    assert not [line for line in lines.values() if line.broken]
    for name in ("memory of a step", "memory of an image"):
        assert lines[name].result == checks.PASS and lines[name].figures["bytes"] > 0, lines[name]
    timed = [name for name, line in lines.items() if name.startswith("seconds") and line.result == checks.MEASURED]
    assert len(timed) == {"mar": 4, "hybrid": 4, "llamagen": 2, "par": 1}[kind]
