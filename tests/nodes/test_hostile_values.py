"""Values that no editor sends, on the widgets and sockets of every node: each run ends in a result
or in one sentence.
"""

import math
import random
import traceback
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import tiny
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import compare, conditioning, editing, loaders, samplers, timelapse
from fastar_nodes.nodes.host import Loaded
from fastar_nodes.samplers.conditioning import from_ids
from graphs import WIDGETS, default

MODULES = (loaders, conditioning, samplers, editing, compare, timelapse)
NODES = {node.define_schema().node_id: node for module in MODULES for node in module.NODES}


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


def sockets() -> dict[str, Any]:
    """What fits each socket, by node id and name; "" for every other node."""
    plain, gpt, record = tiny.a_mar(4), tiny.a_gpt(grid=2), tiny.a_report("mar")
    qwen = Loaded.of(tiny.tiny_tar())
    pictures = torch.rand(1, 8, 8, 3)
    shared = {**dict.fromkeys(("model", "draft", "target"), plain), "condition": from_ids([1]), "tar": qwen}
    shared |= {"inpainted": pictures, "mask": pictures[..., 0]}
    shared["crop"] = editing.CropAroundMask.execute(pictures, pictures[..., 0]).result[2]
    shared |= {"image": pictures, "report": record, "image_1": [pictures], "report_1": [record]}
    tokens = {"model": gpt, "draft": gpt, "target": tiny.a_gpt(grid=4)}
    of_tokens = ("FastARLlamaGenSampler", "FastARPARSampler", "FastARZipARSampler", "FastARMuLoSDSampler")
    drawn = tiny.a_report("mar")
    drawn.maps["step"] = torch.arange(4).view(1, 2, 2).numpy()
    race = {"FastARTimeLapse": {"image_1": pictures, "report_1": drawn}}
    return {"": shared, **race, **{name: shared | tokens for name in of_tokens}}


def valid_inputs(node: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Inputs with which the node runs, widgets at small values."""
    about = node.define_schema()
    known = given.get(about.node_id, given[""])
    small = {"steps": 2, "diffusion_steps": 2, "detail": "81"}
    small |= dict.fromkeys(("images", "images_per_label", "window", "duration"), 1)
    out = {}
    for i in about.inputs:
        if i.kind in WIDGETS:
            out[i.id] = small.get(i.id, default(i))
        elif i.id in known:
            out[i.id] = known[i.id]
    if about.is_input_list:
        out = {name: value if isinstance(value, list) else [value] for name, value in out.items()}
    return out


def cases(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Node ids in turn, each with one to three of its inputs at hostile values."""
    rng, given, names = random.Random(seed), sockets(), sorted(NODES)
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


def test_a_result_or_a_sentence():
    wrong = [f"{name}: {problem}" for name, inputs in cases(400, 3) if (problem := judge(name, inputs))]
    assert not wrong, "\n\n".join(wrong[:5])


def test_every_node_runs_with_its_valid_inputs(monkeypatch):
    """Otherwise a hostile value would never be reached."""
    given = sockets()
    for name, node in NODES.items():
        inputs = valid_inputs(node, given)
        needed = {i.id for i in node.define_schema().inputs if not i.optional and i.kind not in WIDGETS}
        assert needed <= {*inputs}, f"{name} needs {needed - {*inputs}} in sockets()"
