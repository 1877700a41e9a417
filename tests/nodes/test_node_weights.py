"""What a host without ComfyUI can show of partial loading; the rest is in tests/comfyui/test_partial_loading.py."""

from types import SimpleNamespace

import fake_comfy
import pytest
import torch
from fastar_nodes.model_loaders.networks import ops
from fastar_nodes.nodes import host
from qwen_reference import language_logits, tiny_qwen

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Casts of layers and the streams that were released."""
    found = []

    def cast(layer, x, offloadable):
        found.append(layer)
        return layer.weight, layer.bias, "stream"

    monkeypatch.setattr(host.comfy.ops, "cast_bias_weight", cast)
    monkeypatch.setattr(host.comfy.ops, "uncast_bias_weight", lambda layer, weight, bias, stream: found.append(stream))
    return found


def test_layers_are_cast_only_while_comfyui_leaves_them_out(calls):
    net, ids = tiny_qwen(), torch.tensor([[3, 1, 2]])
    plain = language_logits(net, ids, (4, 9))
    assert host.allow_streaming(net, GPU) is net
    layers = ops.streamed_layers(net)
    assert torch.equal(language_logits(net, ids, (4, 9)), plain) and not calls
    for layer in layers:
        layer.comfy_cast_weights = True
    assert torch.equal(language_logits(net, ids, (4, 9)), plain)
    linear = [layer for layer in layers if not isinstance(layer, ops.Embedding)]
    assert calls == [x for layer in linear for x in (layer, "stream")], "each once, released before the next"
    for layer in layers:
        assert layer.weight_function == layer.bias_function == []


def test_nothing_streams_on_a_cpu():
    net = host.allow_streaming(tiny_qwen(), torch.device("cpu"))
    assert len(host.always_loaded(net)) == len(list(net.parameters()))


def test_networks_that_stream_are_loaded_last_and_their_other_weights_have_room():
    net, plain = host.allow_streaming(tiny_qwen(), GPU), torch.nn.Linear(2, 2)
    first, second = (SimpleNamespace(model=m, load_device=torch.device("cpu")) for m in (plain, net))
    host.load_weights([first, second], 10.0)
    patchers, about = fake_comfy.state.loaded[0]
    norms = sum(p.nbytes for name, p in net.named_parameters() if "norm" in name)
    assert patchers == [second, first]  # ComfyUI begins with the last
    assert about == {"memory_required": 10.0 + norms, "force_full_load": False}


def test_only_what_cannot_stream_is_moved():
    net = host.allow_streaming(tiny_qwen(), GPU)
    host.place(net, torch.device("meta"))
    assert {name for name, p in net.named_parameters() if p.is_meta} == {
        name for name, _ in net.named_parameters() if "norm" in name
    }
