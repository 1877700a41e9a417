"""What every loader does: strict names, finite weights, one sentence
for a wrong file, a network that is ready and owns its weights.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import janus_files
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import kinds
from fastar_nodes.model_loaders.autoencoders.latent_samplers import load_latent_samplers
from fastar_nodes.model_loaders.autoencoders.loader import load_kl, load_vq
from fastar_nodes.model_loaders.bitdance.loader import load_binary, load_bitdance
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.janus.loader import load_janus
from fastar_nodes.model_loaders.kinds import KINDS, identify
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.nextstep.loader import load_nextstep, load_nextstep_ae
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from payload import Payload
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch_states import STATES

pytest.importorskip("transformers", reason="the files of every kind include a text encoder")

import seeds  # noqa: E402

# Loader and family by the stem of a file.
LOADERS: dict[str, tuple[Callable[..., Any], str]] = {
    "mar": (load_mar, "mar"),
    "kl": (load_kl, "kl"),
    "gpt": (load_llamagen, "llamagen"),
    "vq": (load_vq, "vq"),
    "latent_samplers": (load_latent_samplers, "latent-samplers"),
    "dtok": (load_detokenizer, "dtok"),
    "ta_tok": (load_ta_tok, "ta-tok"),
    "tar": (load_tar, "tar"),
    "hybrid": (load_hybrid, "hybrid"),
    "janus": (load_janus, "janus"),
    "bitdance": (load_bitdance, "bitdance"),
    "binary": (load_binary, "bitdance-ae"),
    "nextstep": (load_nextstep, "nextstep"),
    "latents": (load_nextstep_ae, "nextstep-ae"),
}
# A diffusion head alone is not loaded; the others have tests of their own.
NOT_HERE = {"t5", "tokenizer", "bitdance-head", "bitdance-fp8"}
FP32 = ("diffloss.net.final_layer.linear.", "image_head.net.final_layer.linear.", "quantize.")
# Loaders without a dtype.
ALWAYS_FP32 = ("latent_samplers",)


def test_every_kind_has_a_loader_here() -> None:
    listed = {family for _, family in LOADERS.values()}
    missing = ", ".join(sorted(set(KINDS) - listed - NOT_HERE))
    assert not missing, (
        f"LOADERS in tests/model_loaders/test_loader_contract.py lacks {missing}; "
        "add it, and a file of it to build in tests/lib/seeds.py."
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A valid safetensors file of every kind, by its stem."""
    found = {
        s.path.stem: s.path for s in seeds.build(tmp_path_factory.mktemp("files")) if s.path.suffix == ".safetensors"
    }
    return {stem: found[stem] for stem in LOADERS}


@pytest.fixture
def write(files: dict[str, Path], tmp_path: Path):
    """Writes a valid file of a kind, changed, to x.safetensors; returns its path."""

    def write(stem: str, change: Callable[[dict], object] = lambda state: None, **metadata: str) -> Path:
        state = load_file(files[stem])
        change(state)
        with safe_open(files[stem], "pt") as file:
            save_file(state, tmp_path / "x.safetensors", metadata=file.metadata() | metadata)
        return tmp_path / "x.safetensors"

    return write


def network(model: Any) -> nn.Module:
    return getattr(model, "hybrid", None) or model.net


@pytest.fixture(scope="module")
def expected(files: dict[str, Path]) -> Callable[[str], frozenset[str]]:
    """The names of the weights of each kind's network."""
    return cache(lambda stem: frozenset(network(LOADERS[stem][0](files[stem])).state_dict()))


def refused(stem: str, path: Path, *words: str) -> None:
    """The loader refuses the file in one line, which begins with its input and holds all ``words``."""
    load, family = LOADERS[stem]
    with pytest.raises(UserError) as error:
        load(path)
    text = str(error.value)
    assert text.startswith(f"{KINDS[family].field}: ") and path.name in text and all(word in text for word in words)
    assert "\n" not in text and len(text) <= 400


