"""Captured functions, recorded on a CPU (``recorded_graphs.py``): equal to the plain samplers, also when replayed with other inputs."""

from __future__ import annotations

import copy
import dataclasses
import logging
from functools import partial

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks import graphs, speed
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.noise import PairedNoise
from hypothesis import given
from hypothesis import strategies as st
from recorded_graphs import capture
from test_sampler_contract import CASES as MASKED
from tiny_models import tiny_mar

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
CPU = torch.device("cpu")
IMAGES = (0, 1, 2)


@pytest.fixture(autouse=True)
def recorded():
    """Functions are recorded instead of captured."""
    before = graphs.set_capture(capture)
    yield
    graphs.set_capture(before)


def fast(model):
    """A copy of a model that captures its functions."""
    net = copy.deepcopy(model.net)
    speed.choose(net, speed.GRAPHS, CPU)
    return dataclasses.replace(model, net=net)


def masked(name, model, seed, draft=lambda model: model, images=IMAGES):
    sampler, settings = MASKED[name]
    func, drafts = getattr(sampler, "func", sampler), getattr(sampler, "keywords", {})
    func = partial(func, **{key: draft(value) for key, value in drafts.items()})
    return finish(func(model, from_ids((1, 4, 0)[: len(images)]), settings, PairedNoise(seed, images), seed))


@pytest.mark.parametrize("name", MASKED)
def test_masked_samplers_equal_the_plain_ones(name):
    plain, made = tiny_mar(), fast(tiny_mar())
    drafts = {}

    def draft(model):
        return drafts.setdefault(id(model), fast(model))

    for seed in (5, 6):  # the second run replays what the first one captured
        expected, found = masked(name, plain, seed), masked(name, made, seed, draft)
        torch.testing.assert_close(found.latents, expected.latents, rtol=1e-4, atol=1e-4)
        assert found.report.counts == expected.report.counts
        note = "speed: graphs" + "; nothing in this run was captured" * ("speculation" in name)
        assert (expected.report.note, found.report.note) == ("", note)


def test_a_guided_step_with_a_cached_head(monkeypatch):
    """Refinement with as many steps that LazyMAR caches the head for it: the draft is an input of the captured loop."""
    settings = dataclasses.replace(
        MASKED["fasthybrid+lazymar"][1], diffusion_steps=24, guided_steps=20, threshold=0.5, guidance_space="x0"
    )
    monkeypatch.setitem(MASKED, "guided", (MASKED["fasthybrid+lazymar"][0], settings))
    plain, made = tiny_mar(), fast(tiny_mar())
    for seed in (5, 6):
        expected, found = masked("guided", plain, seed), masked("guided", made, seed)
        assert expected.report.counts["accepted"] > 0
        torch.testing.assert_close(found.latents, expected.latents, rtol=1e-4, atol=1e-4)
    assert any("cached diffusion" in str(key) and "Guided" in str(key) for key in made.net.graphs._made)


def test_a_replay_launches_no_operation_of_the_loop():
    """Once captured, a run with other noise captures nothing."""
    made = fast(tiny_mar())
    masked("mar", made, 5)
    held = list(made.net.graphs._made)
    masked("mar", made, 6)
    assert list(made.net.graphs._made) == held and len(held) >= 1


def test_functions_are_captured_again_after_weights_moved():
    made = fast(tiny_mar())
    masked("mar", made, 5)
    with torch.no_grad():
        for parameter in made.net.parameters():
            parameter.data = parameter.data.clone() * 0.9
    plain = tiny_mar()
    with torch.no_grad():
        for parameter in plain.net.parameters():
            parameter.mul_(0.9)
    torch.testing.assert_close(masked("mar", made, 6).latents, masked("mar", plain, 6).latents, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_captured_runs_plain_and_is_reported_once(caplog):
    def refuse(function, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs.set_capture(refuse)
    made = fast(tiny_mar())
    with caplog.at_level(logging.WARNING):
        first, again = masked("mar", made, 5), masked("mar", made, 5)
    assert torch.equal(first.latents, masked("mar", tiny_mar(), 5).latents) and torch.equal(
        first.latents, again.latents
    )
    sentence = (
        "speed: graphs could not be captured (operation not permitted when stream is capturing); the run was plain"
    )
    assert first.report.note == again.report.note == sentence
    assert [r.message for r in caplog.records] == [f"FastAR: {sentence}."]


def test_insufficient_memory_is_left_to_the_sampler():
    """Which then goes on with a part of the batch (``batches.py``)."""

    def full(function, pool):
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs.set_capture(full)
    made = fast(tiny_mar())
    with pytest.raises(torch.OutOfMemoryError):
        masked("mar", made, 5)
    assert not made.net.graphs.problem and not made.net.graphs._made


def test_the_recorder_refuses_what_a_graph_cannot_hold():
    x = torch.ones(3)
    for function in (
        lambda: (x * float(x.sum()),),
        lambda: (x.nonzero(),),
        lambda: (x[x > 0],),
        lambda: (x + torch.tensor([1.0]),),
    ):
        with pytest.raises(RuntimeError, match="not permitted"):
            capture(function, None)


def test_the_oldest_function_is_given_up(monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    made = graphs.Graphs(torch.nn.Linear(2, 2))
    for n in (1, 2, 1, 3):
        (out,) = made.run("double", lambda x: (2 * x,), [graphs.Input(torch.full((n,), float(n)))])
        assert out.tolist() == [2.0 * n] * n
    assert [key[1][0] for key in made._made] == [(1,), (3,)]


@given(st.integers(1, 100_000))
def test_rounded_rows(rows):
    most = graphs.rounded(rows)
    assert rows <= most < 1.5 * rows and graphs.rounded(most) == most


def test_graphs_need_cuda():
    graphs.set_capture(graphs.capture_cuda)
    with pytest.raises(UserError, match="^speed: graphs needs a CUDA GPU; choose compile or plain"):
        speed.choose(tiny_mar().net, speed.GRAPHS, CPU)
