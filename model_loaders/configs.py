"""What a configuration (``config.json``, or the arguments in a pickle) states about a network.

A network's shape comes from its weights. A configuration states the rest, and newer libraries state it under other names: transformers 5
writes ``rope_parameters`` where version 4 wrote ``rope_theta`` and ``rope_scaling``. The tables below list the fields that change what a
network computes, in four groups:

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
# The attribute of LlamaConfig that a field must equal: first what weights prove, then other names of what is read.
PROVED = {
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden",
    "head_dim": "head_dim",
}
SAME = {
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias"), "bias"),
    **dict.fromkeys(("query_pre_attn_scalar", "rotary_dim", "rope_dim", "qk_rope_head_dim"), "head_dim"),
    **dict.fromkeys(("rope_base", "rope_freq_base", "rotary_base", "rotary_emb_base"), "theta"),
    **dict.fromkeys(("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_epsilon"), "eps"),
}
# The values that a field may have besides null; of a list, each of its elements.
FIXED: dict[str, tuple[Any, ...]] = {
    # Feed-forward part and norms.
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "act_fn"), ("silu", "swish")),
    **dict.fromkeys(("mlp_bias", "use_mlp_bias", "use_bias", "attention_out_bias", "o_proj_bias"), (False,)),
    **dict.fromkeys(("norm_type", "normalization", "normalization_type"), ("rmsnorm", "rms_norm", "RMSNorm")),
    **dict.fromkeys(("apply_layernorm_1p", "zero_centered_gamma", "add_unit_offset", "sandwich_norm"), (False,)),
    # Attention.
    **dict.fromkeys(("use_sliding_window", "use_bidirectional_attention", "alibi", "use_logn_attn"), (False,)),
    **dict.fromkeys(("layer_types", "attention_types"), ("full_attention",)),
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "attn_temperature_tuning"), (False,)
    ),
    **dict.fromkeys(("clip_qkv", "attention_chunk_size", "attention_multiplier", "attention_scale", "scale_qk"), ()),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "parallel_residual"), (False,)),
    "is_causal": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    # Rotation.
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent", "rope_ratio"), (1,)),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "rotary_interleaved", "use_dynamic_ntk"), (False,)),
    **dict.fromkeys(("no_rope_layers", "use_rope", "use_rotary_embeddings"), (1,)),
    **dict.fromkeys(("rope_local_base_freq", "rope_theta_local", "no_rope_layer_interval", "mrope_section"), ()),
    "position_embedding_type": ("rope", "rotary"),
    "rope_scaling": (False,),
    "rope_parameters": (False,),
    # Factors and limits of embeddings, residual stream and logits.
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attn_logit_cap", "logit_cap"), ()),
    **dict.fromkeys(("logit_scale", "logits_scaling", "logits_scale", "lm_head_multiplier", "output_multiplier"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "key_multiplier", "scale_emb"), (1,)),
    **dict.fromkeys(("scale_embedding", "scale_embeddings", "normalize_embedding", "mup_enabled"), (False,)),
    **dict.fromkeys(("scale_depth", "dim_model_base", "embedding_scale"), ()),
    # Settings of single layers (transformers 5), which override the others.
    "per_layer_config": (),
}
# Fields of a dictionary of the rotation besides ``rope_theta``; every other one belongs to a scaling.
ROTATION: dict[str, tuple[Any, ...]] = {"rope_type": ("default",), "type": ("default",), "partial_rotary_factor": (1,)}
# Other networks whose weights can have the same names: their norms, scales or patterns of attention are in the code, not in a field.
OTHER_NETWORKS = frozenset(
    """
    apertus arcee cohere cohere2 diffllama exaone4 gemma gemma2 gemma3_text glm glm4 granite helium minicpm minicpm3 ministral nemotron
    olmo olmo2 olmo3 phi phi3 smollm3 stablelm starcoder2
    """.split()
)
# What is written beside them, and changes nothing: dropout is for training, the rest for the library or for text.
IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _name_or_path architectures attention_dropout
    attn_implementation auto_map bos_token_id chunk_size_feed_forward dtype embd_pdrop eos_token_id hidden_dropout id2label
    initializer_range is_encoder_decoder label2id max_window_layers model_type original_max_position_embeddings output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop return_dict tie_last_hidden_states torch_dtype
    transformers_version use_cache
    """.split()
)
# Fields with a rule of their own: here and, whether the embedding is the output matrix, in :mod:`.tar`.
OWN_RULE = frozenset(("model_type", "sliding_window", "tie_word_embeddings", "vocab_size"))
KNOWN = {*PROVED, *SAME, *FIXED, *IGNORED, *OWN_RULE, *(name for number in READ.values() for name in number.names)}
# Names of fields that change what a network computes, although no table knows them.
_UNKNOWN = re.compile(r"rope|rotary|alibi|softcap|sliding|logits?_scal|multiplier|qk_norm|yarn|ntk|mup_", re.IGNORECASE)


