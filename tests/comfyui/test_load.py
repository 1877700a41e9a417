"""A server under load: random graphs, hostile values, cancels. Every prompt ends; memory, threads and files come back.

``make soak`` runs 200 prompts over at least 20 minutes; the normal tier runs 12.
"""

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from comfy_host import TEMPLATES, Comfy, Missing, Rejected, defaults, graph, load_workflow, to_api
from sampler_nodes import nodes_of

LONG = os.environ.get("FASTAR_SOAK") == "1"
PROMPTS, SECONDS = (200, 1200.0) if LONG else (12, 0.0)

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3.7, 1e300, 10**30, float("nan"), float("inf"),
    "", " ", "\x00", "a\x00b", "../../x", "x" * 10_000, "1e999", "\u202e", "true", "-1",
    [], [1], [[]], [None] * 500, {}, {"a": 1}, {"samples": [1]}, ["1", 0], ["1", 7], ["99", 0],
    {"__value__": [1]}, {"__value__": ["1", 0]},
)  # fmt: skip
# Widgets that bound the time of a run.
SMALL = {"steps": 4, "diffusion_steps": 4, "images_per_label": 1, "images": 1}


def ours(prompt: dict[str, Any]) -> list[str]:
    """Ids of the nodes of this pack."""
    return [key for key, node in prompt.items() if node["class_type"].startswith("FastAR")]


def shortened(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt with :data:`SMALL` values where it has numbers for them."""
    for node in prompt.values():
        node["inputs"] |= {k: v for k, v in SMALL.items() if isinstance(node["inputs"].get(k), int)}
    return prompt


# Blocks from 256 KiB return to the system when they are freed;
# glibc else raises this bound to 32 MiB and keeps what is below.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
# oneDNN else keeps up to 1024 compiled products, one for every shape that was met.
RETURNED |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
# MKL else keeps the largest work areas that it needed.
RETURNED |= {"MKL_DISABLE_FAST_MM": "1"}


@pytest.fixture(scope="module")
def comfy() -> Iterator[Comfy]:
    """A server of this module's own."""
    try:
        # By default ComfyUI keeps the results of every earlier prompt until memory is short.
        server = Comfy(RETURNED, ["--cache-classic"])
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


@pytest.fixture(scope="module")
def info(comfy: Comfy) -> dict[str, Any]:
    return comfy.get("/object_info")


@pytest.fixture(scope="module")
def prompts(info) -> list[dict[str, Any]]:
    """The shared graphs, shortened, and the small one of the other tests."""
    found = [to_api(load_workflow(name), info) for name in TEMPLATES]
    return [shortened(prompt) for prompt in (graph(), *found)]


def spoil(prompt: dict[str, Any], rng: random.Random) -> str:
    """Set one input of a node of this pack to a hostile value; returns what was done."""
    key = rng.choice(ours(prompt))
    name, value = rng.choice(sorted(prompt[key]["inputs"])), rng.choice(VALUES)
    prompt[key]["inputs"][name] = value
    return f"{prompt[key]['class_type']}.{name} = {str(value)[:40]!r}"


def expect_an_end(comfy: Comfy, entry: dict[str, Any], what: str) -> str:
    """How a prompt ended: "", "interrupted" or a sentence. A node of this pack must not fail in another way."""
    for name, data in entry["status"]["messages"]:
        if name == "execution_error":
            message = data["exception_message"].strip()
            if data["node_type"].startswith("FastAR"):
                assert "UserError" in data["exception_type"], f"{what}: {data['exception_type']}: {message}"
                assert 0 < len(message) <= 400 and "\n" not in message, f"{what}: {message!r}"
            return message
    return Comfy.failure(entry)


def reseed(prompt: dict[str, Any], rng: random.Random) -> None:
    """New seeds, also of core's Seed nodes; otherwise ComfyUI takes results of an earlier prompt from its cache."""
    for node in prompt.values():
        if isinstance(node["inputs"].get("seed"), int):
            node["inputs"]["seed"] = rng.randrange(1 << 40)


def footprint(comfy: Comfy) -> tuple[float, int, int]:
    """Resident MiB, threads and open files of the server, all models unloaded, after the reference graph.

    ComfyUI keeps the graph and the outputs of every prompt in its history, which is emptied.
    """
    comfy.run(shortened(graph(n3={"seed": random.randrange(1 << 30)})))
    comfy.post("/history", {"clear": True})
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    least = float("inf")
    process = Path("/proc") / str(comfy.process.pid)
    for _ in range(15):  # the server frees between prompts, and collects cycles at most every 10 s
        time.sleep(0.5)
        comfy.process.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        status = (process / "status").read_text()
        least = min(least, int(status.split("VmRSS:")[1].split()[0]) / 1024)
    return least, len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


def leftovers(comfy: Comfy) -> set[str]:
    """Files below the server's folder, images and its log aside."""
    kept = ("output", "temp", "server.log")
    found = (p.relative_to(comfy.base) for p in comfy.base.rglob("*") if not p.is_symlink() and p.is_file())
    return {str(p) for p in found if p.parts[0] not in kept and "custom_nodes" not in p.parts}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_many_prompts_leave_nothing_behind(comfy, prompts):
    rng, began, files = random.Random(11), time.monotonic(), leftovers(comfy)
    settled: tuple[float, int, int] | None = None
    ends: dict[str, int] = {}
    order = rng.sample(prompts, len(prompts)) if LONG else []
    # Before memory is measured: every graph once, then bad values and cancels, whose modules and tables stay too.
    first = len(order) + 20 if LONG else PROMPTS // 2
    k = 0
    while k < PROMPTS or time.monotonic() - began < SECONDS:
        batch = []
        for _ in range(min(4, max(1, PROMPTS - k))):
            prompt, what = deepcopy(order.pop() if order else rng.choice(prompts)), "valid"
            reseed(prompt, rng)
            if not order and rng.random() < 0.25:
                what = spoil(prompt, rng)
            try:
                batch.append((comfy.queue(prompt), what))
            except Rejected as answer:
                text = str(answer)
                assert "Traceback" not in text and "Internal Server Error" not in text, f"{what}: {text[:2000]}"
                ends["rejected"] = ends.get("rejected", 0) + 1
            k += 1
        if not order and rng.random() < 0.4:
            time.sleep(rng.random() * 2)
            comfy.post("/interrupt", {})
        if not order and batch and rng.random() < 0.2:
            comfy.post("/queue", {"delete": [batch.pop()[0]]})
        for prompt_id, what in batch:
            end = expect_an_end(comfy, comfy.wait(prompt_id, 600), what) or "picture"
            kind = end if end in ("picture", "interrupted") else "sentence"
            ends[kind] = ends.get(kind, 0) + 1
        comfy.post("/history", {"clear": True})  # else it grows by every graph, and leaves its memory in pieces
        if settled is None and k >= first:
            settled = footprint(comfy)
    while comfy.get("/queue")["queue_running"] or comfy.get("/queue")["queue_pending"]:
        time.sleep(0.5)  # a prompt that began before it was deleted
    after = footprint(comfy)
    assert settled is not None
    print(f"{k} prompts in {time.monotonic() - began:.0f} s: {ends}; MiB, threads, files {settled} -> {after}")
    assert after[0] <= settled[0] * (1.01 if LONG else 1.10)
    assert after[1] <= settled[1] + 1 and after[2] <= settled[2] + 2
    assert leftovers(comfy) <= files


SLOW = {"steps": 9, "diffusion_steps": 800}  # few enough AR steps for the stages of GtR on 64 tokens
# Node that is interrupted; the loader of its model and what makes its condition.
RUNS = {
    **dict.fromkeys(nodes_of("masked"), ("FastARLoadMAR", "FastARClassLabel")),
    **dict.fromkeys(nodes_of("tokens"), ("FastARLoadLlamaGen", "FastARClassLabel")),
    **dict.fromkeys(nodes_of("blocks"), ("FastARLoadBitDance", "FastARClassLabel")),
    "FastARTarPrompt": ("FastARLoadTar", ""),
}
DRAFTS = {"FastARLoadMAR": "demo-draft", "FastARLoadLlamaGen": "demo-llamagen-low"}
# Values of widgets that differ from the defaults.
CHOSEN = {
    "FastARLoadLlamaGen": {"checkpoint": "demo-llamagen"},
    "FastARClassLabel": {"labels": "cat", "label_set": "picture-book"},
    "FastARPARSampler": {"grouping": "ablation: non-local"},  # the model is no PAR
    "FastARMuLoSDSampler": {"neighbours": 100},  # of the 512 codes
    "FastARBitDanceSampler": {"width": 64, "height": 64, "diffusion_steps": 400},
    "FastARTarPrompt": {"images": 64},  # one image is complete before the request arrives
}


def prompt_with(kind: str, info: dict[str, Any]) -> dict[str, Any]:
    """A prompt whose node "3" is of this type, with the models of the demo."""
    loader, maker = RUNS[kind]
    inputs = defaults(info[kind], **CHOSEN.get(kind, {}))
    prompt = {"1": {"class_type": loader, "inputs": defaults(info[loader], **CHOSEN.get(loader, {}))}}
    prompt["3"] = {"class_type": kind, "inputs": inputs}
    if maker:
        prompt["2"] = {"class_type": maker, "inputs": defaults(info[maker], **CHOSEN[maker])}
        inputs["condition"] = ["2", 0]
    else:
        inputs |= {"tar": ["1", 0], "text": "a cat"}
    sockets = {**info[kind]["input"]["required"], **info[kind]["input"].get("optional", {})}
    for name in ("model", "target"):
        if name in sockets:
            inputs[name] = ["1", 0]
    if "draft" in sockets:
        prompt["4"] = {"class_type": loader, "inputs": defaults(info[loader], checkpoint=DRAFTS[loader])}
        inputs["draft"] = ["4", 0]
    prompt["5"] = {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}}
    return prompt


