"""verify: each promise holds on a demo model, and is a failure if what it is about is broken."""

import copy
from dataclasses import replace
from pathlib import Path

import nextstep_models
import pytest
import torch
from fastar_nodes.cli import verify
from fastar_nodes.networks import speed
from fastar_nodes.pipeline import Pipeline, load
from fastar_nodes.runs import presets
from fastar_nodes.runs.families.tokens import TokenFamily
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from fastar_nodes.samplers.tokens.zipar import ZipARSettings

OTHERS = "% of the tokens differ"


@pytest.fixture(scope="module")
def demo() -> Pipeline:
    """A LlamaGen of 8 x 8 codes, on a CPU."""
    return load("demo-llamagen-low", dtype="fp32", device="cpu")


def test_images_that_depend_on_their_batch_are_found(demo, monkeypatch):
    assert verify.in_batch(demo) == ""

    noise = TokenFamily.noise
    monkeypatch.setattr(TokenFamily, "noise", lambda self, seed, images: noise(self, seed, range(len(images))))
    assert OTHERS in verify.in_batch(demo)


def test_a_sampler_that_is_not_exact_is_found(demo, monkeypatch):
    zipar = SAMPLERS["zipar"]
    assert verify.is_exact(demo, zipar) and verify.at_exact_settings(demo, zipar) == ""

    monkeypatch.setattr(ZipARSettings, "exact", lambda self, side: True)
    monkeypatch.setitem(presets.PRESETS, ZipARSettings, lambda *_: {"window": 1})
    assert OTHERS in verify.at_exact_settings(demo, zipar)


def test_windows_that_change_tokens_are_found(demo, monkeypatch):
    assert verify.in_parallel(demo) == ""

    plain = SAMPLERS["llamagen"]

    def other_noise_in_windows(model, condition, settings, noise, **more):
        noise = TokenNoise(verify.SEED + 1, range(len(condition))) if settings.parallel else noise
        return plain.run(model, condition, settings, noise, **more)

    monkeypatch.setitem(SAMPLERS, "llamagen", replace(plain, run=other_noise_in_windows))
    assert OTHERS in verify.in_parallel(demo)


def test_a_compilation_that_changes_tokens_is_found(demo, monkeypatch):
    other = copy.deepcopy(demo.model.net.output.weight).neg_()
    own = demo.model.net.output.weight

    def change(net, kind, device):
        net.output.weight = torch.nn.Parameter(other if kind == speed.COMPILE else own, requires_grad=False)

    monkeypatch.setattr(speed, "choose", change)
    assert OTHERS in verify.compiled(demo)


def test_a_dtype_that_changes_the_image_is_found(demo):
    assert verify.nearly(demo, load("demo-llamagen-low", dtype="int8", device="cpu")) == ""

    net = copy.deepcopy(demo.model.net)
    net.output.weight.zero_()  # any token is as likely as another
    broken = replace(demo, ready=replace(demo.ready, model=replace(demo.model, net=net)))
    assert verify.nearly(demo, broken)


def test_tokens_of_one_value_are_found(demo):
    assert verify.varied(demo, torch.zeros(2, 8, 8, dtype=torch.long)) == "all tokens have one value"


def test_continuous_tokens_that_are_equal_are_found():
    pipe = load(nextstep_models.FOLDER / "model", dtype="fp32", device="cpu")
    latents = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    assert verify.varied(pipe, latents) == ""
    latents[1, :, 4:, 4:] = latents[0, :, :2, :2]
    assert verify.varied(pipe, latents) == "some tokens are equal"


FAMILIES = ["demo-llamagen-low", "demo", "demo-par", "demo-dtok-low", "demo-hybrid", "demo-bitdance"]
# No demo of it ships.
FAMILIES += [str(nextstep_models.FOLDER / "model")]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", FAMILIES, ids=lambda name: Path(name).parent.name or name)
def test_all_that_is_promised_holds_for_a_model_of_every_family(cli, name):
    answer = cli("verify --device cpu --model", name)
    lines = answer.out.splitlines()
    assert answer.code == 0, answer
    assert len(lines) >= 2 and all(line.endswith(": ok") for line in lines)


def test_a_broken_promise_is_the_exit_code(cli, monkeypatch):
    broken = lambda loaded, network, dtypes: iter([("one", lambda: ""), ("other", lambda: "it differs")])  # noqa: E731
    monkeypatch.setattr(verify, "cases", broken)
    answer = cli("verify")
    assert (answer.code, answer.out) == (1, "one: ok\nother: FAIL, it differs\n")