def language_part(file: ck.Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model in the configuration of a whole model, without those that are null.

    They are in one of the dictionaries :data:`PARTS`, else at the top. Fields of a dictionary of the rotation have its name before theirs,
    for example ``rope_parameters.rope_theta``. A UserError if a part is no dictionary, or two parts contradict each other.
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
    """The dictionary under a name, or under a path of names; {} if there is none, a UserError if it is no dictionary."""
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

    ``fields``: see :func:`language_part`; ``state``: weights under the names of a language model. The number of heads is that of the
    configuration, or follows from its head width, or is that of the ``official`` model of the same width (None: of heads of width 128).
    A UserError if it is unknown or does not fit the weights.
    """
    numbers: dict[str, Any] = {}
    for attribute, number in READ.items():
        names = [name for name in fields if _plain(name) in number.names]
        for name in names:
            value = file.number(name, None, number.low, number.high, fields)
            if numbers.setdefault(attribute, value) != value:
                found = f"states {names[0]} = {ck.shown(fields[names[0]])} and {name} = {ck.shown(fields[name])}"
                raise file.error(f"{found} in its configuration, which contradict each other", REMEDY)

    with ck.misfits(file):
        queries, keys = (len(state[f"model.layers.0.self_attn.{part}_proj.weight"]) for part in "qk")
        width = state[EMBEDDING].shape[1]
    head_dim = file.number("head_dim", None, 1, 1 << 20, fields)
    if "heads" in numbers:
        source = f"num_attention_heads = {numbers['heads']}"
    elif head_dim is not None:
        source, numbers["heads"] = f"head_dim = {head_dim}", queries // head_dim
    else:
        source = "no num_attention_heads"
        numbers["heads"] = queries // QWEN_HEAD_DIM if official is None else official.get(width, 0)
    if not _fit(numbers["heads"], queries, keys):
        found = f"has {source} in its configuration, and weights of {queries} numbers for queries and {keys} for keys"
        raise file.error(found, REMEDY)
    return numbers


def _fit(heads: int, queries: int, keys: int) -> bool:
    """Whether weights of so many rows can be divided into heads of one even width."""
    if heads < 1 or queries % heads:
        return False
    width = queries // heads
    return width % 2 == 0 and keys % width == 0 and keys >= width and heads % (keys // width) == 0


def _plain(name: str) -> str:
    """A name without the type of layer: ``rope_parameters.rope_theta`` of ``rope_parameters.full_attention.rope_theta``."""
    parts = name.split(".")
    return f"{parts[0]}.{parts[-1]}" if parts[0] in ROTATIONS and len(parts) > 1 else name


def expect_language(file: ck.Checkpoint, fields: Mapping[str, Any], c: LlamaConfig, vocab: int) -> None:
    """Raise a UserError if the configuration of a language model states another network than ``c``, of ``vocab`` token ids."""
    proved = {name: getattr(c, attribute) for name, attribute in PROVED.items()}
    expect_stated(file, fields, {**proved, "vocab_size": vocab})
    same = {name: (getattr(c, attribute),) for name, attribute in SAME.items()}
    expect_fixed(file, fields, {**same, **FIXED})
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in OTHER_NETWORKS:
        found = f"states model_type = {ck.shown(kind)} in its configuration, which is another network"
        raise file.error(found, f"choose {file.what}")

    for name, value in fields.items():
        last = name.rpartition(".")[2]
        if _plain(name) in READ["theta"].names:
            continue
        if name.partition(".")[0] in ROTATIONS and last != name:
            _expect(file, name, value, ROTATION.get(last, ()))
        elif name not in KNOWN and _UNKNOWN.search(name):
            _expect(file, name, value, (False,))

    # Qwen2 has a window for its last layers, and a switch for it; it is written although the switch is off.
    if fields.get("use_sliding_window") is not False and fields.get("sliding_window"):
        window = file.number("sliding_window", None, 1, 1 << 30, fields)
        if window < c.positions:
            raise file.error(
                f"states sliding_window = {window} in its configuration, and FastAR attends to all {c.positions} positions",
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
    values = value if isinstance(value, list) else [value]
    if all(each is None or any(_equal(each, one) for one in accepted) for each in values):
        return
    only = " or ".join(ck.shown(one) for one in accepted if one is not False)
    computes = f"FastAR computes {only} only" if only else "FastAR does not compute that"
    raise file.error(
        f"states {name} = {ck.shown(value)} in its configuration, and {computes}",
        "choose another model, or correct the configuration if the model was trained without it",
    )


def _equal(value: Any, accepted: Any) -> bool:
    """Whether a value of a JSON file is the accepted one; a text is never a number."""
    return isinstance(value, str) == isinstance(accepted, str) and value == accepted
