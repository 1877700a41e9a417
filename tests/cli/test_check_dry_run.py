"""The steps of check on a pretended CUDA device, in fp32 and bf16; as tests/samplers/test_cuda_dry_run.py."""

import dataclasses

import pytest
import torch
from fastar_nodes import assembly
from fastar_nodes.cli import checks
from fastar_nodes.cli.subject import Subject
from fastar_nodes.conditions import ConditionBuilder
from fastar_nodes.pipeline import Pipeline
from pretended_cuda import CUDA, MEMORY, pretended_cuda
from waits import moved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None, reason="PyTorch is a CPU build: run make dry-run, which installs one for CUDA"
    ),
]
STEPS = ("step", "image", "exact", "samplers")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mar", "hybrid", "llamagen", "par"])
def test_steps_on_a_pretended_device(files, monkeypatch, kind, dtype):
    family = {"par": "llamagen"}.get(kind, kind)
    choice = str(getattr(files, kind))
    decoder = str(files.kl if kind in ("mar", "hybrid") else files.vq)
    source = assembly.Source(lambda name, _: assembly.typed_path(name, "model"), torch.device("cpu"), "fp32")
    ready = assembly.load(family, choice, source, decoder)

    few = {"steps": 2, "diffusion_steps": 2}  # every operation passes through Python
    monkeypatch.setattr(checks, "_FEW_STEPS", few)
    monkeypatch.setattr(checks, "_QUICK_STEPS", few)
    monkeypatch.setattr(checks, "_LIMIT", 0.0)
    memory = {"memory_allocated": lambda *_: MEMORY.live, "memory_reserved": lambda *_: MEMORY.live}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, value)

    with pretended_cuda():
        on = dataclasses.replace(ready, model=moved(ready.model, dtype), decoder=moved(ready.decoder))
        there = dataclasses.replace(source, device=CUDA)
        readers = ConditionBuilder(there)
        check = checks.Check(Subject(choice, family), there, readers, 7, quick=True)
        check.pipe = Pipeline(on, assembly.Drafts(there, "auto", choice), readers)
        lines = {line.check: line for line in checks.run_steps(check, STEPS, 600, lambda line: None)}

    failed = {name: line.found for name, line in lines.items() if line.result == checks.FAILED}
    assert not failed
    for name in ("memory of a step", "memory of an image"):
        assert lines[name].result == checks.PASS and lines[name].figures["bytes"] > 0, lines[name]
    name = "fp32" if dtype is None else "bf16"
    exact = [line for line in lines.values() if f"({name})" in line.check]
    assert len(exact) == {"mar": 6, "hybrid": 6, "llamagen": 4, "par": 3}[kind]
    if dtype is None:
        assert all(line.result == checks.PASS for line in exact), exact
    else:
        assert not any(line.must for line in exact)
