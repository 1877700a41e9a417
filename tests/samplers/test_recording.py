"""Recorded functions: every sampler draws from recordings what it draws without them, bit for bit.

The recordings are those of ``tests/lib/recording.py`` on a CPU, which refuses what a CUDA graph must not contain.
"""

import copy
import dataclasses
import math
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import test_block_contract as blocks
import test_nextstep_contract as continuous
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.networks import graphs, llama, speed
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from recording import recording

CONTRACTS = (masked, tokens, blocks, continuous)
CASES = [(contract, name) for contract in CONTRACTS for name in contract.CASES]
IDS = [name for _, name in CASES]


def at_speed(how):
    """A function that copies a model, to run at a speed."""
    copies = {}

    def move(model):
        if not isinstance(model.net, speed.Recordable):
            return model
        if id(model) not in copies:
            net = copy.deepcopy(model.net)
            net.speed = how
            copies[id(model)] = dataclasses.replace(model, net=net)
        return copies[id(model)]

    return move


# In these the cache of keys and values is made anew while a run goes on, when images leave it or share a prompt.
NEW_CACHES = ("window", "prompt", "images", "mulosd, drafted in windows")


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    """Passes attend to a multiple of 8 slots, with every speed as on a CUDA device; the tiny images have a few
    lengths.
    """
    monkeypatch.setattr(llama.Llama, "_whole_length", lambda self, slots, device: math.ceil(slots / 8) * 8)


@pytest.fixture
def recordings():
    """Networks on a CPU record functions; the recordings so far."""
    with recording() as made:
        yield made


@pytest.mark.fast_cases("mar", "lazymar, cached head", "llamagen", "bitdance", "nextstep")
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


# ------------------------------------------------------------------------------------------------ between two images


def llamagen_of(move, images=(0, 1, 2), seed=5):
    return tokens.start("llamagen", images, seed=seed, move=move)


def mar_of(move, images=(0, 1, 2), seed=5):
    return masked.start("mar", images, tuple((1, 4, 0)[i] for i in images), seed=seed, move=move)


def lazymar_of(move, images=(0, 1, 2), seed=5):
    return masked.start("lazymar", images, tuple((1, 4, 0)[i] for i in images), seed=seed, move=move)


@pytest.mark.parametrize("start", [mar_of, lazymar_of, llamagen_of])
def test_other_batches_and_an_interrupt_between_two_images(start, recordings):
    plain = at_speed(speed.PLAIN)
    move = at_speed(speed.AUTO)
    wanted = finish(start(plain))[0]
    alone = finish(start(plain, (1,)))[0]
    for _ in range(2):
        finish(start(move))

    for _ in range(3):
        assert torch.equal(finish(start(move, (1,)))[0], alone)
        assert torch.equal(finish(start(move))[0], wanted)

    interrupted = start(move, seed=9)
    for _ in range(3):
        next(interrupted)
    interrupted.close()
    assert torch.equal(finish(start(move))[0], wanted)


@pytest.mark.parametrize("start", [mar_of, lazymar_of, llamagen_of])
def test_two_runs_in_turn_do_not_disturb_each_other(start, recordings):
    """As in a race of two seeds with one model: the second run finds the cache of the first one in use."""
    plain = at_speed(speed.PLAIN)
    move = at_speed(speed.AUTO)
    for _ in range(2):
        finish(start(move))

    runs = {seed: start(move, seed=seed) for seed in (5, 6)}
    ends = {}
    while runs:
        for seed, run in list(runs.items()):
            try:
                next(run)
            except StopIteration as end:
                ends[seed] = end.value[0]
                del runs[seed]

    for seed, drawn in ends.items():
        assert torch.equal(drawn, finish(start(plain, seed=seed))[0])


def test_edits_are_recorded(recordings):
    size = 4
    mask = torch.arange(size * size).view(1, size, size) % 3 == 0
    for start, latents in ((mar_edit, torch.zeros(1, 4, size, size)), (llamagen_edit, torch.full((1, 4, 4), 2))):
        edit = Edit(latents, mask)
        wanted = finish(start(at_speed(speed.PLAIN), edit))[0]
        move = at_speed(speed.AUTO)
        for _ in range(3):
            assert torch.equal(finish(start(move, edit))[0], wanted)


def mar_edit(move, edit):
    return masked.start("mar", move=move, edit=edit)


def llamagen_edit(move, edit):
    return tokens.start("llamagen", move=move, edit=edit)


