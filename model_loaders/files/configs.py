"""What a configuration (``config.json``, or the arguments in a pickle) states about a network.

A network's shape comes from its weights. A configuration states the rest: the numbers that are read, and settings of
which the network has one value only, so that another one means another network. What the weights prove must agree,
because a configuration that contradicts them is that of another model. All other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...networks.llama import EMBEDDING, QWEN_HEAD_DIM, LlamaConfig
from . import checkpoint as ck

REMEDY = "replace the configuration with the one that belongs to these weights"

# Names under which the configuration of a whole model holds that of its language model.
PARTS = ("language_config", "text_config", "llm", "llm_config")

# Networks of language models that are computed here, and whole models that state no part of their own.
NETWORKS = ("llama", "qwen2", "qwen3")
WHOLE = ("llava_qwen", "llava_qwen2", "tar", "harmon", "unipic", "janus", "multi_modality")

# Dictionaries of the rotation: transformers 5 writes the first, and the base into it.
ROTATIONS = ("rope_parameters", "rope_scaling")


class Number(NamedTuple):
    """A number that a network takes from a configuration."""

    low: float  # an int for a whole number
    high: float
    names: tuple[str, ...]


# Language models, by the attribute of LlamaConfig.
READ = {
    "heads": Number(1, 4096, ("num_attention_heads",)),
    "positions": Number(1, 1 << 24, ("max_position_embeddings",)),
    "theta": Number(1.0, 1e12, ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta")),
    "eps": Number(0.0, 1.0, ("rms_norm_eps",)),
}

# The attribute of LlamaConfig that a field must equal, because the weights prove it.
PROVED = {
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden",
    "head_dim": "head_dim",
}

# The values that a field may have besides null; of a list, each of its elements.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "layer_types": ("full_attention",),
    "partial_rotary_factor": (1,),
}

# The same of the fields of a dictionary of the rotation besides its base; every other one belongs to a scaling.
ROTATION: dict[str, tuple[Any, ...]] = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1,)}


def language_part(file: ck.Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model in the configuration of a whole model, without those that are null.

    They are in one of the dictionaries :data:`PARTS`, else at the top. Fields of a dictionary of the rotation have its
    name before theirs, for example ``rope_parameters.rope_theta``.
    """
    named = [name for name in PARTS if settings.get(name) is not None]
    part = inner(file, settings, named[0]) if named else settings

    fields: dict[str, Any] = {}
    for name, value in part.items():
        if name in ROTATIONS and isinstance(value, dict):
            fields |= {f"{name}.{key}": entry for key, entry in value.items()}
        else:
            fields[name] = value

    return {name: value for name, value in fields.items() if value is not None}


