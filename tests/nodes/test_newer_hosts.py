"""What newer versions of ComfyUI than the tested ones ask of a pack: their functions are stood in for."""

import json
import sys
from types import ModuleType, SimpleNamespace

import fake_comfy
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.memory import enough_memory, out_of_memory
from fastar_nodes.networks.quantized import FP8, INT8, round_to
from fastar_nodes.nodes import host
from tiny import a_vae
from torch import nn

FP8_FORMATS = {"float8_e4m3fn", "float8_e5m2"}
# Devices that multiply no int8 matrices, and one that does.
WITHOUT_INT8 = ("mps", "xpu", "privateuseone:0")
WITH_INT8 = "cuda"


class Mixed:
    """comfy.ops.mixed_precision_ops: layers that remember the formats that they were told to convert."""

    def __init__(self, about, dtype, disabled):
        self.Linear = type("Linear", (nn.Linear,), {"disabled": set(disabled)})


@pytest.fixture
def core(monkeypatch):
    """Sets the device on which ComfyUI computes, and whether its version knows what a device multiplies."""
    monkeypatch.setattr(host.operations.comfy.ops, "mixed_precision_ops", Mixed, raising=False)
    monkeypatch.setattr(host.devices.mm, "supports_fp8_compute", lambda device: device.type == WITH_INT8, raising=False)

    def of(device, newer):
        monkeypatch.setitem(fake_comfy.state.places, "get_torch", device)

        def disabled(asked):
            assert asked == torch.device(device)
            return FP8_FORMATS | {"int8_tensorwise"} if device != WITH_INT8 else set()

        if newer:
            monkeypatch.setattr(host.operations.comfy.ops, "get_disabled_quant_formats", disabled, raising=False)
        return host.operations._CORE_OPERATIONS.quantised(torch.float16, 0)

    return of


# ------------------------------------------------------------------------------------------------ weights of 8 bits


@pytest.mark.parametrize("device", [*WITHOUT_INT8, WITH_INT8])
def test_a_newer_core_says_what_a_device_multiplies(core, device):
    operations = core(device, newer=True)
    expected = set() if device == WITH_INT8 else FP8_FORMATS | {"int8_tensorwise"}
    assert operations.Linear.disabled == expected

    weight = round_to(torch.ones(2, 3), INT8)
    assert operations.entries("layer.weight", weight)["layer.weight"].dtype is torch.int8


@pytest.mark.parametrize("device", WITHOUT_INT8)
def test_an_older_core_refuses_int8_where_it_would_fail(core, device):
    operations = core(device, newer=False)
    assert operations.Linear.disabled == FP8_FORMATS
    with pytest.raises(UserError, match=rf"^dtype: this version of ComfyUI .* int8 weights on {device}; update"):
        operations.entries("layer.weight", round_to(torch.ones(2, 3), INT8))

    # Others are converted for every product, as before.
    kept = round_to(torch.ones(2, 3), FP8)
    stated = json.loads(bytes(operations.entries("layer.weight", kept)["layer.comfy_quant"].tolist()))
    assert stated["format"] == "float8_e4m3fn"


def test_an_older_core_multiplies_int8_on_other_devices(core):
    operations = core(WITH_INT8, newer=False)
    assert operations.Linear.disabled == set()
    assert "layer.weight" in operations.entries("layer.weight", round_to(torch.ones(2, 3), INT8))


# ------------------------------------------------------------------------------------------------ DynamicVRAM


def model(patchers):
    """A model of a loader with a part of its own, as a de-tokenizer with its TA-Tok."""
    first, second, other = patchers
    part = host.loaded.Loaded(SimpleNamespace(net=None), other)
    return host.loaded.Loaded(SimpleNamespace(net=None), first, parts={host.loaded.TA_TOK: part}, further=[second])


def test_all_parts_of_a_model_are_in_use_by_the_prompt_that_runs():
    """Core marks ``patcher`` and what ``get_models`` gives of every output: other models lose their pins first."""
    patchers = [fake_comfy.Patcher(nn.Linear(2, 2), "cuda", "cpu") for _ in range(3)]
    loaded = model(patchers)
    marked = [loaded.patcher, *loaded.get_models()]
    assert {id(patcher) for patcher in marked} == {id(patcher) for patcher in patchers}