@pytest.mark.parametrize("kind", RUNS)
def test_interrupt_within_a_step(comfy, info, kind):
    prompt = prompt_with(kind, info)
    target = "3"
    changes = SLOW if RUNS[kind][0] == "FastARLoadMAR" else {}
    for key in ours(prompt):
        inputs = prompt[key]["inputs"]
        inputs |= {k: v for k, v in changes.items() if k in inputs}
    reseed(prompt, random.Random())
    client = uuid.uuid4().hex
    with comfy.events(client) as events:
        queued = comfy.queue(prompt, client)
        steps: list[tuple[int, float]] = []
        asked = 0.0
        for kind, data in events:
            if kind == "progress" and data["node"] == target:
                steps.append((data["value"], time.monotonic()))
                if len(steps) == 2:
                    comfy.post("/interrupt", {})
                    asked = time.monotonic()
            if kind == "execution_interrupted":
                took = time.monotonic() - asked
                break
            assert kind not in ("execution_success", "execution_error"), (kind, data)
    late = [at for _, at in steps if asked and at > asked]
    # A step may end between the reading of its event and the arrival of the request, and one is under way.
    assert len(late) <= 2, f"{kind}: {len(late)} steps after the request"
    print(f"{kind}: interrupted {took:.3f} s after the request, {len(late)} steps later")
    assert comfy.failure(comfy.wait(queued)) == "interrupted"