def inner(file: ck.Checkpoint, settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The dictionary under a name, or under a path of names; {} if there is none."""
    found: Any = settings
    for name in names:
        found = found.get(name)
        if found is None:
            return {}

        if not isinstance(found, dict):
            raise file.error(
                f"states {name} = {ck.shown(found)} in its configuration, but this must be a dictionary", REMEDY
            )

    return found


def language_numbers(
    file: ck.Checkpoint,
    fields: Mapping[str, Any],
    state: Mapping[str, Tensor],
    official: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Arguments of ``LlamaConfig.of_qwen`` that a configuration states, and the number of heads.

    The number of heads is that of the configuration, or follows from its head width, or is that of an official model.

    Args:
        file: the file, for messages.
        fields: see :func:`language_part`.
        state: weights under the names of a language model.
        official: heads of the official model of a width; None: of heads of width 128.

    Raises:
        UserError: the number of heads is unknown or does not fit the weights, or two fields contradict each other.
    """
    numbers = _stated_numbers(file, fields)

    with ck.misfits(file):
        queries = len(state["model.layers.0.self_attn.q_proj.weight"])
        keys = len(state["model.layers.0.self_attn.k_proj.weight"])
        width = state[EMBEDDING].shape[1]

    head_dim = file.number("head_dim", None, 1, 1 << 20, fields)
    if "heads" in numbers:
        source = f"num_attention_heads = {numbers['heads']}"
    elif head_dim is not None:
        source = f"head_dim = {head_dim}"
        numbers["heads"] = queries // head_dim
    else:
        source = "no num_attention_heads"
        numbers["heads"] = queries // QWEN_HEAD_DIM if official is None else official.get(width, 0)

    if not _fit(numbers["heads"], queries, keys):
        raise file.error(
            f"has {source} in its configuration, from which FastAR cannot compute a number of attention heads that "
            f"fits the weights ({queries} numbers for queries, {keys} for keys)",
            REMEDY,
        )

    return numbers


def _stated_numbers(file: ck.Checkpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of :data:`READ` that a configuration states, by the attribute of ``LlamaConfig``."""
    numbers: dict[str, Any] = {}
    for attribute, number in READ.items():
        for name in number.names:
            value = file.number(name, None, number.low, number.high, fields)
            if value is None:
                continue

            if numbers.setdefault(attribute, value) != value:
                raise file.error(
                    f"has a configuration that contradicts itself: {number.names[0]} = {numbers[attribute]}, but "
                    f"{name} = {value}",
                    REMEDY,
                )

    return numbers


def _fit(heads: int, queries: int, keys: int) -> bool:
    """Whether weights of this many rows can be divided into heads of one even width."""
    if heads < 1 or queries % heads:
        return False

    width = queries // heads
    if width % 2 or keys < width or keys % width:
        return False

    return heads % (keys // width) == 0


def expect_language(file: ck.Checkpoint, fields: Mapping[str, Any], c: LlamaConfig, vocab: int) -> None:
    """Raise a UserError if the configuration of a language model states another network than ``c``.

    ``vocab`` is the number of token ids.
    """
    proved = {name: getattr(c, attribute) for name, attribute in PROVED.items()}
    expect_stated(file, fields, {**proved, "vocab_size": vocab})
    expect_fixed(file, fields, {**FIXED, "model_type": NETWORKS + WHOLE})

    for name, value in fields.items():
        rotation, dot, entry = name.partition(".")
        if rotation in ROTATIONS and dot and entry != "rope_theta":
            _expect(file, name, value, ROTATION.get(entry, ()))

    # Qwen2 has a window for its last layers, and a switch for it; it is written although the switch is off.
    if fields.get("use_sliding_window") is not False and fields.get("sliding_window"):
        window = file.number("sliding_window", None, 1, 1 << 30, fields)
        if window < c.positions:
            raise file.error(
                f"states sliding_window = {window} in its configuration, "
                f"but FastAR attends to all {c.positions} positions",
                "choose a different model; if this model was trained without a window, state use_sliding_window = "
                "false",
            )


def expect_stated(file: ck.Checkpoint, fields: Mapping[str, Any], proved: Mapping[str, int]) -> None:
    """Raise a UserError if a configuration states other numbers than those that the weights prove."""
    for name, value in proved.items():
        if file.number(name, value, 0, 1 << 30, fields) != value:
            raise file.error(
                f"states {name} = {fields[name]} in its configuration, but its weights have {value}", REMEDY
            )


def expect_fixed(file: ck.Checkpoint, fields: Mapping[str, Any], fixed: Mapping[str, Collection[Any]]) -> None:
    """Raise a UserError if a field has another value than those that the network computes."""
    for name, accepted in fixed.items():
        _expect(file, name, fields.get(name), accepted)


def _expect(file: ck.Checkpoint, name: str, value: Any, accepted: Collection[Any]) -> None:
    """Raise a UserError if a field has a value besides null and the accepted ones."""
    values = value if isinstance(value, list) else [value]
    if all(each is None or each in accepted for each in values):
        return

    only = " or ".join(map(ck.shown, accepted))
    computes = f"FastAR supports only {only}" if only else "FastAR does not support this setting"
    raise file.error(
        f"states {name} = {ck.shown(value)} in its configuration, but {computes}",
        "choose a different model; if the model was trained without this setting, correct the configuration",
    )
