"""Janus with the token samplers: exactness, batches of different prompts, and the samplers that do not apply."""

from typing import Any

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks.janus import JanusModel
from fastar_nodes.networks.llama import cache_bytes
from fastar_nodes.runs.memory import tokens as memory
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.mulosd import check_pair
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from janus_files import tiny_janus

PROMPTS = ("a red apple on a white table", "cat", "", "zw\u00f6lf Boxk\u00e4mpfer", "the moon at night")


@pytest.fixture(scope="module")
def model() -> JanusModel:
    return tiny_janus()


def codes(model: JanusModel, sampler: str, condition: Any, images: Any, seed: int = 5, **values: Any) -> torch.Tensor:
    entry = SAMPLERS[sampler]
    draws = TokenNoise(seed, tuple(images))
    return finish(entry.run(model, condition, entry.settings(**values), draws)).latents


@pytest.mark.slow
def test_pictures_are_the_same_in_windows_and_alone(model):
    condition = PromptCondition(PROMPTS * 10)
    serial = codes(model, "llamagen", condition, range(50))
    assert torch.equal(codes(model, "llamagen", condition, range(50), parallel=4), serial)
    assert len(serial.flatten(1).unique(dim=0)) == 50
    for i in range(50):
        assert torch.equal(codes(model, "llamagen", condition.for_images([i]), [i])[0], serial[i])


def test_zipar(model):
    condition = PromptCondition(PROMPTS)
    serial = codes(model, "llamagen", condition, range(5))
    assert torch.equal(codes(model, "zipar", condition, range(5), window=4), serial)
    narrow = codes(model, "zipar", condition, range(5), window=2)
    assert torch.equal(codes(model, "zipar", condition, range(5), window=2, parallel=3), narrow)
    assert not torch.equal(narrow, serial)


def test_published_settings_and_the_report(model):
    entry = SAMPLERS["llamagen"]
    report = finish(entry.run(model, PromptCondition(("cat",)), entry.settings(), TokenNoise(0, (0,)))).report
    assert (report.settings["cfg"], report.settings["top_k"], report.settings["temperature"]) == (5.0, 0, 1.0)
    assert report.counts["transformer_passes"] == 16


def test_memory_counts_the_longest_prompt(model):
    settings = SAMPLERS["llamagen"].settings(cfg=5.0)
    short, long = (memory.estimate(model, PromptCondition((text,)), settings) for text in ("cat", "cat " * 50))
    extra = len(model.prompt("cat " * 50)) - len(model.prompt("cat"))
    assert long - short >= cache_bytes(model.net, 2 * extra)


def test_samplers_that_do_not_apply(model):
    with pytest.raises(UserError, match="^model: .*Janus.*PAR's order"):
        codes(model, "par", PromptCondition(("cat",)), range(1))
    with pytest.raises(UserError, match="^model: .*Janus.*smaller image"):
        check_pair(model, model, codes=128, sampler="MuLo-SD")


def test_conditions_that_do_not_fit(model):
    for condition in (from_ids([0]), PromptCondition(())):
        with pytest.raises(UserError, match="^condition: "):
            codes(model, "llamagen", condition, range(len(condition)))
