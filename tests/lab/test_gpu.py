"""The command that measures on a card: a rehearsal on this CPU, what is kept of a run that was cut, and the table."""

import json
import time
from argparse import Namespace

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.lab import gpu
from fastar_nodes.lab.gpu import measure, worker
from fastar_nodes.lab.gpu.cases import PARTS, PRODUCTS, Case
from fastar_nodes.lab.gpu.store import PROBLEM, PartFile, missing
from fastar_nodes.model_loaders.catalogue import official
from fastar_nodes.networks import speed
from tiny_models import tiny_mar

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CASE = Case("a case", "--random MAR-L")
PART = "mar-methods"


# ------------------------------------------------------------------------------------------------ rehearsals


def test_a_rehearsal_measures_every_part_once(lab, tmp_path):
    run = f"gpu --rehearse --speeds plain --seconds 1500 --out {tmp_path}/out"
    answer = lab(run)
    assert answer.code == 0, answer.err

    held = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert held["machine"]["rehearsal"] and held["machine"]["copy_rate"] > 0
    assert [row["name"] for row in held["rows"]] == [case.name for part in PARTS for case in part.cases]
    for row in held["rows"]:
        assert all(found["done"] and PROBLEM not in found for found in row["measured"].values()), row
        if PRODUCTS in row["measured"]:
            assert all(row["measured"][PRODUCTS]["right"].values()), row
            assert len(row["measured"][PRODUCTS]["microseconds"]) == 10 and "| int8 as planes |" in answer.out
            continue
        assert row["measured"]["plain"]["seconds"] and row["floor_bytes"] > 0
        if row["batch"] == 1:
            counted = row["measured"]["launches, plain"]
            assert counted["operations"] > 100 and counted["equal"] == "yes" and not counted["extrapolated"]
    assert answer.out.rstrip().endswith((tmp_path / "out" / "gpu.md").read_text().rstrip())

    # A second run measures only what was cut.
    file = tmp_path / "out" / "parts" / "lazymar.json"
    first = json.loads(file.read_text())
    del first["1"]["measured"]["plain"]["done"]
    file.write_text(json.dumps(first))
    assert lab(f"{run} lazymar").code == 0

    second = json.loads(file.read_text())
    assert second["0"] == first["0"]
    assert second["1"]["measured"]["plain"]["done"]
    assert second["1"]["measured"]["launches, plain"] == first["1"]["measured"]["launches, plain"]


def test_a_folder_of_a_rehearsal_takes_no_measurements(lab, sentence, tmp_path):
    gpu.write_machine(tmp_path, rehearsal=True)
    answer = lab(f"gpu --device cpu --out {tmp_path}")
    assert sentence(answer).startswith(f"out: {tmp_path} holds a rehearsal; choose a different folder, because ")
    assert sentence(lab(f"gpu --rehearse --out {tmp_path} marr")).startswith("part: 'marr' is unknown")


# ------------------------------------------------------------------------------------------------ what is kept


def measured(tmp_path, run, limit=60.0):
    """The measurement "plain" of a case by a function, as its file holds it afterwards, and whether it is missing."""
    file = PartFile(tmp_path, "part")
    row = file.row(0, CASE)
    try:
        worker._measured(CASE, row, file, "plain", run, CPU, time.monotonic() + limit)
    except measure.TimeUp:
        pass
    held = PartFile(tmp_path, "part").rows["0"]
    return held["measured"].get("plain"), missing(held, "plain")


@pytest.mark.parametrize(
    ("error", "said"),
    [(UserError("speed: no."), "speed: no."), (RuntimeError("CUDA error: x\nmore"), "RuntimeError: CUDA error: x")],
)
def test_what_fails_is_the_sentence_of_its_row(error, said, tmp_path):
    def run(found):
        found["seconds"] = [1.5]
        raise error

    assert measured(tmp_path, run) == ({"seconds": [1.5], PROBLEM: said}, False)


def test_what_is_cut_is_kept_and_made_again(tmp_path):
    def run(found):
        found["seconds"] = [1.5]
        raise measure.TimeUp

    assert measured(tmp_path, run) == ({"seconds": [1.5]}, True)
    assert measured(tmp_path, lambda found: found.update(seconds=[2.0])) == ({"seconds": [2.0], "done": True}, False)
    assert measured(tmp_path, run) == ({"seconds": [2.0], "done": True}, False)


def test_models_that_cannot_be_built_are_tried_once(tmp_path, monkeypatch):
    tried = []

    def prepare(case, more, device):
        tried.append(case)
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(measure, "prepare", prepare)
    for _ in range(2):
        file = PartFile(tmp_path, "part")
        row = file.row(0, CASE)
        worker._measure_ours(CASE, row, file, ["plain"], "", CPU, time.monotonic() + 60, 0)

    assert tried == [CASE] and row["measured"] == {"build": {PROBLEM: "RuntimeError: CUDA error"}}


def test_a_device_that_answers_nothing_ends_the_process(tmp_path, monkeypatch):
    def run(found):
        raise RuntimeError("CUDA error")

    def broken(device):
        raise worker.Broken

    monkeypatch.setattr(worker, "_expect_device", broken)
    with pytest.raises(worker.Broken):
        measured(tmp_path, run)
    assert PartFile(tmp_path, "part").rows["0"]["measured"]["plain"] == {PROBLEM: "RuntimeError: CUDA error"}