@pytest.mark.parametrize("stem", [stem for stem in LOADERS if stem not in ALWAYS_FP32])
class TestEveryLoaderWithADtype:
    @pytest.mark.parametrize("name", ["auto", "bf16"])
    @pytest.mark.fast_cases("auto-mar", "bf16-mar", "bf16-kl", "bf16-gpt", "bf16-ta_tok", "bf16-hybrid", "bf16-janus")
    def test_dtype(self, stem, write, name: str) -> None:
        for key, value in network(LOADERS[stem][0](write(stem), name)).state_dict().items():
            always = name == "auto" or any(key.removeprefix("mar.").startswith(prefix) for prefix in FP32)
            assert value.dtype == (torch.float32 if always else torch.bfloat16), key

    def test_dtype_is_checked_before_the_file(self, stem, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="^dtype: FastAR cannot load .* in 'fp4'"):
            LOADERS[stem][0](tmp_path / "gone.safetensors", "fp4")

    def test_auto_is_the_dtype_of_the_papers(self, stem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """bf16 for token models; a denoiser's first diffusion step multiplies rounding errors, see choose_dtype."""
        choose, seen = kinds.choose_dtype, []

        def chosen(*args: Any, **options: Any) -> torch.dtype:
            seen.append(choose(*args, **options))
            raise KeyboardInterrupt

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(sys.modules[LOADERS[stem][0].__module__], "choose_dtype", chosen)
        with pytest.raises(KeyboardInterrupt):
            LOADERS[stem][0](tmp_path / "x", "auto", torch.device("cuda"))
        expected = dict.fromkeys(("kl", "vq", "binary", "latents"), torch.float32) | {"mar": torch.float16}
        assert seen == [expected.get(stem, torch.bfloat16)]


@pytest.mark.parametrize("stem", ALWAYS_FP32)
def test_a_loader_without_a_dtype_loads_fp32(stem: str, write) -> None:
    path = write(stem, lambda s: s.update({name: value.bfloat16() for name, value in s.items()}))
    state = network(LOADERS[stem][0](path)).state_dict()
    assert state and all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize("stem", LOADERS)
class TestEveryLoader:
    def test_a_network_is_ready_and_owns_its_weights(self, stem, write) -> None:
        path = write(stem)
        stored = {name: value.clone() for name, value in load_file(path).items()}
        net = network(LOADERS[stem][0](path))
        tables = [name for name in stored if name.endswith("pos_embed_learned")] if stem == "hybrid" else []
        path.write_bytes(bytes(path.stat().st_size))
        assert not net.training and not any(p.requires_grad or p.is_meta for p in net.parameters())
        assert all(torch.equal(value, stored[n].float()) for n, value in net.state_dict().items() if n not in tables)

    def test_whatever_others_left_in_torch(self, stem, write) -> None:
        path = write(stem)
        plain = network(LOADERS[stem][0](path))
        with STATES["everything"]():
            net = network(LOADERS[stem][0](path))

        wanted = dict([*plain.named_parameters(), *plain.named_buffers()])
        made = dict([*net.named_parameters(), *net.named_buffers()])
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            assert made[name].dtype == value.dtype and torch.equal(made[name], value), name

    @pytest.mark.parametrize("removed", [2, 8])
    @pytest.mark.fast_cases("2-mar", "2-gpt", "2-dtok", "2-tar", "2-bitdance")
    def test_names_are_strict(self, stem, write, expected, removed: int) -> None:
        refused(stem, write(stem, lambda s: s.update(extra=torch.ones(1))), "1 weight unexpected (extra)")
        names = sorted(load_file(write(stem)).keys() & expected(stem))
        for name in names[:: len(names) // removed]:
            refused(stem, write(stem, lambda s, name=name: s.pop(name)))

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (lambda t: torch.full_like(t, float("nan")), "NaN or infinite"),
            (lambda t: torch.full_like(t, float("-inf")), "NaN or infinite"),
            (lambda t: torch.ones_like(t, dtype=torch.int64), "int64"),
            (lambda t: t.new_zeros(0, *t.shape[1:]), "empty or too large"),
            (lambda t: t.new_ones(*t.shape, 3), ""),
            (lambda t: t.new_ones(()), ""),
        ],
        ids=["nan", "infinite", "integers", "empty", "misshaped", "a number"],
    )
    @pytest.mark.fast_cases(
        *("nan-mar", "nan-gpt", "nan-tar", "nan-janus", "nan-bitdance"),
        *(f"{value}-gpt" for value in ("infinite", "integers", "empty", "misshaped", "a number")),
        *("empty-mar", "misshaped-vq", "a number-tar"),
    )
    def test_weights_are_finite_numbers_of_the_right_shape(self, stem, write, expected, value, words: str) -> None:
        state = load_file(write(stem))
        name = next(n for n in sorted(state) if n in expected(stem) and "norm" not in n)
        refused(stem, write(stem, lambda s: s.update({name: value(s[name])})), words)

    @pytest.mark.fast_cases("mar", "kl", "tar")
    def test_files_of_every_other_family_are_refused(self, stem, files: dict[str, Path], tmp_path: Path) -> None:
        for other, path in files.items():
            family = LOADERS[other][1]
            assert identify(load_file(path)) == family
            if other != stem:
                (tmp_path / "x.safetensors").write_bytes(path.read_bytes())
                refused(stem, tmp_path / "x.safetensors", f"holds {KINDS[family].noun}, not ", KINDS[family].loader)

    @pytest.mark.fast_cases("mar", "gpt", "tar", "janus")
    def test_damaged_and_missing_files(self, stem, write, tmp_path: Path) -> None:
        path = write(stem)
        data = path.read_bytes()
        for cut in (data[:-1], data[: len(data) // 2], data[:9], b"", b"<html>", b"\x80\x04N."):
            path.write_bytes(cut)
            refused(stem, path)
        save_file({"some.thing": torch.ones(1)}, path)
        refused(stem, path, "some.thing")
        refused(stem, tmp_path / "gone.safetensors", "there is no file")

    @pytest.mark.fast_cases("mar", "gpt", "tar", "bitdance")
    def test_a_pickle_is_loaded_and_runs_nothing(self, stem, write, tmp_path: Path) -> None:
        state = load_file(write(stem))
        torch.save({"model": state, "args": Payload(tmp_path / "canary")}, tmp_path / "x.pt")
        refused(stem, tmp_path / "x.pt")
        assert not (tmp_path / "canary").exists()


def without(name: str) -> Callable[[dict], object]:
    return lambda state: state.pop(name)


def with_(name: str, *shape: int) -> Callable[[dict], object]:
    return lambda state: state.update({name: torch.ones(shape)})


def renumbered(state: dict[str, Tensor]) -> None:
    for key in [k for k in state if k.startswith("decoder_blocks.1.")]:
        state[key.replace("blocks.1.", "blocks.7.")] = state.pop(key)


def widened(state: dict[str, Tensor]) -> None:
    for name in ("conv1.weight", "conv1.bias"):
        key = f"encoder.conv_blocks.1.res.0.{name}"
        state[key] = torch.zeros(80, *state[key].shape[1:])


QKV, CLASSES = "layers.0.attention.wqkv.weight", "cls_embedding.embedding_table.weight"
QWEN, TA_TOK = "model.layers.0.", "decoder.vision_model."
SPECIAL = "spe_tok_embeddings.special_embeddings.weight"


@pytest.mark.parametrize(
    ("stem", "change", "words"),
    [
        ("mar", without("class_emb.weight"), "class_emb.weight is missing"),
        ("mar", with_("encoder_pos_embed_learned", 1, 3, 8), "missing or empty"),
        ("mar", with_("diffusion_pos_embed_learned", 1, 5, 8), "5 tokens are not a square grid"),
        ("mar", renumbered, "not numbered 0 to 1"),
        ("kl", with_("lossless.weight", 1), "1 weight unexpected (lossless.weight)"),
        ("kl", with_("encoder.down.x.weight", 1), "not numbered"),
        ("vq", without("post_quant_conv.weight"), "post_quant_conv.weight is missing"),
        ("vq", with_("encoder.conv_blocks.99999999.weight", 1), "not numbered 0 to 2"),
        ("vq", with_("post_quant_conv.weight", 5, 8, 1, 1), "wrong shape"),
        ("vq", widened, "not all of the widths 32, 80 are multiples of 32"),
        ("gpt", lambda s: [s.pop(k) for k in list(s) if k.startswith("layers.0.")], f"{QKV} is missing"),
        ("gpt", with_("layers.7.ffn_norm.weight", 16), "not numbered 0 to 2"),
        ("gpt", with_(QKV, 47, 16), "does not fit the attention weights"),
        ("gpt", with_(CLASSES, 1, 16), "missing or empty"),
        ("gpt", with_(CLASSES, 1, 2, 16), "a weight has a wrong shape"),
        ("gpt", with_(SPECIAL, 4, 16), "4 transition tokens"),
        ("dtok", without("abs_pe"), "abs_pe is missing"),
        ("dtok", with_("abs_pe", 19), "wrong shape"),
        ("dtok", with_("clip_proj.weight", 16), "wrong shape"),
        ("ta_tok", without(f"{TA_TOK}encoder.layers.0.mlp.fc1.weight"), "fc1.weight is missing"),
        ("ta_tok", with_(f"{TA_TOK}embeddings.position_embedding.weight", 15, 24), "not a square grid"),
        ("tar", without(f"{QWEN}self_attn.q_proj.weight"), "q_proj.weight is missing"),
    ],
)
@pytest.mark.fast_cases(every=3)
def test_weights_that_do_not_fit(write, stem: str, change, words: str) -> None:
    refused(stem, write(stem, change), words)


@pytest.mark.parametrize(
    ("stem", "entry", "words"),
    [
        ("mar", {"heads": "four"}, "must be a whole number"),
        ("mar", {"heads": "0"}, "from 1"),
        ("mar", {"heads": "3"}, "3 does not divide the width 16"),
        ("mar", {"heads": "9" * 9999}, "heads = 9"),
        ("mar", {"latent_scale": "nan"}, "must be a number from"),
        ("mar", {"latent_scale": "[1]"}, "latent_scale"),
        ("mar", {"t_max": "1000"}, "from 1 to 999"),
        ("mar", {"t_max": "950.5"}, "t_max = 950.5"),
        ("mar", {"patch": "3"}, "4 channels"),
        ("mar", {"patch": ""}, "patch = "),
        ("kl", {"groups": "none"}, "groups = none"),
        ("kl", {"groups": "3"}, "num_groups"),
        ("vq", {"groups": "0"}, "groups = 0"),
        ("gpt", {"heads": "3"}, "heads: 3 does not fit the width 16"),
        ("gpt", {"heads": "8"}, "heads: 8 does not fit the width 16"),
        ("gpt", {"grid": "big"}, "from 2 to 128"),
        ("gpt", {"grid": "1"}, "grid = 1"),
        ("dtok", {"grid": "x"}, "grid = x"),
        ("ta_tok", {"encoder_heads": "many"}, "encoder_heads = many"),
        ("ta_tok", {"input_size": "0"}, "input_size = 0"),
        ("tar", {"config": "[1]"}, "config"),
        ("tar", {"tokenizer": "[1]"}, "tokenizer"),
        ("tar", {"generation_config": "[1]"}, "generation_config"),
        ("hybrid", {"max_beta": "nan"}, "max_beta"),
        ("hybrid", {"config": "{}"}, "has no num_attention_heads in its configuration"),
        ("hybrid", {"config": '{"llm": {"num_attention_heads": 4}}'}, "states no mar.encoder_num_heads in its"),
    ],
)
@pytest.mark.fast_cases(every=3)
def test_metadata_that_makes_no_sense(write, stem: str, entry: dict, words: str) -> None:
    with pytest.raises(UserError) as error:
        LOADERS[stem][0](write(stem, **entry))
    assert words in str(error.value) and str(error.value).startswith(KINDS[LOADERS[stem][1]].field)


def test_names_and_label_sets(write) -> None:
    def thousand(name: str, rows: int) -> Callable[[dict], object]:
        return lambda s: s.update({name: torch.zeros(rows, s[name].shape[1])})

    assert load_mar(write("mar", name=" a\nsmall\tMAR " + "x" * 200)).name == "a small MAR " + "x" * 68
    assert load_mar(write("mar")).label_set == "" and load_mar(write("mar")).name == "x"
    for load, stem, change in (
        (load_mar, "mar", thousand("class_emb.weight", 1000)),
        (load_llamagen, "gpt", thousand(CLASSES, 1001)),
    ):
        assert load(write(stem, change)).label_set == "imagenet-1k"
        assert load(write(stem, change, label_set="birds")).label_set == "birds"


# Where the configuration of each family holds that of its language model: its own layout, then others.
PLACES = {
    "tar": [(), ("text_config",)],
    "janus": [("language_config",), ("text_config",), ()],
    "hybrid": [("llm",), ("text_config",), ("llm_config",), ()],
}
LANGUAGE = [(stem, place) for stem, places in PLACES.items() for place in places]


@pytest.fixture
def configured(files: dict[str, Path], tmp_path: Path):
    """Gives the path of a valid file, beside which the configuration
    of the language model, at a place, has these fields changed.
    """
    written: dict[str, tuple[Path, str]] = {}

    def configured(stem: str, place: tuple[str, ...], fields: dict[str, Any], *without: str) -> Path:
        if stem not in written:
            with safe_open(files[stem], "pt") as file:
                metadata = file.metadata()
            (tmp_path / stem).mkdir()
            path, config = tmp_path / stem / "x.safetensors", metadata.pop("config")
            save_file(load_file(files[stem]), path, metadata=metadata)
            written[stem] = path, config
        path, config = written[stem]
        stated = json.loads(config)
        if stem == "tar":  # without a dictionary of its own
            whole = {k: v for k, v in stated.items() if k.endswith("_id") or k == "semantic_side"}
            part = {k: v for k, v in stated.items() if k not in whole}
        else:
            part = stated.pop(PLACES[stem][0][0])
            whole = stated
        part = {k: v for k, v in part.items() if k not in without} | fields
        whole |= {place[0]: part} if place else part
        (path.parent / "config.json").write_text(json.dumps(whole))
        return path

    return configured


def language(stem: str, path: Path) -> Any:
    """The shape of the language model of a file."""
    config = network(LOADERS[stem][0](path)).config
    return config.llm if stem == "hybrid" else config


# Fields that state a number of a language model, in the forms of transformers 4 and 5; the attribute and its value.
STATED = [
    ({"rope_theta": 500}, "theta", 500.0),
    ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, "theta", 500.0),
    ({"rms_norm_eps": 1e-3}, "eps", 1e-3),
    ({"rope_theta": 500.0, "rope_scaling": None, "rope_parameters": {"rope_theta": 500.0}}, "theta", 500.0),
    ({"rope_scaling": {"type": "default", "rope_theta": 500.0}}, "theta", 500.0),
    ({"max_position_embeddings": 99}, "positions", 99),
]
# Fields that would make another network, with a value that they cannot have here.
OTHER: dict[str, Any] = {
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu",
    "head_dim": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 9,
    "vocab_size": 7,
    "layer_types": ["full_attention", "sliding_attention"],
    "model_type": "granite",
}
# Fields that change nothing, and the usual values of those that could.
HARMLESS: dict[str, Any] = {
    **dict.fromkeys((name for name in OTHER if name not in ("hidden_size", "num_attention_heads")), None),
    "attention_dropout": 0.1,
    "initializer_range": 0.02,
    "use_cache": False,
    "torch_dtype": "bfloat16",
    "dtype": "float16",
    "transformers_version": "5.0.0",
    "_attn_implementation": "flash_attention_2",
    "architectures": ["X"],
    "eos_token_id": [1, 2],
    "pretraining_tp": 2,
    "max_window_layers": 1,
    "sliding_window": 4,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "model_type": "qwen2",
    "mm_vision_tower": "siglip",
    "mm_use_im_start_end": True,
    "tokenizer_padding_side": "right",
    "quality": {"a": [1]},
    "a.b": 3,
}


@pytest.mark.slow
def test_numbers_are_read_under_each_of_their_names(configured) -> None:
    for stem, place in LANGUAGE:
        first = place == PLACES[stem][0]
        for fields, attribute, value in STATED if first else STATED[:3]:
            path = configured(stem, place, fields, "rope_theta", "rms_norm_eps", "max_position_embeddings")
            assert getattr(language(stem, path), attribute) == value, (stem, place, fields)
        path = configured(stem, place, {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 600.0}})
        refused(stem, path, "rope_theta = 500", "rope_parameters.rope_theta = 600", "contradict")


