"""Captured functions, recorded on a CPU (``recorded_graphs.py``): equal to the plain samplers, also when replayed with other inputs."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks import graphs, speed
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from hypothesis import given
from hypothesis import strategies as st
from recorded_graphs import capture
from tiny_models import tiny_mar
from tokens_reference import condition_of

sys.path.insert(0, str(Path(__file__).parent / "tokens"))
from test_tokens_decoding import CASES as TOKENS  # noqa: E402

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


@pytest.mark.parametrize("name", TOKENS)
def test_token_samplers_equal_the_plain_ones(name):
    func, plain, settings, _ = TOKENS[name]
    made, condition = fast(plain), condition_of(plain.net.config.condition, IMAGES)
    for seed in (5, 6):
        expected, found = (finish(func(m, condition, settings, PairedDraws(seed, IMAGES), seed)) for m in (plain, made))
        assert torch.equal(found.codes, expected.codes)
        assert found.report.counts == expected.report.counts
        note = "speed: graphs" + "; nothing in this run was captured" * (
            getattr(settings, "parallel", 1) > 1 or "jacobi" in name
        )
        assert found.report.note == note


def test_two_runs_at_once_do_not_share_a_cache():
    func, plain, settings, _ = TOKENS["llamagen"]
    made, condition = fast(plain), condition_of(plain.net.config.condition, IMAGES)
    runs = [func(made, condition, settings, PairedDraws(seed, IMAGES), seed) for seed in (5, 6)]
    found = {}
    while len(found) < 2:
        for i, run in enumerate(runs):
            try:
                next(run)
            except StopIteration as end:
                found.setdefault(i, end.value.codes)
    for i, seed in enumerate((5, 6)):
        expected = finish(func(plain, condition, settings, PairedDraws(seed, IMAGES), seed)).codes
        assert torch.equal(found[i], expected)


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
