"""Files of training scripts: containers, prefixes of wrappers,
averaged weights and the choice of them, arguments, two networks.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders.loader import load_kl
from fastar_nodes.model_loaders.files.checkpoint import read
from fastar_nodes.model_loaders.files.wrappers import AUTO, NoWeights, unpack
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.mar import MAR, MARConfig
from fastar_nodes.runs import loading
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]

TINY = MARConfig(8, 1, 1, heads=2, buffer=2, tokens=4, channels=4, classes=3, head_depth=1, head_width=8)
KL = KLConfig(ch=32, ch_mult=(1, 2), blocks=1, z_channels=4)


def random(net: torch.nn.Module, seed: int) -> State:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=g) for name, t in net.state_dict().items()}


TRAINED, AVERAGED, DECODER = random(MAR(TINY), 0), random(MAR(TINY), 1), random(KLAutoencoder(KL), 2)
COUNTED = {"n_averaged": torch.tensor(10)}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def load(path: Path, content: object, weights: str = "auto"):
    """A MAR from the content of a file of torch.save."""
    torch.save(content, path / "x.pth")
    return load_mar(path / "x.pth", heads=2, weights=weights)


def holds(model, state: State) -> bool:
    loaded = model.net.state_dict()
    return loaded.keys() == state.keys() and all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


PREFIXES = (
    "module.",
    "module.module.",
    "_orig_mod.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "_fsdp_wrapped_module.",
    "model.",
    "net.",
    "model._orig_mod.",
    "model.module.",
    "model.diffusion_model.",
    "my_own_name.",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.fast_cases("module.", "_orig_mod.module.")
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    assert holds(load(tmp_path, prefixed(prefix, TRAINED)), TRAINED)
    assert holds(load(tmp_path, {"state_dict": prefixed(prefix, TRAINED), "epoch": 3}), TRAINED)
    save_file(prefixed(prefix, TRAINED), tmp_path / "x.safetensors", {"heads": "2"})
    assert holds(load_mar(tmp_path / "x.safetensors"), TRAINED)
    assert loading.identify(tmp_path / "x.safetensors")[0] == "mar"


def test_parts_of_names_that_wrappers_insert_are_removed(tmp_path: Path) -> None:
    """torch.compile, FSDP and activation checkpoints wrap single blocks."""
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        wrapped = {name.replace("encoder_blocks.0.", f"encoder_blocks.0.{part}"): t for name, t in TRAINED.items()}
        assert holds(load(tmp_path, wrapped), TRAINED)
    both = {"a": torch.ones(1), "_orig_mod.a": torch.zeros(1)}
    torch.save(both, tmp_path / "x.pth")
    assert read(tmp_path / "x.pth").state.keys() == both.keys(), "none of two weights is dropped"


CONTAINERS = (
    *(
        "model",
        "module",
        "state_dict",
        "sd",
        "net",
        "network",
        "params",
        "weights",
        "transformer",
        "generator",
        "student",
    ),
    *("model_state_dict", "model_state", "my_own_name"),
)


@pytest.mark.parametrize("key", CONTAINERS)
@pytest.mark.fast_cases("state_dict", "my_own_name")
def test_containers(tmp_path: Path, key: str) -> None:
    beside = {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 1e-4}]},
        "lr_scheduler": {"last": torch.ones(2, 2)},
        "scaler": {"scale": 65536.0},
        "rng_state": torch.zeros(16, dtype=torch.uint8),
        "epoch": 3,
        "args": argparse.Namespace(lr=1e-4),
    }
    model = load(tmp_path, {key: TRAINED, **beside})
    assert holds(model, TRAINED) and model.note == ""
    assert holds(load(tmp_path, {"state": {key: prefixed("module.", TRAINED)}}), TRAINED)


AVERAGES: dict[str, Callable[[State], dict]] = {
    **{
        key: lambda s, key=key: {key: s}
        for key in (
            "model_ema",
            "ema",
            "ema_model",
            "ema_state_dict",
            "params_ema",
            "model_ema_state_dict",
            "shadow",
            "model_avg",
            "polyak",
            "modelEMA",
            "ema_2",
            "swa_model",
        )
    },
    "shadow of ema": lambda s: {"ema": {"shadow": s, "decay": 0.999}},
    "AveragedModel": lambda s: {"model_ema": {**COUNTED, **prefixed("module.", s)}},
    "compiled": lambda s: {"ema": prefixed("module._orig_mod.", s)},
}


@pytest.mark.parametrize("key", AVERAGES)
@pytest.mark.fast_cases(1)
def test_averaged_weights_are_taken_unless_the_user_says_otherwise(tmp_path: Path, key: str) -> None:
    content = {"model": TRAINED, **AVERAGES[key](AVERAGED)}
    model = load(tmp_path, content)
    assert holds(model, AVERAGED)
    assert model.note == "FastAR uses the averaged (EMA) weights; the file also holds the trained weights"
    assert holds(load(tmp_path, content, "ema"), AVERAGED)
    trained = load(tmp_path, content, "trained")
    assert holds(trained, TRAINED) and trained.note == ""
    alone = AVERAGES[key](AVERAGED)
    assert holds(load(tmp_path, alone, "ema"), AVERAGED) and load(tmp_path, alone).note == ""
    with pytest.raises(UserError, match="^weights: x.pth holds averaged .EMA. weights only; choose auto"):
        load(tmp_path, alone, "trained")


def test_averaged_weights_by_prefix(tmp_path: Path) -> None:
    content = {"state_dict": prefixed("ema_model.", AVERAGED) | prefixed("model.", TRAINED)}
    model = load(tmp_path, content)
    assert holds(model, AVERAGED) and "the file also holds the trained weights" in model.note
    assert holds(load(tmp_path, content, "ema"), AVERAGED) and holds(load(tmp_path, content, "trained"), TRAINED)
    assert holds(load(tmp_path, COUNTED | prefixed("module.", AVERAGED), "ema"), AVERAGED)


def test_averaged_weights_that_are_not_there(tmp_path: Path) -> None:
    for content in (TRAINED, {"model": TRAINED}, {"model": TRAINED, "model_ema": None}):
        assert holds(load(tmp_path, content), TRAINED) and holds(load(tmp_path, content, "trained"), TRAINED)
        with pytest.raises(UserError, match="^weights: x.pth does not hold averaged .EMA. weights; choose auto"):
            load(tmp_path, content, "ema")
    with pytest.raises(UserError, match="^weights: 'best' is not known; choose auto, ema, trained"):
        load(tmp_path, TRAINED, "best")


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"shadow_params": v, "decay": 0.9}], ids=["list", "diffusers"])
def test_averaged_weights_without_names_are_not_passed_over_in_silence(tmp_path: Path, wrap) -> None:
    content = {"model": TRAINED, "model_ema": wrap([*AVERAGED.values()])}
    model = load(tmp_path, content)
    assert holds(model, TRAINED)
    said = "the averaged weights of the file (model_ema) have no names, so FastAR uses the trained weights"
    assert model.note == said
    with pytest.raises(UserError, match="^checkpoint: .* weights .model_ema. without .*; set weights to auto"):
        load(tmp_path, content, "ema")


@pytest.mark.parametrize("count", [torch.tensor(3), {"num_updates": torch.tensor(3), "decay": torch.tensor(0.9)}])
def test_counts_beside_the_weights_are_no_averaged_weights(tmp_path: Path, count: object) -> None:
    assert holds(load(tmp_path, {"model": TRAINED, "ema": count}), TRAINED)


def test_of_several_averages_the_one_that_is_taken_is_said(tmp_path: Path) -> None:
    model = load(tmp_path, {"model": TRAINED, "ema_0.999": AVERAGED, "ema_0.9999": TRAINED})
    assert holds(model, AVERAGED)
    assert "FastAR uses the averaged weights ema_0.999; the file holds several (ema_0.999, ema_0.9999)" in model.note


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.fast_cases(1)
def test_plain_fp8_is_read_from_both_formats(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without scales every fp8 number is exact in fp32, and the blocks keep their 8 bits with the dtype "auto"."""
    small = {name: tensor.to(dtype) for name, tensor in TRAINED.items()}
    exact = {name: tensor.float() for name, tensor in small.items()}
    torch.save({"model": small}, tmp_path / "x.pth")
    save_file(small, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.pth", tmp_path / "x.safetensors"):
        assert holds(load_mar(path, "fp32", heads=2), exact)
        layer = load_mar(path, heads=2).net.encoder_blocks[0].attn.qkv
        assert layer.weight.dtype == dtype
        kept = layer.weight.float() * layer.weight_scale
        assert torch.equal(kept, exact["encoder_blocks.0.attn.qkv.weight"])


def test_networks_beside_each_other(tmp_path: Path) -> None:
    """A latent diffusion's file holds the decoder, too."""
    save_file(prefixed("first_stage_model.", DECODER) | prefixed("model.", TRAINED), tmp_path / "x.safetensors")
    assert holds(load_mar(tmp_path / "x.safetensors", heads=2), TRAINED)
    assert torch.equal(load_kl(tmp_path / "x.safetensors").net.quant_conv.weight, DECODER["quant_conv.weight"])
    save_file(prefixed("a.", TRAINED) | prefixed("b.", AVERAGED), tmp_path / "x.safetensors")
    with pytest.raises(
        UserError, match=r"^checkpoint: x.safetensors holds several networks of one kind \(a., b.\); save"
    ):
        load_mar(tmp_path / "x.safetensors", heads=2)


def test_dictionaries_without_a_usual_name(tmp_path: Path) -> None:
    """Networks under names of a script's own, and one network in parts."""
    assert holds(load(tmp_path, {"mar": TRAINED, "vae": DECODER, "epoch": 3}), TRAINED)
    assert torch.equal(load_kl(tmp_path / "x.pth").net.quant_conv.weight, DECODER["quant_conv.weight"])
    parts: dict[str, State] = {}
    for name, tensor in DECODER.items():
        top, _, rest = name.partition(".")
        parts.setdefault(top, {})[rest] = tensor
    torch.save(parts, tmp_path / "x.pth")
    assert torch.equal(load_kl(tmp_path / "x.pth").net.quant_conv.weight, DECODER["quant_conv.weight"])


def test_defaults_of_official_models_are_said(tmp_path: Path) -> None:
    state = random(MAR(replace(TINY, dim=768, classes=1000)), 0)
    save_file(state, tmp_path / "mine.safetensors")
    expected = (
        "FastAR assumes 12 attention heads, as in the official model of the same width; "
        "FastAR assumes that the 1000 classes are the classes of ImageNet"
    )
    assert load_mar(tmp_path / "mine.safetensors").note == expected
    save_file(state, tmp_path / "mine.safetensors", {"heads": "16", "label_set": "imagenet-1k"})
    model = load_mar(tmp_path / "mine.safetensors")
    assert (model.note, model.net.config.heads, model.label_set) == ("", 16, "imagenet-1k")
    save_file(state, tmp_path / "mar-base.safetensors")
    model = load_mar(tmp_path / "mar-base.safetensors")
    assert (model.note, model.net.config.heads, model.label_set) == ("", 12, "imagenet-1k")


def test_a_network_within_another_is_not_taken_out(tmp_path: Path) -> None:
    """The MAR of a Harmon under a prefix is a Harmon's."""
    state = {"model.llm.model.embed_tokens.weight": torch.ones(2, 2), "model.mar.fake_latent": torch.ones(1, 8)}
    save_file(state | prefixed("model.mar.", TRAINED), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="holds a Harmon or UniPic, not a MAR; load it with Load Harmon / UniPic"):
        load_mar(tmp_path / "x.safetensors", heads=2)


def test_arguments_are_read_wherever_they_lie(tmp_path: Path) -> None:
    for content in (
        {"model": TRAINED, "args": argparse.Namespace(heads=4)},
        {"model": TRAINED, "hyper_parameters": {"num_heads": 4}},
        {"state": {"model": TRAINED, "config": {"n_head": 4}}},
    ):
        torch.save(content, tmp_path / "x.pth")
        assert load_mar(tmp_path / "x.pth").net.config.heads == 4
    torch.save({"model": TRAINED, "args": {"heads": 4, "patch_size": 2, "label_drop_prob": 0.0}}, tmp_path / "x.pth")
    model = load_mar(tmp_path / "x.pth")
    assert model.patch == 2 and "never dropped labels" in model.note


@pytest.mark.parametrize("many", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_many_prefixes_and_shared_containers_are_refused(tmp_path: Path, many: int) -> None:
    save_file({f"p{i}.diffloss.net.x": torch.ones(1) for i in range(many)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="holds several networks of one kind"):
        load_mar(tmp_path / "x.safetensors")
    inner: dict = {"a": 1}
    for _ in range(30):  # 2 ** 30 paths
        inner = {"a": inner, "b": inner}
    with pytest.raises(NoWeights, match="holds no tensors"):
        unpack({"state": inner}, AUTO)
