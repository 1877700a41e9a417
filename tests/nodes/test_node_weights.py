"""What a host without ComfyUI can show of partial loading; the rest is in tests/comfyui/test_partial_loading.py."""

from types import SimpleNamespace

import comfy.model_patcher
import fake_comfy
import pytest
import torch
from fastar_nodes.networks.llama import Llama
from fastar_nodes.nodes import host
from qwen_reference import language_logits, tiny_qwen
from torch import nn

GPU = torch.device("cuda")
CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 2]])


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Casts of layers and the streams that were released."""
    found = []

    def cast(layer, x, offloadable):
        found.append(layer)
        return layer.weight, None, "stream"

    monkeypatch.setattr(host.operations.comfy.ops, "cast_bias_weight", cast)
    monkeypatch.setattr(
        host.operations.comfy.ops, "uncast_bias_weight", lambda layer, weight, bias, stream: found.append(stream)
    )
    return found


def of_core(net: Llama) -> Llama:
    """The same network of ComfyUI's operations."""
    built = Llama(net.config, **host.operations.suited(GPU))
    built.load_state_dict(net.state_dict())
    return built.eval().requires_grad_(False)


def test_networks_for_a_card_are_built_of_comfyuis_layers_and_those_for_a_cpu_of_their_own():
    assert host.operations.suited(CPU) == {}

    net = of_core(tiny_qwen())
    layers = fake_comfy.Layers
    assert isinstance(net.tok_embeddings, layers.Embedding)
    linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
    assert linear and all(isinstance(layer, layers.Linear) for layer in linear)


def test_a_weight_that_is_read_is_cast_by_comfyui_while_it_is_left_out_and_released(calls):
    net = of_core(tiny_qwen())
    expected = language_logits(tiny_qwen(), IDS, (4, 9))
    assert torch.equal(language_logits(net, IDS, (4, 9)), expected) and not calls

    net.tok_embeddings.comfy_cast_weights = True
    assert torch.equal(language_logits(net, IDS, (4, 9)), expected)
    assert calls == [net.tok_embeddings, "stream"]  # the embedding is also the output layer


def test_a_layer_that_comfyui_leaves_out_is_known():
    net = of_core(tiny_qwen())
    assert net.operations.offloaded(net) == []
    net.layers[0].feed_forward.w1.comfy_cast_weights = True
    assert net.operations.offloaded(net) == [net.layers[0].feed_forward.w1]


def test_a_layer_with_a_place_on_the_device_is_not_said_to_stream():
    net = of_core(tiny_qwen())
    for layer in (net.layers[0].feed_forward.w1, net.layers[0].feed_forward.w2):
        layer.comfy_cast_weights = True
    net.layers[0].feed_forward.w1._v = object()  # DynamicVRAM's
    assert net.operations.offloaded(net) == [net.layers[0].feed_forward.w2]


def test_nothing_streams_on_a_cpu():
    net = tiny_qwen()
    assert len(host.memory.always_loaded(net)) == len(list(net.parameters()))


def test_networks_that_stream_are_loaded_last_and_their_other_weights_have_room():
    net, plain = of_core(tiny_qwen()), torch.nn.Linear(2, 2)
    first, second = (SimpleNamespace(model=m, load_device=CPU) for m in (plain, net))
    host.memory.load_weights([first, second], 10.0)
    patchers, about = fake_comfy.state.loaded[0]
    norms = sum(p.nbytes for name, p in net.named_parameters() if "norm" in name)
    assert patchers == [second, first]  # ComfyUI begins with the last
    assert about == {"memory_required": 10.0 + norms, "force_full_load": False}


def test_only_what_cannot_stream_is_moved():
    net = of_core(tiny_qwen())
    host.memory.place(net, torch.device("meta"))
    assert {name for name, p in net.named_parameters() if p.is_meta} == {
        name for name, _ in net.named_parameters() if "norm" in name
    }


def test_comfyuis_own_patcher_moves_what_it_can_copy_layer_by_layer(monkeypatch):
    class Dynamic(fake_comfy.Patcher):
        """DynamicVRAM's, whose weights are never all in place."""

    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", Dynamic)
    net = of_core(tiny_qwen())

    assert type(host.memory.make_patcher(net, GPU, CPU)) is Dynamic
    assert type(host.memory.make_patcher(net, GPU, CPU, "compile")) is fake_comfy.Patcher
    assert type(host.memory.make_patcher(net, GPU, CPU, "auto")) is fake_comfy.Patcher, "it is recorded"
    assert type(host.memory.make_patcher(net, CPU, CPU, "auto")) is Dynamic
    assert type(host.memory.make_patcher(tiny_qwen(), GPU, CPU)) is fake_comfy.Patcher
