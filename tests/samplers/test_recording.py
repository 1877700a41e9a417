"""Recorded functions: every sampler draws from recordings what it draws without them, bit for bit.

The recordings are those of ``tests/lib/recording.py`` on a CPU, which refuses what a CUDA graph must not contain.
"""

import copy
import dataclasses
import math

import pytest
import test_block_contract as blocks
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.model_loaders.networks import llama, speed
from fastar_nodes.samplers.engine import finish
from recording import recording

CONTRACTS = (masked, tokens, blocks)
CASES = [(contract, name) for contract in CONTRACTS for name in contract.CASES]
IDS = [name for _, name in CASES]


def at_speed(how):
    """A function that copies a model, to run at a speed."""
    copies = {}

    def move(model):
        if not isinstance(model.net, speed.Regional):
            return model
        if id(model) not in copies:
            net = copy.deepcopy(model.net)
            net.speed = how
            copies[id(model)] = dataclasses.replace(model, net=net)
        return copies[id(model)]

    return move


# In these the cache of keys and values is made anew while a run goes on, when images leave it or share a prompt.
NEW_CACHES = ("window", "prompt", "mulosd, drafted in windows")


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    """Passes attend to a multiple of 8 slots, with every speed as on a CUDA device; the tiny images have a few
    lengths.
    """
    monkeypatch.setattr(llama.Llama, "_whole_length", lambda self, slots: math.ceil(slots / 8) * 8)


@pytest.fixture
def recordings():
    """Networks on a CPU record functions; the recordings so far."""
    with recording() as made:
        yield made


@pytest.mark.fast_cases("mar", "lazymar, cached head", "llamagen", "bitdance")
@pytest.mark.parametrize(("contract", "name"), CASES, ids=IDS)
def test_recorded_samplers_draw_the_same(contract, name, recordings):
    plain = finish(contract.start(name, move=at_speed(speed.PLAIN)))
    move = at_speed(speed.AUTO)

    counts = []
    for _ in range(3):
        drawn = finish(contract.start(name, move=move))
        assert torch.equal(drawn[0], plain[0])
        assert drawn.report.counts == plain.report.counts
        counts.append(len(recordings))

    assert counts[1] > 0
    if not name.startswith(NEW_CACHES):
        assert counts[2] == counts[1], "the third run has no new shapes"