@pytest.mark.parametrize("stem", PLACES)
class TestConfigurationsOfLanguageModels:
    def test_a_head_width_gives_the_number_of_heads(self, stem: str, configured) -> None:
        usual = language(stem, configured(stem, PLACES[stem][0], {}))
        other = configured(stem, PLACES[stem][0], {"head_dim": usual.head_dim}, "num_attention_heads")
        assert language(stem, other) == usual

    @pytest.mark.fast_cases("tar")
    def test_another_network_is_refused_by_the_name_of_the_field(self, stem: str, configured) -> None:
        first, *others = PLACES[stem]
        for name, value in OTHER.items():
            refused(stem, configured(stem, first, {name: value}), name, "in its configuration")
        for place in others:
            refused(stem, configured(stem, place, {"hidden_act": "gelu"}), "hidden_act = 'gelu'")
            refused(stem, configured(stem, place, {"rope_parameters": {"rope_type": "yarn"}}), "rope_type = 'yarn'")
        refused(stem, configured(stem, first, {"sliding_window": 4}), "sliding_window = 4")
        refused(stem, configured(stem, first, {"sliding_window": [4]}), "sliding_window = a list")
        for rotation in (
            {"factor": 4.0},
            {"type": "default", "mrope_section": [1, 1]},
            {"rope_type": ["default", "yarn"]},
            {"full_attention": {"rope_type": "yarn"}},
        ):
            refused(stem, configured(stem, first, {"rope_scaling": rotation}), f"rope_scaling.{list(rotation)[-1]} = ")

    @pytest.mark.fast_cases("tar", "janus")
    def test_what_changes_nothing_is_ignored(self, stem: str, configured) -> None:
        """Among it a refused field that is left out, or that has the value of the network: the remedy of a refusal."""
        place = PLACES[stem][0]
        usual = network(LOADERS[stem][0](configured(stem, place, {})))
        made = network(LOADERS[stem][0](configured(stem, place, HARMLESS)))
        assert made.config == usual.config
        assert all(torch.equal(value, usual.state_dict()[name]) for name, value in made.state_dict().items())