@pytest.mark.parametrize(("code", "said"), [(4, "it did not end"), (-11, "its process ended with code -11")])
def test_a_process_that_dies_is_followed_by_another(code, said, tmp_path, monkeypatch):
    codes = [code, 0]

    def start(command):
        if len(codes) == 2:
            file = PartFile(tmp_path, PART)
            file.row(0, CASE)["measured"]["auto"] = {"began": True}
            file.save()
        return Namespace(returncode=codes.pop(0))

    monkeypatch.setattr(gpu, "_machine", lambda *_: {"rehearsal": True})
    monkeypatch.setattr(gpu.subprocess, "run", start)
    options = Namespace(parts=[PART], speeds="plain", rehearse=True)
    gpu._measure(options, tmp_path, CPU, time.monotonic() + 100)

    assert not codes
    assert PartFile(tmp_path, PART).rows["0"]["measured"]["auto"] == {PROBLEM: said}


def test_a_process_that_measures_nothing_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_machine", lambda *_: {"rehearsal": True})
    monkeypatch.setattr(gpu.subprocess, "run", lambda command: Namespace(returncode=1))
    options = Namespace(parts=[PART], speeds="plain", rehearse=True)
    with pytest.raises(UserError, match="device: nothing was measured, .*its process ended with code 1"):
        gpu._measure(options, tmp_path, CPU, time.monotonic() + 100)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A tiny MAR's row with speeds plain and compile, where compile draws with another seed if ``other`` is true."""
    draw = measure.draw
    monkeypatch.setattr(speed.Recordable, "compiled", lambda net, function, part: function)
    monkeypatch.setattr(speed, "BACKEND", "eager")
    monkeypatch.setattr(measure, "SHORT", 0.0)
    monkeypatch.setattr(official, "SIZES", {**official.SIZES, "MAR-L": (32, 2, 2, 1, 32)})

    def row(other):
        def drawn(made, seed, until):
            wrong = other and made.planned.on.model.net.speed == "compile"
            return draw(made, 5 if wrong else seed, until)

        monkeypatch.setattr(measure, "draw", drawn)
        case = Case("tiny", "--random MAR-L --samplers mar")
        file = PartFile(tmp_path, "part")
        out = file.row(0, case)
        more = "--set steps=4 --set diffusion_steps=2 --dtype fp32"
        worker._measure_ours(case, out, file, ["plain", "compile"], more, CPU, time.monotonic() + 100, 0)
        return out

    return row


def test_another_speed_draws_three_images_of_which_the_last_is_plains(compiled):
    row = compiled(other=False)
    assert len(row["measured"]["compile"]["seconds"]) == 3 and row["measured"]["compile"]["equal"] == "yes"
    assert measure.PLAIN_AGAIN not in row["measured"]


def test_plain_is_drawn_again_where_an_image_differs(compiled):
    row = compiled(other=True)
    assert row["measured"]["compile"]["equal"].startswith("no: up to ")
    assert row["measured"][measure.PLAIN_AGAIN] == {"equal": "yes", "done": True}
    assert "plain equals plain: yes" in gpu.table([row], {})


# ------------------------------------------------------------------------------------------------ figures


def test_images_are_compared_bit_by_bit(tmp_path):
    file = tmp_path / "plain.npy"
    codes = torch.arange(16).view(1, 4, 4)
    assert measure.compared(codes, file) == "no plain image"

    np.save(file, codes.numpy())
    assert measure.compared(codes.clone(), file) == "yes"
    assert measure.compared(codes.clamp(max=14), file) == "no: 93.75 % of the tokens"
    assert measure.compared(codes[:, :2], file) == "no: [1, 2, 4], plain [1, 4, 4]"

    latents = torch.ones(1, 2, 2, 2)
    np.save(file, latents.numpy())
    other = latents.clone()
    other[0, 0, 0, 0] += 2**-23
    assert measure.compared(other, file) == "no: up to 1.19e-07 of 1"


def test_a_pass_reads_all_weights_but_the_tables_and_the_head():
    net = tiny_mar().net
    transformer, head = measure.bytes_read(tiny_mar())

    table = net.class_emb.weight.numel()
    of_head = sum(weight.numel() for weight in net.head.parameters())
    assert head == 4 * of_head
    assert transformer == 4 * (sum(weight.numel() for weight in net.parameters()) - table - of_head)


def test_replays_of_graphs_are_counted(monkeypatch):
    class Graph:
        def replay(self):
            return 7

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    with measure._replays() as count:
        assert [Graph().replay(), Graph().replay()] == [7, 7]
    Graph().replay()
    assert count == [2]


def test_the_table_has_the_last_image_of_auto_and_the_share_of_the_floor():
    done = {"done": True}
    plain = {"seconds": [8.0], "peak_bytes": 10**9, **done}
    auto = {"seconds": [8.1, 5.0, 2.0], "peak_bytes": 2 * 10**9, "equal": "yes", "note": "", **done}
    counted = {"operations": 1234, "replays": 56, "extrapolated": True, **done}
    row = {"name": "MAR", "batch": 1, "dtype": "fp16", "acceptance": 0.5, "floor_bytes": 10**12}
    row["measured"] = {"plain": plain, "auto": auto, "launches, auto": counted, "compile": {PROBLEM: "it failed"}}

    text = gpu.table([row], {"copy_rate": 2e12})
    names, _, cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found = dict(zip(names, cells, strict=True))
    assert found["auto, s"] == "2" and found["plain, s"] == "8" and found["speed-up"] == "4.00"
    assert found["floor, s"] == "0.5" and found["share %"] == "25" and found["auto GB"] == "2.0"
    assert found["auto"] == "about 1,234 + 56 graphs" and found["accepted %"] == "50"
    assert found["remarks"] == "compile: it failed" and "compile, s" not in found
