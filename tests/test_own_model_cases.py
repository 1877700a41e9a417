"""Each case of test_own_model.py passes on a demo model, and fails if what it is about is broken."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import own_model
import pytest
import test_own_model as cases
import torch
from fastar_nodes.networks import speed
from fastar_nodes.pipeline import Pipeline
from fastar_nodes.runs import presets
from fastar_nodes.runs.families.tokens import TokenFamily
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.zipar import ZipARSettings

OTHERS = "% of the tokens are equal"


@pytest.fixture(scope="module")
def demo() -> Pipeline:
    """A LlamaGen of 8 x 8 codes, on a CPU."""
    return own_model.load("fp32", "demo-llamagen-low")


def test_images_that_depend_on_their_batch_are_found(demo, monkeypatch):
    cases.test_a_model_draws_an_image_alone_as_in_a_batch(demo)

    noise = TokenFamily.noise
    monkeypatch.setattr(TokenFamily, "noise", lambda self, seed, images: noise(self, seed, range(len(images))))
    with pytest.raises(AssertionError, match=OTHERS):
        cases.test_a_model_draws_an_image_alone_as_in_a_batch(demo)


def test_a_sampler_that_is_not_exact_is_found(demo, monkeypatch):
    cases.test_a_model_draws_the_plain_images_at_exact_settings(demo, "zipar")

    monkeypatch.setattr(ZipARSettings, "exact", lambda self, side: True)
    monkeypatch.setitem(presets.PRESETS, ZipARSettings, lambda *_: {"window": 1})
    with pytest.raises(AssertionError, match=OTHERS):
        cases.test_a_model_draws_the_plain_images_at_exact_settings(demo, "zipar")


def test_windows_that_change_tokens_are_found(demo, monkeypatch):
    cases.test_a_model_decodes_windows_in_parallel_as_one_by_one(demo)

    plain = SAMPLERS["llamagen"]

    def other_noise_in_windows(model, condition, settings, noise, **more):
        noise = PairedDraws(own_model.SEED + 1, range(len(condition))) if settings.parallel else noise
        return plain.run(model, condition, settings, noise, **more)

    monkeypatch.setitem(SAMPLERS, "llamagen", replace(plain, run=other_noise_in_windows))
    with pytest.raises(AssertionError, match=OTHERS):
        cases.test_a_model_decodes_windows_in_parallel_as_one_by_one(demo)


@pytest.mark.slow
def test_a_compilation_that_changes_tokens_is_found(demo, monkeypatch):
    monkeypatch.setattr(speed, "BACKEND", "eager")
    cases.test_a_model_draws_the_same_compiled(demo)
    torch._dynamo.reset()

    other = copy.deepcopy(demo.model.net.output.weight).neg_()
    own = demo.model.net.output.weight

    def change(net, kind, device):
        net.output.weight = torch.nn.Parameter(other if kind == speed.COMPILE else own, requires_grad=False)

    monkeypatch.setattr(speed, "choose", change)
    with pytest.raises(AssertionError, match=OTHERS):
        cases.test_a_model_draws_the_same_compiled(demo)


@pytest.mark.slow
def test_a_dtype_that_changes_the_image_is_found(demo, monkeypatch):
    monkeypatch.setattr(own_model, "MODEL", "demo-llamagen-low")
    cases.test_a_model_draws_nearly_the_same_in_another_dtype(demo, "int8")

    net = copy.deepcopy(demo.model.net)
    net.output.weight.zero_()  # any token is as likely as another
    broken = replace(demo, ready=replace(demo.ready, model=replace(demo.model, net=net)))
    monkeypatch.setattr(own_model, "load", lambda dtype: broken)
    with pytest.raises(AssertionError):
        cases.test_a_model_draws_nearly_the_same_in_another_dtype(demo, "int8")


def test_tokens_of_one_value_are_found(demo, monkeypatch):
    cases.test_a_model_draws_varied_tokens(demo)

    monkeypatch.setattr(cases, "draw", lambda pipe: SimpleNamespace(latents=torch.zeros(2, 8, 8, dtype=torch.long)))
    with pytest.raises(AssertionError):
        cases.test_a_model_draws_varied_tokens(demo)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "demo-par", "demo-dtok-low", "demo-hybrid", "demo-bitdance"])
def test_the_cases_run_on_a_model_of_every_family(root, name):
    """As the page of contributors tells, without the compiler."""
    cases = ["tests/test_own_model.py", "-k", "not compiled"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *cases]
    environment = {**os.environ, "FASTAR_MODEL": name, "FASTAR_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "FASTAR_MODEL=name" not in done.stdout