@pytest.mark.fast_cases("tar")
@pytest.mark.parametrize("stem", PLACES)
def test_a_part_of_a_configuration_must_be_a_dictionary(stem: str, write, files: dict[str, Path]) -> None:
    with safe_open(files[stem], "pt") as file:
        stated = json.loads(file.metadata()["config"])
    part, *_ = PLACES[stem][0] or ("text_config",)
    for value in (3, "x", [1], True):
        refused(stem, write(stem, config=json.dumps({**stated, part: value})), f"{part} = ")


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        ("mar", {"decoder_num_heads": 4}, "decoder_num_heads = 4"),
        ("mar", {"encoder_num_heads": 3}, "encoder_num_heads = 3"),
        ("mar", {"encoder_embed_dim": 32}, "encoder_embed_dim = 32"),
        ("mar", {"decoder_depth": 2}, "decoder_depth = 2"),
        ("mar", {"buffer_size": 64}, "buffer_size = 64"),
        ("mar", {"diffloss_d": 12}, "diffloss_d = 12"),
        ("mar", {"patch_size": 2}, "patch_size = 2"),
        ("diffusion", {"max_beta": 2.0}, "max_beta = 2.0"),
    ],
)
def test_the_other_parts_of_a_hybrid(write, files: dict[str, Path], part: str, fields: dict, words: str) -> None:
    with safe_open(files["hybrid"], "pt") as file:
        stated = json.loads(file.metadata()["config"])
    stated[part] = {**stated.get(part, {}), **fields}
    path = write("hybrid", config=json.dumps(stated))
    refused("hybrid", path, words) if part == "mar" else refused("hybrid", path, "max_beta")


