"""Values that no editor sends, on the widgets and sockets of every node: each run ends in a result
or in one sentence.
"""

import json
import math
import pkgutil
import random
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_comfy
import janus_images
import nextstep_models
import pytest
import tiny
import torch
from fastar_nodes import nodes
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.nodes import conditioning, editing, host, loaders, samplers
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.reports import exchange
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import from_ids
from graphs import WIDGETS, default
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file
from small_settings import small
from tiny_tokens import tiny_latent_samplers
from torch_states import STATES, state_of_torch

MODULES = [import_module(f"{nodes.__name__}.{module.name}") for module in pkgutil.iter_modules(nodes.__path__)]
NODES = {node.define_schema().node_id: node for module in MODULES for node in getattr(module, "NODES", ())}
# Values of widgets with which a run is short and fits the tiny models.
SMALL = {"steps": 4, "diffusion_steps": 4, "detail": "81", "preset": "custom", "image": "a.png"}
SMALL |= dict.fromkeys(("images", "images_per_label", "window", "duration", "limit"), 1)
SHORT = "steps=2, diffusion_steps=2"
OF_NODE = {
    "FastARMuLoSDSampler": {"neighbours": 4},
    "FastARGtRSampler": {"steps": 5},
    "FastARLoadLatentSamplers": {"checkpoint": "own.safetensors"},
    "FastARBitDanceSampler": {"width": 8, "height": 8},
    "FastARNextStepSampler": {"width": 12, "height": 12, "diffusion_steps": 2},
    "FastARSweep": {"sampler": "mar", "settings": SHORT, "x": "cfg", "x_values": "2", "y": "none"},
    "FastARAnySampler": {"sampler": f"mar: {SHORT}"},
}


class Odd:
    """Compares, prints and hashes with an error."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "\x00odd\n" * 2000


# Small values that keep a run short where they happen to be valid.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, -2, 3.7, -0.0,
    1e300, 1 << 64, -(1 << 70), 10**400, float("nan"), math.inf, -math.inf,
    "", " ", "\x00", "a\x00b", "../../x", "x" * 10_000, "1e999", "nan", "9" * 5000,
    "\ud800", "\u202e\u0000", "true", "None", "-1", "[]", b"", b"\x00" * 10_000,
    [], [1], [[]], [None] * 5000, {}, {"a": 1}, {"samples": None}, {"samples": [1]}, (), set(), frozenset({1}),
    range(3), complex(1, 2), object, object(), Odd(), print, Exception("x"), ["1", 0], {"__value__": [1]},
    torch.zeros(0), torch.zeros(3), torch.tensor(float("nan")), torch.zeros(1, 2, 3, 4, 5, 6),
    [{}] * 3, "a\nb" * 3000,
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Iterator[None]:
    """Stands in for what nodes read and nobody downloads here: a Janus, a NextStep, a text encoder, latent samplers,
    and an image with a report."""
    folder = tmp_path_factory.mktemp("files")
    stand_ins = {"janus": janus_images.one_file(folder / "janus.safetensors"), "t5": folder / "t5.safetensors"}
    stand_ins["t5"].touch()
    stand_ins["nextstep"] = nextstep_models.FOLDER / "model"
    enlarging = tiny_latent_samplers().net
    stand_ins["latent-samplers"] = folder / "own.safetensors"
    save_file(enlarging.state_dict(), stand_ins["latent-samplers"], metadata={"name": "own samplers"})
    absent, resolve = hub.absent, hub.resolve

    def encoder(*_: Any) -> Any:
        return SimpleNamespace(net=torch.nn.Linear(1, 1), encode=lambda texts: [torch.ones(2, 6) for _ in texts])

    own, check = "own.safetensors", hub.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "check", lambda choice, *more: None if choice == own else check(choice, *more))
        patch.setattr(hub, "absent", lambda name, kind, *more: None if kind in stand_ins else absent(name, kind, *more))
        patch.setattr(hub, "resolve", lambda name, kind, *more: stand_ins.get(kind) or resolve(name, kind, *more))
        patch.setattr(conditioning, "load_text_encoder", encoder)
        patch.setattr(host.folders, "t5_tokenizer", lambda: None)
        patch.setattr(fake_comfy.state, "folder", folder)
        write_image(folder / "input")
        yield


def write_image(folder: Path) -> None:
    """Write a.png with the report of a run, as Save Image does."""
    runs = exchange.described([tiny.a_report("mar", steps=4)], "7", ["MAR"], [0])
    about = PngInfo()
    about.add_text(exchange.KEY, json.dumps({"version": 1, "runs": runs}))
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png", pnginfo=about)


PICTURES = torch.rand(1, 8, 8, 3, generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(8) < 4).float().expand(1, 8, 8)


@pytest.fixture(scope="module")
def given(files) -> dict[str, Any]:
    """What fits each socket, by node id and name; "" for every other node."""
    plain = tiny.a_mar(4, file={"steps": 2, "diffusion_steps": 2})
    report = tiny.a_report("mar")
    report.maps["step"] = torch.arange(4).view(1, 2, 2).numpy()
    shared = {"model": plain, "draft": plain, "condition": from_ids([1]), "tar": Loaded.of(tiny.tiny_tar())}
    shared |= {"inpainted": PICTURES, "mask": MASK, "image": PICTURES, "report": report}
    shared |= {"image_1": [PICTURES], "report_1": [report]}
    shared["crop"] = editing.CropAroundMask.execute(PICTURES, MASK).result[2]

    found = {"": shared, "FastARTimeLapse": {"image_1": PICTURES, "report_1": report}}
    reader = loaders.LoadJanus.execute(**valid_inputs(loaders.LoadJanus, found)).result[0]
    found["FastARAskAboutImage"] = {"model": reader, "image": PICTURES}
    return found | {name: given_to_sampler(node) for name, node in tiny.NODES.items()}


def given_to_sampler(node: Any) -> dict[str, Any]:
    """What fits the sockets of a sampler's node: models of its family, and a part of an image to draw again."""
    models = tiny.models(node)
    start = next(iter(models.values())).vae.encode(PICTURES)
    cache = samplers.LazyMARCache.execute(**valid_inputs(samplers.LazyMARCache, {"": {}})).result[0]
    codes = SAMPLERS[node.sampler].needs_up_sampler
    condition = tiny.a_prompt(images=1) if codes else tiny.subjects(node.sampler).for_images([0])
    return {**models, "condition": condition, "latent_image": {"samples": start}, "mask": MASK, "cache": cache}


