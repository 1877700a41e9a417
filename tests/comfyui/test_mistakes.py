"""Mistakes through a real server: typos, wrong files, wrong numbers, wrong wires, muted nodes, values over links.

Mistakes that ComfyUI has no part in are tested in tests/nodes.

Every answer is a sentence: a rejection blames the widget or socket that is wrong and no other, and a failed run's
message begins with its name. Neither holds a stack trace. The server's history and the editor's report hold one for
every failed run; the toast does not (test_browser.py).
"""

import json
import re
from typing import Any

import pytest
from comfy_host import Comfy, Rejected, defaults
from sampler_nodes import SAMPLER_NODES, SCHEMAS, demo_models

USER_ERROR = "fastar.UserError"
FEW = {"steps": 2, "diffusion_steps": 2, "guided_steps": 1}
MAR, TOKENS, DTOK = ["mar", 0], ["gpt", 0], ["dtok", 0]
LABEL, CODES = ["label", 0], ["codes", 0]
# One of every node on the demo: key to its type and links.
NODES: dict[str, tuple[str, dict[str, Any]]] = {
    "mar": ("FastARLoadMAR", {}),
    "draft": ("FastARLoadMAR", {"checkpoint": "demo-draft"}),
    "gpt": ("FastARLoadLlamaGen", {"checkpoint": "demo-llamagen-low"}),
    "large": ("FastARLoadLlamaGen", {"checkpoint": "demo-llamagen"}),
    "par model": ("FastARLoadLlamaGen", {"checkpoint": "demo-par"}),
    "tar": ("FastARLoadTar", {}),
    "bitdance": ("FastARLoadBitDance", {}),
    "dtok": ("FastARLoadTarDetokenizer", {"checkpoint": "demo-dtok-low"}),
    "label": ("FastARClassLabel", {"labels": "9"}),  # of every model
    "text": ("FastARLlamaGenPrompt", {}),
    "codes": ("FastARTarPrompt", {"tar": ["tar", 0], "detail": "81"}),
    "picture": ("EmptyImage", {"width": 64, "height": 64, "batch_size": 1, "color": 0}),
    "seen": ("FastARImageToCodes", {"image": ["picture", 0]}),
    "plain": ("FastARMARSampler", {"model": MAR, "condition": LABEL}),
    "hybrid": ("FastARFastHybridSampler", {"model": MAR, "condition": LABEL}),
    "lazy": ("FastARLazyMARSampler", {"model": MAR, "condition": LABEL}),
    "cache": ("FastARLazyMARCache", {}),
    "cached": ("FastARMARSampler", {"model": MAR, "condition": LABEL, "cache": ["cache", 0]}),
    "cspd": ("FastARCSpDSampler", {"draft": ["draft", 0], "target": MAR, "condition": LABEL}),
    "serial": ("FastARLlamaGenSampler", {"model": TOKENS, "condition": LABEL}),
    "par": ("FastARPARSampler", {"model": ["par model", 0], "condition": LABEL}),
    "zipar": ("FastARZipARSampler", {"model": TOKENS, "condition": LABEL}),
    "gtr": ("FastARGtRSampler", {"model": MAR, "condition": LABEL}),
    "blocks": ("FastARBitDanceSampler", {"model": ["bitdance", 0], "condition": LABEL, "width": 64, "height": 64}),
    "mulosd": ("FastARMuLoSDSampler", {"target": ["large", 0], "draft": TOKENS, "condition": LABEL}),
    "draw": ("FastARLlamaGenSampler", {"model": DTOK, "condition": CODES}),
    "redraw": ("FastARLlamaGenSampler", {"model": DTOK, "condition": ["seen", 0]}),
    "see": ("VAEDecode", {"samples": ["plain", 0], "vae": ["mar", 1]}),
    "compare": ("FastARCompare", {"image_1": ["see", 0], "report_1": ["plain", 1]}),
    "map": ("FastARTokenMap", {"report": ["plain", 1], "image": ["see", 0]}),
    "report": ("FastARReport", {"report": ["plain", 1]}),
    "int": ("PrimitiveInt", {"value": 1}),
    "float": ("PrimitiveFloat", {"value": 1.0}),
    "string": ("PrimitiveString", {"value": "cat"}),
    "typo": ("PrimitiveString", {"value": "cat, catt"}),
    "blank": ("PrimitiveStringMultiline", {"value": " \n"}),
    "thousand": ("PrimitiveInt", {"value": 1000}),
    "large float": ("PrimitiveFloat", {"value": 1e9}),
    "mask": ("SolidMask", {"value": 1.0, "width": 64, "height": 64}),
    "nothing": ("SolidMask", {"value": 0.0, "width": 64, "height": 64}),
    "below": ("PrimitiveInt", {"value": -5}),
    "empty": ("EmptyLatentImage", {"width": 64, "height": 64, "batch_size": 1}),
    "three": ("EmptyImage", {"width": 64, "height": 64, "batch_size": 3, "color": 0}),
    "coded": ("VAEEncode", {"pixels": ["picture", 0], "vae": ["mar", 1]}),
}
# The other samplers, on the models of their kind.
KEYS = {"FastARLoadMAR": "mar", "FastARLoadLlamaGen": "gpt", "FastARLoadBitDance": "bitdance"}
for node in {*SAMPLER_NODES} - {kind for kind, _ in NODES.values()}:
    models = {socket: [KEYS[loader], 0] for socket, (loader, _) in demo_models(SAMPLER_NODES[node]).items()}
    NODES[SAMPLER_NODES[node].name] = (node, {**models, "condition": LABEL})
