"""What a configuration (``config.json``, or the arguments in a pickle) states about a network.

A network's shape comes from its weights. A configuration states the rest, and newer libraries state it under other
names: transformers 5 writes ``rope_parameters`` where version 4 wrote ``rope_theta`` and ``rope_scaling``. The tables
below list the fields that change what a network computes, in four groups:

- *read*: a number that the network takes from the configuration, under each of its names;
- *proved*: a number that the weights determine. A configuration that states another one is refused;
- *fixed*: a switch or a factor of which the network has one value only. Another one is refused by its name;
- *ignored*: what concerns training, generation or the library that wrote the file.

A field of none of the groups is ignored too, unless its name says that it changes the computation (:data:`_UNKNOWN`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from . import checkpoint as ck
from .networks.llama import EMBEDDING, QWEN_HEAD_DIM, LlamaConfig

REMEDY = "put the configuration of the same model there"

# Names under which the configuration of a whole model holds that of its language model.
PARTS = ("language_config", "text_config", "llm", "llm_config")

# Dictionaries of the rotation; transformers 5 writes the first, possibly with one dictionary for each type of layer.
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

# The attribute that a field must equal, if it is another name of what is read.
SAME = {
    "attention_bias": "bias",
    "qkv_bias": "bias",
    "use_qkv_bias": "bias",
    "add_qkv_bias": "bias",
    "query_pre_attn_scalar": "head_dim",
    "rotary_dim": "head_dim",
    "rope_dim": "head_dim",
    "qk_rope_head_dim": "head_dim",
    "rope_base": "theta",
    "rope_freq_base": "theta",
    "rotary_base": "theta",
    "rotary_emb_base": "theta",
    "norm_eps": "eps",
    "norm_epsilon": "eps",
    "layer_norm_eps": "eps",
    "layer_norm_epsilon": "eps",
    "rms_norm_epsilon": "eps",
}

# The values that a field may have besides null; of a list, each of its elements.
FIXED: dict[str, tuple[Any, ...]] = {
    # Feed-forward part and norms.
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "activation_function": ("silu", "swish"),
    "act_fn": ("silu", "swish"),
    "mlp_bias": (False,),
    "use_mlp_bias": (False,),
    "use_bias": (False,),
    "attention_out_bias": (False,),
    "o_proj_bias": (False,),
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "normalization": ("rmsnorm", "rms_norm", "RMSNorm"),
    "normalization_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "apply_layernorm_1p": (False,),
    "zero_centered_gamma": (False,),
    "add_unit_offset": (False,),
    "sandwich_norm": (False,),
    # Attention.
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "alibi": (False,),
    "use_logn_attn": (False,),
    "layer_types": ("full_attention",),
    "attention_types": ("full_attention",),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_qk_layernorm": (False,),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attention_scale": (),
    "scale_qk": (),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "parallel_residual": (False,),
    "is_causal": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    # Rotation.
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rope_pct": (1,),
    "rotary_percent": (1,),
    "rope_ratio": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_interleaved": (False,),
    "use_dynamic_ntk": (False,),
    "no_rope_layers": (1,),
    "use_rope": (1,),
    "use_rotary_embeddings": (1,),
    "rope_local_base_freq": (),
    "rope_theta_local": (),
    "no_rope_layer_interval": (),
    "mrope_section": (),
    "position_embedding_type": ("rope", "rotary"),
    "rope_scaling": (False,),
    "rope_parameters": (False,),
    # Factors and limits of embeddings, residual stream and logits.
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attn_logit_cap": (),
    "logit_cap": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "logits_scale": (1,),
    "lm_head_multiplier": (1,),
    "output_multiplier": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "key_multiplier": (1,),
    "scale_emb": (1,),
    "scale_embedding": (False,),
    "scale_embeddings": (False,),
    "normalize_embedding": (False,),
    "mup_enabled": (False,),
    "scale_depth": (),
    "dim_model_base": (),
    "embedding_scale": (),
    # Settings of single layers (transformers 5), which override the others.
    "per_layer_config": (),
}

# Fields of a dictionary of the rotation besides ``rope_theta``; every other one belongs to a scaling.
ROTATION: dict[str, tuple[Any, ...]] = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1,)}

# Other networks whose weights can have the same names: their norms, scales or patterns of attention are in the code,
# not in a field.
OTHER_NETWORKS = frozenset(
    """
    apertus arcee cohere cohere2 diffllama exaone4 gemma gemma2 gemma3_text glm glm4 granite helium minicpm
    minicpm3 ministral nemotron olmo olmo2 olmo3 phi phi3 smollm3 stablelm starcoder2
    """.split()
)

# What is written beside them, and changes nothing: dropout is for training, the rest for the library or for text.
IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _name_or_path
    architectures attention_dropout attn_implementation auto_map bos_token_id chunk_size_feed_forward dtype
    embd_pdrop eos_token_id hidden_dropout id2label initializer_range is_encoder_decoder label2id
    max_window_layers model_type original_max_position_embeddings output_attentions output_hidden_states
    pad_token_id pretraining_tp problem_type resid_pdrop return_dict tie_last_hidden_states torch_dtype
    transformers_version use_cache
    """.split()
)