def test_weights_that_moved_or_changed_are_seen(recordings):
    """Another image follows new weights, whether they are elsewhere or were written in place."""
    model = at_speed(speed.AUTO)(masked.MODEL)

    def drawn():
        return finish(masked.start("mar", model=model))[0]

    for _ in range(3):
        drawn()
    with torch.no_grad():
        model.net.class_emb.weight.mul_(1.5)  # in place
        written = [drawn() for _ in range(3)]
        layer = model.net.encoder_blocks[0].mlp.fc1
        layer.weight = torch.nn.Parameter(layer.weight * 1.5, requires_grad=False)
        moved = [drawn() for _ in range(3)]

    assert all(torch.equal(image, written[0]) for image in written)
    assert all(torch.equal(image, moved[0]) for image in moved)
    assert not torch.equal(written[0], moved[0])

    model.net.speed = speed.PLAIN
    assert torch.equal(drawn(), moved[0])


def test_a_network_that_is_moved_forgets_its_recordings(recordings):
    model = at_speed(speed.AUTO)(masked.MODEL)
    for _ in range(2):
        finish(masked.start("mar", model=model))
    assert model.net.graphs._recordings

    model.net.to(torch.float64)
    assert not model.net.graphs._recordings


def test_lazymars_passes_are_recorded(recordings):
    """All of the transformer and the head: the report says of nothing that it ran plain."""
    move = at_speed(speed.AUTO)
    for _ in range(2):
        drawn = finish(lazymar_of(move))
    functions = {key[0].__name__ for key in move(masked.MODEL).net.graphs._recordings}
    assert functions == {"run_encoder", "run_decoder", "full_step"}
    assert drawn.report.note == "speed: auto"


# ------------------------------------------------------------------------------------------------ when it runs plain


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("out of memory"), "memory is short"),
        (RuntimeError("CUDA error: operation not permitted\nSearch for ..."), "CUDA error: operation not permitted"),
    ],
)
@pytest.mark.parametrize("contract", [masked, tokens])
def test_a_recording_that_fails_leaves_the_image_as_it_is(contract, error, why, recordings):
    name = "mar" if contract is masked else "llamagen"
    wanted = finish(contract.start(name, move=at_speed(speed.PLAIN)))[0]
    move = at_speed(speed.AUTO)

    def fails(*args):
        raise error

    # Not by monkeypatch, which would put the recorder of this block back after the block.
    with patch.object(graphs, "record", fails):
        for _ in range(2):
            drawn = finish(contract.start(name, move=move))
            assert torch.equal(drawn[0], wanted)
            assert drawn.report.note.endswith(
                f"speed: auto was chosen, but these parts ran with speed plain: launches of operations ({why})"
            )