SAMPLERS = [key for key, (kind, _) in NODES.items() if kind in SAMPLER_NODES]
# What is connected behind a node, so that it runs.
BEHIND = {"cache": "cached", "label": "plain", "text": "serial", "codes": "draw", "seen": "redraw"}
BEHIND |= {"mar": "plain", "gpt": "serial", "tar": "draw", "dtok": "draw"}


def prompt(info: dict[str, Any], key: str, **inputs: Any) -> dict[str, Any]:
    """A small graph that runs node ``key`` with changed inputs; None takes an input away."""
    built: dict[str, Any] = {}

    def add(name: str) -> None:
        kind, links = NODES[name]
        values = defaults(info[kind], **links) if kind.startswith("FastAR") else dict(links)
        values |= {k: v for k, v in FEW.items() if k in values}
        if name == key:
            values = {k: v for k, v in {**values, **inputs}.items() if v is not None}
        if name == "serial" and key == "text":
            values["condition"] = ["text", 0]
        built[name] = {"class_type": kind, "inputs": values}
        for value in values.values():
            if isinstance(value, list) and len(value) == 2 and value[0] in NODES and value[0] not in built:
                add(value[0])

    last = BEHIND.get(key, key)
    add(last)
    if last in SAMPLERS:  # the report shows whether it ran
        built["told"] = {"class_type": "FastARReport", "inputs": {"report": [last, 1], "format": "text"}}
        last = "told"
    shown = {"class_type": "PreviewImage", "inputs": {"images": [last, 0]}}
    told = {"class_type": "PreviewAny", "inputs": {"source": [last, 0]}}
    built["out"] = shown if last in ("see", "compare", "map") else told
    return built


# Name to (node, inputs, the input that is blamed).
Case = tuple[str, dict[str, Any], str]
BEFORE: dict[str, Case] = {}
TYPOS = ["catt", "bot", "hous", "kat", "cat boat", "cat/boat", "1e3", "3.5", "1000", "-1", "99999999999", "猫", "🐱"]
TYPOS += ["<b>cat</b>", "../cat", "cat, catt", "boat\nhous", "x" * 5000, "cat\u200b", "None", "golden retriver", "\\n"]
TYPOS += ["['cat']"]
for word in TYPOS:
    BEFORE[f"label {word[:20]!r}"] = ("label", {"labels": word}, "labels")
FILES = ["nothing.safetensors", "../../etc/passwd", "/etc/passwd", "..\\x.pth", "", "demo ", "Demo", "mar-base"]
LOADERS = {"mar": ("checkpoint", "decoder"), "gpt": ("checkpoint", "decoder"), "tar": ("checkpoint",)}
LOADERS |= {"dtok": ("checkpoint", "ta_tok", "decoder"), "seen": ("ta_tok",), "text": ("encoder",)}
for key, fields in LOADERS.items():
    for field in fields:
        for name in FILES:
            if (key, field) == ("mar", "checkpoint") and name in ("demo ", "mar-base"):
                continue  # other spellings of entries of its menu
            BEFORE[f"{key}.{field} {name!r}"] = (key, {field: name}, field)
# Numbers outside their range, words for numbers, choices that are none: of every node.
for key, (kind, _) in NODES.items():
    if key in ("draft", "large", "par model", "cached", "draw", "redraw") or kind not in SCHEMAS:
        continue
    for name, type_, _default, *rest in SCHEMAS[kind]["widgets"]:
        if type_ in ("INT", "FLOAT"):
            low, high = rest[0][:2]
            BEFORE[f"{key}.{name} above"] = (key, {name: high * 2 + 1}, name)
            BEFORE[f"{key}.{name} below"] = (key, {name: low - 1}, name)
            BEFORE[f"{key}.{name} a word"] = (key, {name: "many"}, name)
        elif type_ == "COMBO" and rest:
            BEFORE[f"{key}.{name} no choice"] = (key, {name: "best"}, name)