# Fields with a rule of their own: here and, whether the embedding is the output matrix, in :mod:`.tar`.
OWN_RULE = frozenset(("model_type", "sliding_window", "tie_word_embeddings", "vocab_size"))
KNOWN = {*PROVED, *SAME, *FIXED, *IGNORED, *OWN_RULE}.union(*(number.names for number in READ.values()))

# Names of fields that change what a network computes, although no table knows them.
_UNKNOWN = re.compile(r"rope|rotary|alibi|softcap|sliding|logits?_scal|multiplier|qk_norm|yarn|ntk|mup_", re.IGNORECASE)


def language_part(file: ck.Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model in the configuration of a whole model, without those that are null.

    They are in one of the dictionaries :data:`PARTS`, else at the top. Fields of a dictionary of the rotation have its
    name before theirs, for example ``rope_parameters.rope_theta``.

    Raises:
        UserError: if a part is no dictionary, or two parts contradict each other.
    """
    parts: list[Mapping[str, Any]] = [inner(file, settings, name) for name in PARTS if settings.get(name) is not None]

    fields: dict[str, Any] = {}
    for part in parts or [settings]:
        for name, value in _flat(part).items():
            if fields.setdefault(name, value) != value:
                raise file.error(f"states {name} twice in its configuration, with different values", REMEDY)

    return fields


def _flat(part: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a part, see :func:`language_part`."""
    fields: dict[str, Any] = {}
    for name, value in part.items():
        if name not in ROTATIONS or not isinstance(value, dict):
            fields[name] = value
            continue

        for key, entry in value.items():
            if isinstance(entry, dict):  # of one type of layer
                fields |= {f"{name}.{key}.{inside}": v for inside, v in entry.items()}
            else:
                fields[f"{name}.{key}"] = entry

    return {name: value for name, value in fields.items() if value is not None}


def inner(file: ck.Checkpoint, settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The dictionary under a name, or under a path of names; {} if there is none.

    Raises:
        UserError: if it is no dictionary.
    """
    found: Any = settings
    for name in names:
        found = found.get(name)
        if found is None:
            return {}

        if not isinstance(found, dict):
            raise file.error(
                f"states {name} = {ck.shown(found)} in its configuration, which must be a dictionary", REMEDY
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
            f"has {source} in its configuration, and weights of {queries} numbers for queries and {keys} for keys",
            REMEDY,
        )

    return numbers


def _stated_numbers(file: ck.Checkpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of :data:`READ` that a configuration states, by the attribute of ``LlamaConfig``."""
    numbers: dict[str, Any] = {}
    for attribute, number in READ.items():
        names = [name for name in fields if _plain(name) in number.names]
        for name in names:
            value = file.number(name, None, number.low, number.high, fields)
            if numbers.setdefault(attribute, value) != value:
                first = f"{names[0]} = {ck.shown(fields[names[0]])}"
                other = f"{name} = {ck.shown(fields[name])}"
                raise file.error(
                    f"states {first} and {other} in its configuration, which contradict each other", REMEDY
                )

    return numbers


def _fit(heads: int, queries: int, keys: int) -> bool:
    """Whether weights of so many rows can be divided into heads of one even width."""
    if heads < 1 or queries % heads:
        return False

    width = queries // heads
    if width % 2 or keys < width or keys % width:
        return False

    return heads % (keys // width) == 0


def _plain(name: str) -> str:
    """A name without the type of layer.

    For example ``rope_parameters.rope_theta`` of ``rope_parameters.full_attention.rope_theta``.
    """
    parts = name.split(".")
    if parts[0] not in ROTATIONS or len(parts) == 1:
        return name

    return f"{parts[0]}.{parts[-1]}"


def expect_language(file: ck.Checkpoint, fields: Mapping[str, Any], c: LlamaConfig, vocab: int) -> None:
    """Raise a UserError if the configuration of a language model states another network than ``c``.

    ``vocab`` is the number of token ids.
    """
    proved = {name: getattr(c, attribute) for name, attribute in PROVED.items()}
    expect_stated(file, fields, {**proved, "vocab_size": vocab})

    same = {name: (getattr(c, attribute),) for name, attribute in SAME.items()}
    expect_fixed(file, fields, {**same, **FIXED})

    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in OTHER_NETWORKS:
        raise file.error(
            f"states model_type = {ck.shown(kind)} in its configuration, which is another network",
            f"choose {file.what}",
        )

    for name, value in fields.items():
        if _plain(name) in READ["theta"].names:
            continue

        first, dot, rest = name.partition(".")
        if first in ROTATIONS and dot:
            _expect(file, name, value, ROTATION.get(rest.rpartition(".")[2], ()))
        elif name not in KNOWN and _UNKNOWN.search(name):
            _expect(file, name, value, (False,))

    # Qwen2 has a window for its last layers, and a switch for it; it is written although the switch is off.
    if fields.get("use_sliding_window") is not False and fields.get("sliding_window"):
        window = file.number("sliding_window", None, 1, 1 << 30, fields)
        if window < c.positions:
            raise file.error(
                f"states sliding_window = {window} in its configuration, "
                f"and FastAR attends to all {c.positions} positions",
                "choose another model, or state use_sliding_window = false if it was trained without a window",
            )


def expect_stated(file: ck.Checkpoint, fields: Mapping[str, Any], proved: Mapping[str, int]) -> None:
    """Raise a UserError if a configuration states other numbers than those that the weights prove."""
    for name, value in proved.items():
        if file.number(name, value, 0, 1 << 30, fields) != value:
            raise file.error(f"has {name} = {fields[name]} in its configuration, and weights of {value}", REMEDY)


def expect_fixed(file: ck.Checkpoint, fields: Mapping[str, Any], fixed: Mapping[str, Collection[Any]]) -> None:
    """Raise a UserError if a field has another value than those that the network computes."""
    for name, accepted in fixed.items():
        _expect(file, name, fields.get(name), accepted)


def _expect(file: ck.Checkpoint, name: str, value: Any, accepted: Collection[Any]) -> None:
    """Raise a UserError if a field has a value besides null and the accepted ones."""
    values = value if isinstance(value, list) else [value]
    if all(_is_accepted(each, accepted) for each in values):
        return

    only = " or ".join(ck.shown(one) for one in accepted if one is not False)
    computes = f"FastAR computes {only} only" if only else "FastAR does not compute that"
    raise file.error(
        f"states {name} = {ck.shown(value)} in its configuration, and {computes}",
        "choose another model, or correct the configuration if the model was trained without it",
    )


def _is_accepted(value: Any, accepted: Collection[Any]) -> bool:
    """Whether a value of a JSON file is null or one of the accepted ones; a text is never a number."""
    if value is None:
        return True

    return any(isinstance(value, str) == isinstance(one, str) and value == one for one in accepted)