def test_the_scale_of_the_latents_of_a_hybrid(write, files: dict[str, Path]) -> None:
    with safe_open(files["hybrid"], "pt") as file:
        stated = json.loads(file.metadata()["config"])
    path = write("hybrid", config=json.dumps({**stated, "vae_scale": 0.5}))
    assert load_hybrid(path).latent_scale == 0.5
    path = write("hybrid", config=json.dumps({**stated, "vae_scale": 0.5}), latent_scale="2.0")
    assert load_hybrid(path).latent_scale == 2.0, "the metadata is FastAR's own"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (("gen_aligner_config", "params"), {"projector_type": "linear"}, "projector_type = 'linear'"),
        (("gen_aligner_config", "params"), {"depth": 3}, "depth = 3"),
        (("gen_head_config", "params"), {"image_token_size": 99}, "image_token_size = 99"),
        (("gen_vision_config", "params"), {"image_token_size": 99}, "image_token_size = 99"),
        (("vq_config",), {"num_embeddings": 99}, "num_embeddings = 99"),
        (("vq_config",), {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        (("vq_config",), {"num_patches": 1}, "num_patches = 1"),
    ],
)
@pytest.mark.fast_cases(2)
def test_the_image_tokens_of_a_janus(write, files: dict[str, Path], path, fields: dict, words: str) -> None:
    with safe_open(files["janus"], "pt") as file:
        stated = json.loads(file.metadata()["config"])
    part = stated
    for name in path:
        part = part.setdefault(name, {})
    part.update(fields)
    refused("janus", write("janus", config=json.dumps(stated)), words)


def test_the_grid_of_a_janus(tmp_path: Path) -> None:
    """The metadata's, then the configuration's, then the official one."""
    state = load_file(janus_files.FOLDER / "original" / "model.safetensors")
    texts = {
        n: (janus_files.FOLDER / f"original/{n}.json").read_text(encoding="utf-8") for n in ("config", "tokenizer")
    }

    def grid(patches: int | None, **metadata: str) -> int:
        stated = {**json.loads(texts["config"]), "vq_config": {"num_patches": patches}}
        save_file(state, tmp_path / "x.safetensors", metadata={**texts, "config": json.dumps(stated), **metadata})
        return load_janus(tmp_path / "x.safetensors").grid

    assert (grid(32, grid="4"), grid(32), grid(None)) == (4, 32, 24)