# Wires of another type, by socket type.
WIRES = {"FASTAR_MAR": TOKENS, "FASTAR_TOKEN_MODEL": MAR, "FASTAR_TAR": DTOK, "FASTAR_CACHE": MAR}
WIRES |= {"IMAGE": ["plain", 0], "FASTAR_REPORT": ["plain", 0], "LATENT": ["see", 0], "MASK": ["see", 0]}
WIRES |= {"UPSCALE_MODEL": TOKENS}
for key, (kind, _links) in NODES.items():
    if kind not in SCHEMAS or key in ("cached", "draw", "redraw"):
        continue
    for name, type_, need in SCHEMAS[kind]["inputs"]:
        if name.startswith(("image_", "report_")) and name[-1] > "2":
            continue
        BEFORE[f"{key}.{name} wrong wire"] = (key, {name: WIRES.get(type_, MAR)}, name)
        if need == "required":
            BEFORE[f"{key}.{name} muted"] = (key, {name: None}, name)
BEFORE["an image without its sampler"] = ("see", {"samples": None}, "samples")
BEFORE["an image without its decoder"] = ("see", {"vae": None}, "vae")


def is_plain(text: str) -> bool:
    """Whether it can be shown to a user: no stack trace and no exception's name."""
    return not any(word in text for word in ("Traceback", 'File "', "UserError", "KeyError", "TypeError", "ValueError"))


def rejection(comfy: Comfy, graph: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a prompt that it must reject."""
    with pytest.raises(Rejected) as problem:
        comfy.queue(graph)
    return json.loads(str(problem.value))


def blamed(error: dict[str, Any]) -> str:
    """The input that a sentence is about: ComfyUI puts the sentence of a node that checks several inputs on each."""
    name = error["extra_info"]["input_name"]
    own = re.match(r"(\w+): ", error["details"].removeprefix(f"{name} - "))
    return own[1] if own else name


@pytest.mark.parametrize("name", BEFORE)
def test_rejected_before_the_run_and_only_what_is_wrong_is_blamed(comfy, info, name):
    key, inputs, field = BEFORE[name]
    answer = rejection(comfy, prompt(info, key, **inputs))
    assert set(answer["node_errors"]) == {key}, answer
    errors = answer["node_errors"][key]["errors"]
    assert {blamed(error) for error in errors} == {field}, errors
    told = " ".join(f"{error['message']}: {error['details']}" for error in errors)
    assert is_plain(told) and len(told) < 1500, told


AT_RUN_TIME: dict[str, Case] = {
    "not a number": ("plain", {"cfg": float("nan")}, "cfg"),
    "another model's image": ("plain", {"latent_image": ["empty", 0], "mask": ["mask", 0]}, "latent_image"),
    "a word for a model": ("plain", {"model": "mar"}, "model"),
    "a dictionary for a report": ("compare", {"report_1": {"a": 1}}, "report_1"),
    "a word for an image": ("compare", {"image_1": "cat.png"}, "image_1"),
    "not a number beside a linked one": ("hybrid", {"lookahead": ["int", 0], "threshold": float("nan")}, "threshold"),
    "a wired label that is unknown": ("label", {"labels": ["typo", 0]}, "labels"),
    "a wired label of nothing": ("label", {"labels": ["blank", 0]}, "labels"),
    "wired steps beyond the tokens": ("plain", {"steps": ["thousand", 0]}, "steps"),
    "a wired period below its range": ("cache", {"refresh_period": ["below", 0]}, "refresh_period"),
    "a wired -1 for the model's own": ("serial", {"top_k": ["below", 0]}, "top_k"),
    "a text for a model of class labels": ("text", {"allow_download": True}, "condition"),
    "a wired column count": ("compare", {"columns": ["thousand", 0]}, "columns"),
    "a MAR's latent on a token decoder": ("see", {"vae": ["gpt", 1]}, "samples"),
    "a token latent on a MAR's decoder": ("see", {"samples": ["serial", 0]}, "samples"),
    "latents of another size": ("see", {"samples": ["empty", 0]}, "samples"),
    "a map of other images": ("map", {"image": ["three", 0]}, "image"),
}


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_one_sentence_at_run_time(comfy, info, name):
    key, inputs, field = AT_RUN_TIME[name]
    entry = comfy.wait(comfy.queue(prompt(info, key, **inputs)))
    message = comfy.failure(entry).strip()
    assert message.startswith(f"{field}: "), message
    assert is_plain(message) and "\n" not in message and len(message) < 600
    assert comfy.exception_type(entry) == USER_ERROR and entry["status"]["status_str"] == "error"