def test_a_cached_model_is_dynamic_if_its_transformer_is(monkeypatch):
    """Core drops other results first, because dropping such a one frees little memory."""
    patchers = [fake_comfy.Patcher(nn.Linear(2, 2), "cuda", "cpu") for _ in range(3)]
    loaded, vae = model(patchers), a_vae()
    assert not loaded.is_dynamic() and not vae.is_dynamic()

    monkeypatch.setattr(fake_comfy.state, "dynamic", True)
    monkeypatch.setattr(patchers[1], "is_dynamic", lambda: False)  # a head
    assert loaded.is_dynamic() and vae.is_dynamic()


def test_a_decoder_counts_the_memory_that_dynamic_vram_gives_back(monkeypatch):
    """Where nothing is free but all of it can be given back, the batch is decoded at once."""
    vae, sizes = a_vae(), []
    need = vae.memory_used_decode((1, vae.latent_channels, 2, 2), vae.vae_dtype)
    monkeypatch.setattr(host.devices.mm, "get_free_memory", lambda device: 0.0)
    decode = vae._decode

    def decoded(latents):
        sizes.append(len(latents))
        return decode(latents)

    monkeypatch.setattr(vae, "_decode", decoded)
    for given_back, expected in ((0, [1, 1, 1, 1]), (2 * need, [2, 2]), (4 * need, [4])):
        monkeypatch.setattr(fake_comfy.state, "given_back", given_back)
        sizes.clear()
        vae.decode(torch.zeros(4, vae.latent_channels, 2, 2))
        assert sizes == expected


class Streamed(fake_comfy.Patcher):
    """CoreModelPatcher of a newer core."""

    def __init__(self, *about, fast_disk):
        super().__init__(*about)
        self.fast_disk = fast_disk


@pytest.mark.parametrize("wanted", [False, True])
def test_the_user_decides_whether_weights_are_read_from_the_disk_again(monkeypatch, wanted):
    """``model_fast_disk`` of no files is the option --fast-disk, which the loaders of core's own models ask too."""
    layer = fake_comfy.Layers.Linear(2, 2)
    assert type(host.memory.make_patcher(layer, "cuda", "cpu")) is fake_comfy.Patcher, (
        "an older core has no such argument"
    )

    storage = ModuleType("comfy.storage")
    storage.model_fast_disk = lambda paths: wanted and not paths
    monkeypatch.setitem(sys.modules, "comfy.storage", storage)
    monkeypatch.setattr(host.memory.comfy, "storage", storage, raising=False)
    monkeypatch.setattr(host.memory.comfy.model_patcher, "CoreModelPatcher", Streamed)
    assert host.memory.make_patcher(layer, "cuda", "cpu").fast_disk is wanted
    assert not hasattr(host.memory.make_patcher(layer, "cuda", "cpu", "compile"), "fast_disk"), "loaded before the run"


# ------------------------------------------------------------------------------------------------ comfy-aimdo 0.6

TEXTS = (
    "VRAM grow failed: 1048576 bytes",
    "VRAM reservation failed",
    "HostBuffer allocation failed",
    "HostBuffer.extend failed",
)


@pytest.mark.parametrize("text", TEXTS)
def test_aimdos_texts_of_insufficient_memory(text):
    assert out_of_memory(RuntimeError(text))
    with pytest.raises(UserError, match="^dtype: "), enough_memory("dtype: choose another."):
        raise RuntimeError(text)


@pytest.mark.parametrize("cause", [None, torch.OutOfMemoryError("CUDA out of memory."), KeyboardInterrupt()])
def test_a_failed_unpin_does_not_hide_why_a_layer_failed(monkeypatch, cause):
    """aimdo 0.6 raises if a place on the device, which ran out of memory, cannot be unpinned."""

    def unpin(*about):
        raise RuntimeError("VBAR unpin failed")

    monkeypatch.setattr(
        host.operations.comfy.ops,
        "cast_bias_weight",
        lambda layer, x, offloadable: (layer.weight, None, "stream"),
    )
    monkeypatch.setattr(host.operations.comfy.ops, "uncast_bias_weight", unpin)
    layer = fake_comfy.Layers.Linear(2, 2)
    layer.comfy_cast_weights = True

    with pytest.raises(RuntimeError if cause is None else type(cause)) as raised:
        with host.operations._CORE_OPERATIONS.weight(layer, torch.ones(1, 2)):
            if cause is not None:
                raise cause
    assert str(raised.value) == ("VBAR unpin failed" if cause is None else str(cause))


# ------------------------------------------------------------------------------------------------ the tests' own server