def test_memory_that_is_short_for_the_image_frees_the_recordings(recordings, monkeypatch):
    model = at_speed(speed.AUTO)(masked.MODEL)
    for _ in range(2):
        finish(masked.start("mar", model=model))

    def short(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(graphs._Recording, "replay", short)
    with pytest.raises(torch.OutOfMemoryError):
        finish(masked.start("mar", model=model))
    assert not model.net.graphs._recordings


def test_weights_that_the_host_moves_are_not_recorded(recordings):
    class Moves(type(masked.MODEL.net.operations)):
        def moves(self, net):
            return True

    model = at_speed(speed.AUTO)(masked.MODEL)
    model.net.operations = Moves()
    for _ in range(3):
        drawn = finish(masked.start("mar", model=model))
    assert not recordings
    parts = "launches of operations (ComfyUI moves the weights)"
    assert drawn.report.note == f"speed: auto was chosen, but these parts ran with speed plain: {parts}"


def test_every_draw_of_mulosd_is_recorded(recordings, monkeypatch):
    """One a pass of the draft model, one a wave; and its report says the speed of both models once."""
    called = []
    call = graphs.Graphs.call

    def watched(self, function, args):
        called.append(function.__name__)
        return call(self, function, args)

    monkeypatch.setattr(graphs.Graphs, "call", watched)
    report = finish(tokens.start("mulosd", move=at_speed(speed.AUTO))).report
    assert called.count("tokens_from_hidden") == report.counts["draft_passes"] + report.counts["waves"]
    assert report.note == "speed: auto"


def test_a_host_can_forbid_recordings_and_a_cpu_has_none(recordings, monkeypatch):
    monkeypatch.setattr(graphs, "allowed", False)
    for _ in range(3):
        drawn = finish(masked.start("mar", move=at_speed(speed.AUTO)))
    assert not recordings
    assert drawn.report.note == ""


def test_few_recordings_are_kept(recordings, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    wanted = finish(masked.start("mar"))[0]
    move = at_speed(speed.AUTO)
    for _ in range(3):
        assert torch.equal(finish(masked.start("mar", move=move))[0], wanted)
    assert len(move(masked.MODEL).net.graphs._recordings) == 2


# ------------------------------------------------------------------------------------------------ the recorder


def test_a_recording_freezes_what_python_decides(recordings):
    """Otherwise the tests above would prove nothing: a function that decides in Python is found out."""
    made = graphs.Graphs()
    factors = iter((1.0, 2.0, 3.0, 4.0))

    def function(x):
        return x * next(factors)

    results = [made.call(function, (torch.ones(1),)).item() for _ in range(4)]
    assert results == [1.0, 2.0, 3.0, 3.0]


def test_state_is_told_apart_by_its_address(recordings):
    made = graphs.Graphs()

    def function(state, x):
        state[0].add_(x)
        return state[0].sum()

    one, other = torch.zeros(2), torch.zeros(2)
    for _ in range(4):
        made.call(function, (graphs.State([one]), torch.ones(2)))
    made.call(function, (graphs.State([other]), torch.ones(2)))
    assert other.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("view", [lambda x: x[:, :2], lambda x: x.T], ids=["shape", "stride"])
def test_state_at_one_address_is_told_apart_by_its_form(view, recordings):
    """A view begins where its tensor does."""
    made = graphs.Graphs()

    def function(state, x):
        state[0].copy_(x)
        return state[0].sum()

    whole = torch.zeros(3, 3)
    other = view(whole)
    rows = torch.arange(3.0)[:, None]
    for _ in range(3):
        made.call(function, (graphs.State([whole]), rows))
    for _ in range(3):
        whole.zero_()
        made.call(function, (graphs.State([other]), rows))
        assert torch.equal(other, rows.expand_as(other)) and other.sum() == whole.sum()


def test_a_buffer_that_moved_is_seen(recordings):
    net = torch.nn.Module()
    net.register_buffer("factor", torch.tensor(2.0))
    made = graphs.Graphs()

    def function(x):
        return x * net.factor

    results = []
    for factor in (2.0, 3.0):
        net.factor = torch.tensor(factor)
        for _ in range(3):
            made.follow(net)
            results.append(made.call(function, (torch.ones(1),)).item())
    assert results == [2.0] * 3 + [3.0] * 3


def test_large_arguments_are_not_copied(recordings, monkeypatch):
    monkeypatch.setattr(graphs, "LARGEST", 8)
    made = graphs.Graphs()
    for size, count in ((2, 1), (3, 0)):
        recordings.clear()
        for _ in range(3):
            made.call(plus, (torch.ones(size),))
        assert len(recordings) == count


def plus(x):
    return x + 1


def test_what_was_not_used_for_the_longest_time_is_forgotten_first(recordings, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    made = graphs.Graphs()

    def recorded_after(*sizes):
        for size in sizes:
            made.call(plus, (torch.ones(size),))
        return len(recordings)

    assert recorded_after(1, 1, 2, 2, 1) == 2
    assert recorded_after(3, 3) == 3, "in the place of size 2"
    assert recorded_after(1) == 3
    assert recorded_after(2) == 4


@pytest.mark.parametrize(("most", "is_kept"), [(48, True), (47, False)])
def test_a_large_cache_is_not_kept(most, is_kept, recordings, monkeypatch):
    """Two tensors of 24 bytes each."""
    monkeypatch.setattr(graphs, "KEPT_BYTES", most)
    made = graphs.Graphs()
    first = made.zeros([(2, 3)] * 2, torch.zeros(1))
    again = made.zeros([(2, 3)] * 2, torch.zeros(1))
    assert (again[0] is first[0]) == is_kept


def test_the_cache_of_the_last_run_is_used_again_when_it_has_ended(recordings):
    made = graphs.Graphs()

    class User:
        pass

    user = User()
    like = torch.zeros(1)
    first = made.zeros([(2, 3)] * 2, like)
    made.use(first, user)
    first[0].fill_(1)
    assert made.zeros([(2, 3)] * 2, like)[0].data_ptr() != first[0].data_ptr(), "it is in use"

    del user
    again = made.zeros([(2, 3)] * 2, like)
    assert again[0].data_ptr() == first[0].data_ptr()
    assert not again[0].any()


def test_a_device_is_idle_before_it_is_recorded(monkeypatch):
    """What is allocated meanwhile may cost other networks their memory, which nothing may read then."""
    calls = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            calls.append(f"begin, {capture_error_mode}")

        def capture_end(self):
            calls.append("end")

        def replay(self):
            calls.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(graphs, "aside", lambda device: nullcontext())

    graphs.record(lambda: calls.append("function"), None, torch.device("cuda"))()
    assert calls == ["wait", "begin, thread_local", "function", "end", "replay"]
