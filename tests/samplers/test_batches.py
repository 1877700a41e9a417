"""Lack of memory at every call that allocates: the batch is split,
a single image ends in a sentence, and nothing stays behind.
"""

import gc
import logging
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.memory import in_chunks, out_of_memory
from fastar_nodes.networks import ops, speed, torch_state
from fastar_nodes.reports import record
from fastar_nodes.reports.record import Report
from fastar_nodes.runs.batches import in_parts, run_beginning
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import CodeCondition, PromptCondition, from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import Step, finish
from faults import Faults
from stepping import process_state, stepped
from tiny_hybrids import tiny_hybrid

IMAGES = 2
NET = torch.nn.Linear(1, 1)
HYBRID, PROMPTS = tiny_hybrid(), PromptCondition(("a", "b"))
CASES = {
    **{
        name: lambda part, name=name: masked.start(name, part, [(1, 4)[i] for i in part])
        for name in SAMPLERS
        if name in masked.CASES
    },
    "hybrid": lambda part: masked.start("fasthybrid", part, model=HYBRID, condition=PROMPTS.for_images(part)),
    **{name: partial(tokens.start, name) for name in (*SAMPLERS, "prompt") if name in tokens.CASES},
}


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Objects of other tests are not searched by the garbage collection after every failure."""
    gc.freeze()


@pytest.fixture(params=CASES, ids=str)
def start(request):
    return CASES[request.param]


def state() -> Any:
    return process_state(), len(ops._PACKED)


@pytest.mark.fast_cases("mar", "llamagen")
def test_the_time_of_the_caller_is_not_the_samplers(start, monkeypatch):
    """On a clock that stands still but for 100 s after every step, a run takes no time."""
    now = [0.0]
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    steps = in_parts(start, IMAGES, NET)
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
            now[0] += 100
    assert now[0] > 0 and end.value.value.report.seconds == 0


def chosen(calls: int, most: int = 24) -> list[int]:
    """Calls that fail: all of a short run; of a long one the first, the last and others in equal distances."""
    return sorted({round(k * (calls - 1) / (most - 1)) for k in range(most)})


@pytest.mark.slow
def test_every_call_that_fails_once(start):
    """The batch is sampled in two parts, and the images are those of the whole batch."""
    undisturbed, before = finish(start(range(IMAGES))), state()
    with Faults() as counted:
        finish(start(range(IMAGES)))
    assert counted.calls > 10
    for n in chosen(counted.calls):
        with Faults(n):
            done = finish(in_parts(start, IMAGES, NET))
        torch.testing.assert_close(done[0], undisturbed[0], rtol=1e-4, atol=1e-4)
        assert "sampled 1 at a time" in done.report.note and done.report.images == IMAGES
        for name, map_ in undisturbed.report.maps.items():
            assert np.array_equal(done.report.maps[name], map_), name
    assert state() == before
    assert torch.equal(finish(in_parts(start, IMAGES, NET))[0], undisturbed[0])


@pytest.mark.fast_cases("llamagen")
def test_every_call_from_which_on_all_fail(start):
    """A single image ends in a sentence, and the next run is that of an undisturbed process."""
    undisturbed, before = finish(start(range(1))), state()
    with Faults() as counted:
        finish(start(range(1)))
    for n in chosen(counted.calls, 10):
        with Faults(n, lasting=True), pytest.raises(UserError, match="^memory: .*single image.*bf16") as raised:
            finish(in_parts(start, 1, NET))
        assert raised.value.__context__ is None, "the failed attempt's tensors stay referenced"
    assert state() == before
    assert torch.equal(finish(in_parts(start, 1, NET))[0], undisturbed[0])


class Done(NamedTuple):
    codes: torch.Tensor
    report: Report


class Limited:
    """A sampler of three steps that has room for ``most`` images; more of them fail at the second step."""

    def __init__(self, most: int, error: BaseException | None = None):
        self.most, self.error = most, error or torch.OutOfMemoryError("CUDA out of memory")
        self.parts: list[int] = []
        self.closed = 0
        self.held: weakref.ref[torch.Tensor] | None = None

    def __call__(self, part: range) -> Any:
        assert self.held is None or self.held() is None, "the tensors of the failed attempt are still held"
        self.parts.append(len(part))
        return self.run(part)

    def run(self, part: range) -> Any:
        codes = torch.tensor([[i] for i in part])
        report = Report("s", "m", {}, 1, len(part), "cpu", seconds=1.0, phases={"head": 0.5}, note="Own.")
        try:
            for k in range(3):
                if len(part) > self.most and k == 1:
                    scratch = torch.zeros(8)
                    self.held = weakref.ref(scratch)
                    raise type(self.error)(*self.error.args)  # a new one: an exception holds its traceback
                report.add(head_calls=1)
                shown = codes + 10 * k, torch.ones_like(codes, dtype=torch.bool)
                yield Step(k + 1, 3, report, lambda shown=shown: shown)
        finally:
            self.closed += 1
        report.maps = {"step": np.full((len(part), 1, 1), 2)}
        report.peak_memory_bytes, report.similarity = len(part) * 10, np.array([0.5] * len(part), np.float32)
        return Done(codes, report)


@pytest.mark.parametrize(
    "images, most, parts",
    [
        (4, 4, [4]),
        (4, 3, [4, 2, 2]),
        (5, 3, [5, 3, 2]),
        (5, 2, [5, 3, 2, 2, 1]),
        (4, 1, [4, 2, 1, 1, 1, 1]),
        (1, 1, [1]),
    ],
)
def test_parts(images, most, parts, caplog):
    sampler = Limited(most)
    with caplog.at_level(logging.WARNING):
        steps, (codes, report) = stepped(in_parts(sampler, images, NET))
    assert sampler.parts == parts and sampler.closed == len(parts)
    kept = [n for n in parts if n <= most]
    assert codes.tolist() == [[i] for i in range(images)] and report.images == images
    assert report.seconds == len(kept) and report.phases == {"head": 0.5 * len(kept)}
    assert report.counts == {"head_calls": 3 * len(kept)} and report.peak_memory_bytes == 10 * max(kept)
    assert report.maps["step"].shape == (images, 1, 1) and len(report.similarity) == images
    if len(parts) == 1:
        assert report.note == "Own." and not caplog.records
    else:
        smallest = f"{max(kept)} at a time"
        assert report.note.startswith("Own. Memory was insufficient") and smallest in report.note
        assert len(caplog.records) == len(parts) - len(kept) and smallest in caplog.records[-1].getMessage()
    assert [step.done == step.total for step in steps].count(True) == 1 and steps[-1].done == steps[-1].total
    assert steps[-1].latents.tolist() == [[20 + i] for i in range(images)]
    assert all(len(step.latents) == images for step in steps)


def test_the_first_run_of_a_network_is_marked():
    """A warm-up counts, and a compiled network compiles what each sampler needs."""
    net, warmed, compiled = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def first_run(net, name="s", most=9):
        result = finish(in_parts(Limited(most), 4, net))
        return result.report.first_run

    assert [first_run(net), first_run(net)] == [True, False]
    assert first_run(torch.nn.Linear(1, 1), most=2), "in parts too"

    run_beginning(in_parts(Limited(9), 4, warmed))
    assert not first_run(warmed)

    compiled.speed = speed.COMPILE
    run_beginning(in_parts(Limited(9), 4, compiled))
    assert [first_run(compiled), first_run(compiled)] == [True, False]


def test_a_warm_up_takes_the_first_step_of_a_network_twice():
    """Counted in the progress, and once a network. Not if it compiles, or if its weights move."""

    def begun(net, most=9):
        sampler = Limited(most)
        steps, (codes, report) = stepped(in_parts(sampler, 4, net, warm=True))
        assert codes.tolist() == [[0], [1], [2], [3]] and report.counts["head_calls"] == 3 * (4 // min(most, 4))
        return sampler.parts, [(step.done, step.total) for step in steps][-1], report.first_run

    net = torch.nn.Linear(1, 1)
    assert begun(net) == ([4, 4], (4, 4), False)
    assert begun(net) == ([4], (3, 3), False)
    assert begun(torch.nn.Linear(1, 1), most=2) == ([4, 4, 2, 2], (16, 16), False), "in parts too"

    compiled = torch.nn.Linear(1, 1)
    compiled.speed = speed.COMPILE
    moving = torch.nn.Linear(1, 1)
    moving.operations = SimpleNamespace(moves=lambda net: True)
    assert begun(compiled) == begun(moving) == ([4], (3, 3), True)


def test_the_parts_of_a_batch_have_the_labels_of_the_whole():
    whole = finish(CASES["mar"](range(2))).report
    parts = [finish(CASES["mar"](range(i, i + 1))).report for i in range(2)]
    assert record.joined(parts).conditions == whole.conditions and len(whole.conditions) == 2


def test_progress_of_parts_grows():
    steps, _ = stepped(in_parts(Limited(2), 5, NET))
    shares = [step.done / step.total for step in steps[2:]]  # after the two attempts that failed at the second step
    assert shares == sorted(shares) and len({step.total for step in steps[2:]}) == 1
    assert [s.latents[:, 0].tolist() for s in steps[2:4]] == [[0, 1, 0, 0, 0], [10, 11, 0, 0, 0]]


def test_other_errors_pass_and_nothing_is_repeated():
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), UserError("cfg: no"), KeyboardInterrupt()):
        sampler = Limited(1, error)
        with pytest.raises(type(error)):
            finish(in_parts(sampler, 2, NET))
        assert sampler.parts == [2] and sampler.closed == 1


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def threads_at_every_step(net):
    """Threads of PyTorch while a sampler of ``net`` runs: at each of its steps, and after it was left in the middle."""
    seen = []

    def sampler(part):
        for _ in part:
            seen.append(torch.get_num_threads())
            yield SimpleNamespace(done=1, total=1)
        return (torch.zeros(len(part), 1),)

    finish(in_parts(sampler, 2, net))
    seen.append(torch.get_num_threads())
    left = in_parts(sampler, 2, net)
    next(left)
    left.close()
    return [*seen, torch.get_num_threads()]


def test_a_small_network_takes_one_thread_and_gives_the_others_back(three_threads, monkeypatch):
    monkeypatch.setattr(torch_state, "FEW_WEIGHTS", 3)
    assert threads_at_every_step(torch.nn.Linear(1, 1)) == [1, 1, 3, 1, 3]  # two weights
    assert threads_at_every_step(torch.nn.Linear(2, 1)) == [3, 3, 3, 3, 3]
    assert threads_at_every_step(torch.nn.Linear(1, 1, device="meta")) == [3, 3, 3, 3, 3]


def test_the_caller_has_its_threads_at_every_step(three_threads):
    def sampler(part):
        for _ in part:
            yield SimpleNamespace(done=1, total=1)
        return (torch.zeros(len(part), 1),)

    assert [torch.get_num_threads() for _ in in_parts(sampler, 2, torch.nn.Linear(1, 1))] == [3, 3]


def test_a_failed_run_gives_the_threads_back(three_threads):
    with pytest.raises(UserError):
        finish(in_parts(Limited(1, UserError("cfg: no")), 2, NET))
    assert torch.get_num_threads() == 3


def test_the_report_says_how_many_threads_there_were(three_threads):
    result = finish(in_parts(CASES["mar"], IMAGES, NET))
    assert result.report.threads == 1 and result.report.to_dict()["threads"] == 1
    assert finish(CASES["mar"](range(IMAGES))).report.threads == 3


def test_a_run_that_is_left_closes_its_sampler():
    sampler = Limited(2)
    run = in_parts(sampler, 2, NET)
    next(run)
    run.close()
    assert sampler.closed == 1


@pytest.mark.parametrize(
    "error, is_one",
    [
        (torch.OutOfMemoryError("x"), True),
        (torch.cuda.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to."), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("expected scalar type Half"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_lack_of_memory_is(error, is_one):
    assert out_of_memory(error) is is_one


def test_a_real_allocation_that_is_too_large_is_one():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46, dtype=torch.float64)
    assert out_of_memory(raised.value)


def test_parts_of_conditions_and_edits():
    codes = CodeCondition((torch.tensor([1]), torch.tensor([2]), torch.tensor([3])), ("a", "b", "c"), 8)
    part = codes.for_images(range(1, 3))
    assert [int(c) for c in part.codes] == [2, 3] and part.names == ("b", "c") and part.size == 8 and len(part) == 2
    assert from_ids((4, 5, 6)).for_images([2, 0]).labels == (6, 4)
    edit = Edit(torch.arange(3.0).view(3, 1, 1, 1), torch.ones(1, 2, 2))
    part = edit.for_images(range(1, 3), batch=3)
    assert part.start.flatten().tolist() == [1, 2] and len(part.mask) == 1
    for batch in (1, 2, 4):
        with pytest.raises(UserError, match=f"^latent_image: its batch has 3 entries, .* {batch} images"):
            edit.for_images([0], batch)


def test_in_chunks_halves_and_ends():
    sizes: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(x) > 2:
            raise MemoryError
        return x

    out = in_chunks(work, torch.arange(7), 16, lambda: None)
    assert torch.cat(out).tolist() == list(range(7)) and sizes == [7, 4, 2, 2, 2, 1]
    with pytest.raises(MemoryError):
        in_chunks(lambda x: work(x.repeat(3)), torch.arange(2), 2, lambda: None)