def valid_inputs(node: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Inputs with which the node runs, widgets at small values."""
    about = node.define_schema()
    known = given.get(about.node_id, given[""])
    of_sampler = small(node.sampler) if about.node_id in tiny.NODES else {}
    values = SMALL | of_sampler | OF_NODE.get(about.node_id, {})
    out = {}
    for i in about.inputs:
        if i.kind in WIDGETS:
            out[i.id] = values.get(i.id, default(i))
        elif i.id in known:
            out[i.id] = known[i.id]
    if about.is_input_list:
        out = {name: value if isinstance(value, list) else [value] for name, value in out.items()}
    return out


def cases(given: dict[str, Any], count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Node ids in turn, each with one to three of its inputs at hostile values."""
    rng, names = random.Random(seed), sorted(NODES)
    inputs = {name: valid_inputs(NODES[name], given) for name in names}
    every = {name: [i.id for i in NODES[name].define_schema().inputs] for name in names}
    lists = {name: NODES[name].define_schema().is_input_list for name in names}
    for k in range(count):
        name = names[k % len(names)]
        chosen = rng.sample(every[name], min(len(every[name]), rng.choice((1, 1, 1, 2, 3))))
        values = {field: rng.choice(VALUES) for field in chosen}
        if lists[name]:  # ComfyUI gives such nodes lists only
            values = {field: rng.choice(([value], [value], [value, value], [])) for field, value in values.items()}
        yield name, inputs[name] | values


def judge(name: str, inputs: dict[str, Any]) -> str:
    """ "" if the node ends in a result or a sentence, else what went wrong."""
    node = NODES[name]
    try:
        check: Callable[..., Any] | None = getattr(node, "validate_inputs", None)
        if check is not None:
            said = check(**{k: v for k, v in inputs.items() if k in signature(check).parameters})
            if said is not True and (not isinstance(said, str) or not 0 < len(said) <= 400):
                return f"validate_inputs said {said!r}"
            if said is not True:
                return ""
        node.execute(**inputs)
    except UserError as sentence:
        text = str(sentence)
        field = text.partition(":")[0]
        good = 0 < len(text) <= 400 and not {*"\x00\n"} & {*text} and field.isprintable() and " " not in field
        return "" if good else f"no sentence: {text!r}"
    except Exception:  # noqa: BLE001 - what this test looks for
        return traceback.format_exc(limit=-6)
    return ""


def test_a_result_or_a_sentence(given):
    wrong = [f"{name}: {problem}" for name, inputs in cases(given, 400, 3) if (problem := judge(name, inputs))]
    assert not wrong, "\n\n".join(wrong[:5])


@pytest.mark.parametrize("name", NODES)
def test_every_node_runs_with_its_valid_inputs(name, given):
    """Otherwise a hostile value would never be reached."""
    result = NODES[name].execute(**valid_inputs(NODES[name], given)).result
    assert len(result) == len(NODES[name].define_schema().outputs)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a node's result: of images, latents and conditions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(one)
    elif hasattr(value, "entries"):
        yield from tensors_of(value.entries)


@pytest.mark.parametrize("name", NODES)
@pytest.mark.fast_cases(every=3)
def test_every_node_gives_the_same_whatever_others_left_in_torch(name, given):
    node, inputs = NODES[name], valid_inputs(NODES[name], given)
    plain = [*tensors_of(node.execute(**inputs).result)]
    with STATES["everything"]():
        found = state_of_torch()
        made = [*tensors_of(node.execute(**inputs).result)]
        assert state_of_torch() == found

    assert len(made) == len(plain)
    for one, other in zip(made, plain, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
        # The Advisor's image shows the seconds of its runs.
        assert name == "FastARAdvisor" or torch.equal(one, other)
