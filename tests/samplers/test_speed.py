"""Compiled networks: no graph breaks, few compilations, and the results of the plain ones.

Compilations are counted by the compiler itself. The "eager" backend
traces and guards as "inductor" does, and needs no C++ compiler.
"""

import copy
import dataclasses

import pytest
import test_block_contract as blocks
import test_nextstep_contract as continuous
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks import ops, speed
from fastar_nodes.networks.mar import MAR
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import PairedNoise
from small_settings import BLOCKS, CONTINUOUS, MASKED, TOKENS
from tiny_models import tiny_mar

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
# Most compilations of a run with one network, and with a draft model.
MOST = 9
MOST_OF_TWO = 12
# Of every sampler a case: that with the most compilations, if it is not the sampler's own.
_MOST_COMPILED = {
    "fasthybrid": "fasthybrid, no guidance",
    "cspd": "cspd, no guidance",
    "llamagen": "llamagen, text",
    "par": "par, text",
    "bitdance": "bitdance, annealed",
    "nextstep": "nextstep, annealed",
}
NAMES = [_MOST_COMPILED.get(name, name) for name in (*MASKED, *TOKENS, *BLOCKS, *CONTINUOUS)]
NAMES += ["lazymar, cached head", "mar, speculation", "cspd, speculation", "bitdance, speculation", "window, llamagen"]
NAMES += ["nextstep, speculation", "nextstep, edits"]
_LAZY = "speed: compile was chosen, but these parts ran with speed plain: blocks with LazyMAR's caches"
_SPECULATION = "speed: compile was chosen, but these parts ran with speed plain: drafts of speculation"


def plain_parts(name: str) -> str:
    """What the report of a compiled run says."""
    if "lazymar" in name:
        return _LAZY
    return _SPECULATION if "speculation" in name else "speed: compile"


@pytest.fixture
def counters(monkeypatch):
    """The compiler's counters, from zero; regions are compiled by the "eager" backend."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(speed, "BACKEND", "eager")
    yield counters
    torch._dynamo.reset()


def run(name, how, images=None):
    """The result of a case of the contracts with all networks but the tokenizer at a ``speed``."""

    def chosen(model):
        if not isinstance(model.net, speed.Recordable):
            return model
        net = copy.deepcopy(model.net)
        speed.choose(net, how, CPU)
        return dataclasses.replace(model, net=net)

    contract = next(module for module in (masked, tokens, blocks, continuous) if name in module.CASES)
    more = {} if images is None else {"images": images}
    return finish(contract.start(name, move=chosen, **more))


@pytest.mark.parametrize("name", NAMES)
def test_compilations_of_a_run(name, counters):
    plain, compiled = run(name, speed.PLAIN), run(name, speed.COMPILE)
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= (MOST_OF_TWO if "cspd" in name else MOST)
    if name in masked.CASES or name in continuous.CASES:  # rounding; the tokens of the tiny models are about 1
        torch.testing.assert_close(compiled.latents, plain.latents, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(compiled.latents, plain.latents)
    assert compiled.report.counts == plain.report.counts

    # A method's own remark stands in both.
    own, not_compiled = plain.report.note, plain_parts(name)
    assert "compil" not in own
    assert not_compiled in compiled.report.note and own in compiled.report.note


def test_another_run_compiles_nothing(counters):
    """Other noise, more AR steps and another batch have other row counts."""
    sampler, settings = masked.CASES["mar"]
    model = tiny_mar()
    speed.choose(model.net, speed.COMPILE, CPU)
    finish(sampler(model, from_ids((1, 4)), settings, PairedNoise(5, (0, 1))))
    before = counters["stats"]["unique_graphs"]
    other = dataclasses.replace(settings, diffusion_steps=settings.diffusion_steps + 2)
    finish(sampler(model, from_ids((1, 4, 0, 2)), other, PairedNoise(6, range(4))))
    assert counters["stats"]["unique_graphs"] == before > 0


def test_a_region_is_plain_beyond_the_compilers_limit(counters, caplog):
    net = speed.Recordable()
    speed.choose(net, speed.COMPILE, CPU)
    region = net.compiled(_doubled, "doubling")
    assert (
        region is net.compiled(_doubled, "doubling") and speed.Recordable().compiled(_doubled, "doubling") is _doubled
    )
    for n in range(20):  # strings are constants to the compiler
        assert region(torch.ones(2), str(n)).tolist() == [2.0 + n, 2.0 + n]
    assert counters["stats"]["unique_graphs"] == torch._dynamo.config.recompile_limit
    assert [r.message for r in caplog.records if "without compilation" in r.message]
    assert net.remark == "speed: compile was chosen, but these parts ran with speed plain: doubling"
    net.begin_run()
    assert net.remark == "speed: compile"
    region(torch.ones(2), "1")
    assert net.remark == "speed: compile was chosen, but these parts ran with speed plain: doubling"


def test_a_region_is_plain_while_weights_are_off_the_device(counters):
    class Host(ops.Operations):
        away = False

        def offloaded(self, net):
            return [net.decoder_blocks[0].mlp.fc1] if self.away else []

    host = Host()
    net = MAR(tiny_mar().net.config, host)
    speed.choose(net, speed.COMPILE, CPU)
    assert net.compiled(_doubled, "doubling") is not _doubled
    assert net.remark == "speed: compile"
    host.away = True
    assert net.compiled(_doubled, "doubling") is _doubled
    parts = "doubling (weights are in system memory)"
    assert net.remark == f"speed: compile was chosen, but these parts ran with speed plain: {parts}"


def _doubled(x, text):
    return 2 * x + int(text)


def _no_compiler():
    from torch._inductor import exc

    raise exc.InvalidCxxCompiler


@pytest.mark.parametrize(
    ("changed", "value", "says"),
    [
        ("torch._dynamo.is_dynamo_supported", lambda: False, "version of Python"),
        ("torch._inductor.cpp_builder.get_cpp_compiler", _no_compiler, r"C\+\+ compiler"),
        ("torch.__file__", "/home/a b/torch/__init__.py", "has a space"),
    ],
)
def test_what_cannot_be_compiled_is_refused(monkeypatch, changed, value, says):
    with pytest.raises(UserError, match="^speed: 'fast' "):
        speed.choose(speed.Recordable(), "fast", CPU)
    monkeypatch.setattr(changed, value)
    with pytest.raises(UserError, match=f"^speed: .*{says}.*choose plain"):
        speed.choose(speed.Recordable(), speed.COMPILE, CPU)
