"""Weights of 8 bits: how they are rounded and multiplied, the
files that hold them, the dtypes int8 and fp8, and samplers.

What ComfyUI makes of them is in tests/comfyui/test_eight_bits_in_core.py.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.bitdance.loader import load_bitdance
from fastar_nodes.model_loaders.files import checkpoint
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.janus.loader import load_janus
from fastar_nodes.model_loaders.kinds import Precision
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.nextstep.loader import load_nextstep
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_tar
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.ops import EightBitLinear, quantize, remark, unpacking_bytes
from fastar_nodes.networks.quantized import FP8, INT8, Quantized, kind_of, round_to
from fastar_nodes.reports.record import dtype_of
from fastar_nodes.runs.registry import find
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.settings import settings_from
from live_bytes import LiveBytes
from nextstep_models import FOLDER, PROMPTS, tiny_nextstep
from safetensors.torch import save_file
from torch import nn

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def demo(root) -> Path:
    return root / "demo" / "checkpoints"


# ------------------------------------------------------------------------------------------------ numbers


def test_int8_by_hand():
    """One scale for every output: 127 and 1 become 127."""
    rounded = round_to(torch.tensor([[127.0, -64.2], [1.0, 0.25], [0.0, 0.0]]), INT8)
    assert rounded.stored.tolist() == [[127, -64], [127, 32], [0, 0]]
    torch.testing.assert_close(rounded.scale[:2], torch.tensor([[1.0], [1 / 127]]))
    torch.testing.assert_close(rounded.numbers(), torch.tensor([[127.0, -64.0], [1.0, 32 / 127], [0.0, 0.0]]))


def test_fp8_by_hand():
    """One scale for all: 448, the largest number, stays. 3.3 lies between 3.25 and 3.5, 0.3 at 0.3125."""
    rounded = round_to(torch.tensor([[448.0, -3.3], [0.3, 0.0]]), FP8)
    assert rounded.scale == 1.0 and rounded.stored.dtype == E4M3
    assert rounded.numbers().tolist() == [[448.0, -3.25], [0.3125, 0.0]]
    half = round_to(torch.tensor([[224.0, -1.65], [0.15, 0.0]]), FP8)
    assert half.scale == 0.5 and torch.equal(half.stored.float(), rounded.stored.float())


def test_a_quantised_weight_is_read_as_its_numbers():
    weight = Quantized(torch.tensor([[2, -3]], dtype=torch.int8), torch.tensor([[0.5]]))
    assert weight.shape == (1, 2) and weight.dtype == torch.float32 and kind_of(weight) == INT8
    assert weight.to(torch.bfloat16).tolist() == [[1.0, -1.5]]
    assert torch.stack([weight, weight]).shape == (2, 1, 2) and float(weight.abs().max()) == 1.5
    assert torch.equal(weight[:, 1:], torch.tensor([[-1.5]])) and weight.numel() == 2


def layer_of(kind: str, width: int = 40, height: int = 24, bias: bool = True, dtype=torch.float32) -> EightBitLinear:
    torch.manual_seed(width + height)
    return EightBitLinear.of(nn.Linear(width, height, bias=bias).requires_grad_(False).to(dtype), kind)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [INT8, FP8])
def test_the_product_is_that_of_the_numbers(kind, bias):
    layer = layer_of(kind, bias=bias)
    weight = layer.weight.float() * layer.weight_scale
    for shape in ((1,), (2,), (7,), (40,), (2, 3), (2, 0)):
        x = torch.randn(*shape, 40) * 100
        torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("kind", [INT8, FP8])
def test_the_product_in_half_precision(kind, dtype, close):
    layer, x = layer_of(kind, dtype=dtype), torch.randn(5, 40)
    weight = layer.weight.float() * layer.weight_scale
    expected = F.linear(x.to(dtype).float(), weight, layer.bias.float())
    found = layer(x.to(dtype))
    assert found.dtype == dtype and (found.float() - expected).norm() < close * expected.norm()


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_no_sum_of_stored_numbers_exceeds_fp16(kind):
    """64 products of 1000 and 0.01 are 640; those with the stored numbers, 127 or 448, would be millions."""
    layer = nn.Linear(64, 2, bias=False, dtype=torch.float16).requires_grad_(False)
    layer.weight.fill_(0.01)
    found = EightBitLinear.of(layer, kind)(torch.full((1, 64), 1000.0, dtype=torch.float16))
    torch.testing.assert_close(found, torch.full((1, 2), 640.0, dtype=torch.float16), rtol=2e-3, atol=0)


def test_rows_do_not_influence_each_other():
    layer, x = layer_of(INT8), torch.randn(6, 40)
    x[0] *= 1e4
    torch.testing.assert_close(layer(x)[1:], layer(x[1:]), rtol=1e-5, atol=1e-5)


def test_memory_in_which_a_weight_is_converted():
    """The largest of the layers, 24 x 16 numbers, twice in fp32."""
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(16, 24), nn.Linear(16, 8)]), "out": nn.Linear(16, 999)})
    net.to(torch.bfloat16)
    assert unpacking_bytes(net) == 0
    assert unpacking_bytes(quantize(net, INT8)) == 2 * 4 * 24 * 16
    assert isinstance(net["out"], nn.Linear)


# ------------------------------------------------------------------------------------------------ dtypes

EVERY = {
    "mar": (load_mar, {"encoder_blocks", "decoder_blocks"}),
    "llamagen-low": (load_llamagen, {"layers"}),
    "par": (load_llamagen, {"layers"}),
    "dtok-low": (load_detokenizer, {"layers"}),
    "tar": (load_tar, {"layers"}),
    "hybrid": (load_hybrid, {"mar.encoder_blocks", "mar.decoder_blocks", "llm.layers"}),
}


def network(model) -> nn.Module:
    return getattr(model, "hybrid", None) or model.net


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("file", EVERY)
@pytest.mark.fast_cases("mar-int8", "llamagen-low-fp8", "tar-int8")
def test_the_blocks_of_every_family_are_rounded_and_nothing_else(demo, file, kind):
    load, blocks = EVERY[file]
    net, plain = (network(load(demo / f"{file}.safetensors", dtype)) for dtype in (kind, "fp32"))
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear):
            inside = any(name.startswith(f"{block}.") for block in blocks)
            found = net.get_submodule(name)
            assert isinstance(found, EightBitLinear) == inside, name
            weight = found.weight if not inside else found.weight.float() * found.weight_scale
            expected = round_to(layer.weight, kind).numbers() if inside else layer.weight
            assert torch.equal(weight, expected), name

    others = [p for name, p in net.named_parameters() if not kind_of(p)]
    assert {p.dtype for p in others} == {torch.float32}
    assert dtype_of(net) == kind and remark(net).startswith(f"{kind} weights") and remark(plain) == ""


def test_janus_in_int8(root):
    net = load_janus(root / "tests" / "parity" / "janus" / "original", INT8).net
    assert all(isinstance(block.attention.wq, EightBitLinear) for block in net.layers)
    assert not kind_of(net.tok_embeddings.weight) and not kind_of(net.output.weight)


def test_bitdance_in_int8(root):
    """The blocks of the language model; neither its table of words, nor projector and diffusion head."""
    net = load_bitdance(root / "tests" / "parity" / "bitdance" / "native", INT8).net
    eight = {name.removesuffix(".weight") for name, weight in net.named_parameters() if kind_of(weight)}
    blocks = {name for name, layer in net.named_modules() if isinstance(layer, EightBitLinear)}
    assert eight == blocks and len(blocks) == 7 * len(net.layers)
    assert all(name.startswith("layers.") for name in blocks)


def test_nextstep_in_int8():
    """The blocks of the language model; neither its table of words, nor projections and flow-matching head."""
    net = load_nextstep(FOLDER / "model", INT8).net
    eight = {name.removesuffix(".weight") for name, weight in net.named_parameters() if kind_of(weight)}
    blocks = {name for name, layer in net.named_modules() if isinstance(layer, EightBitLinear)}
    assert eight == blocks and len(blocks) == 7 * len(net.layers)
    assert all(name.startswith("layers.") for name in blocks)
    biases = [name for name, _ in net.named_parameters() if name.startswith("layers.") and name.endswith("bias")]
    assert len(biases) == 3 * len(net.layers), "of q, k and v"


def test_a_chosen_precision_goes_through(demo):
    net = load_llamagen(demo / "llamagen-low.safetensors", Precision(torch.bfloat16, INT8)).net
    assert net.norm.weight.dtype == torch.bfloat16 and kind_of(net.layers[0].attention.wo.weight) == INT8


class LiveOnCPU(LiveBytes):
    """Without what is on the meta device, which takes no memory."""

    def add(self, storage: torch.UntypedStorage, count: int) -> None:
        super().add(storage, count if storage.device.type == "cpu" else 0)


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_a_quantised_network_never_exists_as_a_whole_in_more_bits(demo, kind):
    with LiveOnCPU() as live:
        net = load_llamagen(demo / "llamagen-low.safetensors", kind).net
    size = sum(p.nbytes for p in net.parameters())
    largest = max(p.numel() for p in net.parameters() if kind_of(p))
    whole = 4 * sum(p.numel() for p in net.parameters())
    # One weight is copied, scaled and rounded at a time.
    most = size + 5 * 4 * largest
    assert size <= live.peak <= most < whole


# ------------------------------------------------------------------------------------------------ files

GPT = LlamaConfig(dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=20, condition="class", condition_size=3)
G = torch.Generator().manual_seed(1)
STATE = {name: torch.randn(t.shape, generator=G) for name, t in Llama(GPT).state_dict().items()}
LAYERS = [name.removesuffix(".weight") for name in STATE if name.startswith("layers.") and "norm" not in name]
HEADS = {"heads": "2", "grid": "4"}
OUT = "layers.1.attention.wo"


def statement(**about) -> torch.Tensor:
    return torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)


def rounded(kind: str, ending: str = ".weight_scale") -> dict[str, torch.Tensor]:
    """A file whose blocks are rounded, the scales under these names."""
    state = dict(STATE)
    for layer in LAYERS:
        weight = round_to(STATE[f"{layer}.weight"], kind)
        state[f"{layer}.weight"] = weight.stored
        state[layer + ending] = weight.scale
    return state


def comfy(kind: str) -> dict[str, torch.Tensor]:
    """As ComfyUI writes it."""
    form = {"int8": "int8_tensorwise", "fp8": "float8_e4m3fn"}[kind]
    return rounded(kind) | {f"{layer}.comfy_quant": statement(format=form) for layer in LAYERS}


def save(path: Path, state: dict[str, torch.Tensor], **metadata: str) -> Path:
    save_file(state, path / "x.safetensors", metadata=HEADS | metadata)
    return path / "x.safetensors"


TABLE = json.dumps({"format_version": "1.0", "layers": {layer: {"format": "float8_e4m3fn"} for layer in LAYERS}})
FOR_COMFYUI = {
    "int8": lambda: (comfy(INT8), {}),
    "fp8": lambda: (comfy(FP8), {}),
    "fp8 by metadata": lambda: (rounded(FP8), {"_quantization_metadata": TABLE}),
    "scaled_fp8": lambda: (rounded(FP8, ".scale_weight") | {"scaled_fp8": torch.zeros(0, dtype=E4M3)}, {}),
    "scales beside": lambda: (rounded(FP8), {}),
}


@pytest.mark.parametrize("form", FOR_COMFYUI)
def test_files_for_comfyui_are_refused_elsewhere(tmp_path, monkeypatch, form):
    monkeypatch.setattr(checkpoint, "gather_quantised", None)
    state, metadata = FOR_COMFYUI[form]()
    with pytest.raises(
        UserError, match="^checkpoint: x.safetensors holds .*quantised.*which FastAR cannot read"
    ) as error:
        load_llamagen(save(tmp_path, state, **metadata))
    assert str(error.value).endswith("FastAR also reads ComfyUI's formats fp8, int8 and asym_w4a8_int8")


def gathered(state, metadata):
    """A host's reader, in the place of ComfyUI's."""
    weights = {name: tensor for name, tensor in state.items() if not name.endswith((".weight_scale", ".comfy_quant"))}
    for layer in LAYERS:
        weights[f"{layer}.weight"] = Quantized(state[f"{layer}.weight"], state[f"{layer}.weight_scale"])
    return weights


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_what_a_host_reads_stays_as_it_is_stored(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checkpoint, "gather_quantised", gathered)
    path = save(tmp_path, comfy(kind))
    expected = {layer: round_to(STATE[f"{layer}.weight"], kind) for layer in LAYERS}

    kept = load_llamagen(path).net
    for layer, weight in expected.items():
        found = kept.get_submodule(layer)
        assert isinstance(found, EightBitLinear) and torch.equal(found.weight.float(), weight.stored.float())
        assert torch.equal(found.weight_scale.flatten(), weight.scale.flatten())
    assert torch.equal(kept.output.weight, STATE["output.weight"]) and dtype_of(kept) == kind

    # What the user chooses goes before what the file holds.
    whole = load_llamagen(path, "fp32").net
    assert all(torch.equal(whole.get_submodule(layer).weight, weight.numbers()) for layer, weight in expected.items())
    other = load_llamagen(path, FP8 if kind == INT8 else INT8).net
    assert dtype_of(other) == (FP8 if kind == INT8 else INT8)

    # The tensors of the file are not kept.
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(kept.get_submodule(OUT).weight.float(), expected[OUT].stored.float())


def test_what_a_host_cannot_read_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "gather_quantised", lambda state, metadata: state["gone"])
    with pytest.raises(UserError, match="x.safetensors holds 8-bit weights that ComfyUI cannot read .'gone'"):
        load_llamagen(save(tmp_path, comfy(FP8)))


def test_fp8_without_scales_stays_fp8(tmp_path):
    state = STATE | {f"{layer}.weight": STATE[f"{layer}.weight"].to(E4M3) for layer in LAYERS}
    net = load_llamagen(save(tmp_path, state)).net
    layer = net.get_submodule(OUT)
    assert dtype_of(net) == FP8 and layer.weight_scale == 1
    assert torch.equal(layer.weight.float(), STATE[f"{OUT}.weight"].to(E4M3).float())


def test_int8_without_a_scale_is_no_weight(tmp_path):
    state = STATE | {f"{OUT}.weight": STATE[f"{OUT}.weight"].to(torch.int8)}
    with pytest.raises(UserError, match=f"int8 instead of ordinary weights in {OUT}.weight"):
        load_llamagen(save(tmp_path, state))


# ------------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("sampler", ["mar", "fasthybrid", "lazymar"])
@pytest.mark.fast_cases("mar-int8")
def test_mar_samplers(demo, sampler, kind):
    entry, found = find(sampler), {}
    for dtype in ("fp32", kind):
        model = load_mar(demo / "mar.safetensors", dtype)
        settings = settings_from(entry.settings, {"steps": 8, "diffusion_steps": 10, "temperature": 0.0})
        with torch.inference_mode():
            found[dtype] = finish(entry.run(model, from_ids([0, 3]), settings, PairedNoise(7, range(2))))
    a, b = found["fp32"].latents, found[kind].latents
    # Another image, or the same; not noise. Two images of other seeds differ by 1.2 to 1.4 of their norm.
    assert 0 < (a - b).norm() < 0.8 * a.norm()
    assert found[kind].report.note.startswith(f"{kind} weights") and not found["fp32"].report.note
    assert found[kind].report.dtype == kind


@pytest.mark.parametrize(("kind", "most"), [(INT8, 0.01), (FP8, 0.04)])
def test_nextstep_stays_close(kind, most):
    """Mean differences, as a share of those of another seed. That they are not 0 shows that the weights are used."""
    entry = find("nextstep")
    settings = settings_from(entry.settings, {"diffusion_steps": 4, "cfg": 2.0})
    condition = PromptCondition(PROMPTS[:2])

    def drawn(model, seed=5):
        return finish(entry.run(model, condition, settings, PairedNoise(seed, range(2))))

    plain, other = drawn(tiny_nextstep()), drawn(tiny_nextstep(), 6)
    found = drawn(replace(load_nextstep(FOLDER / "model", kind), side=3))
    apart = (other.latents - plain.latents).abs().mean()
    assert 0 < (found.latents - plain.latents).abs().mean() < most * apart
    assert found.report.note.startswith(f"{kind} weights") and not plain.report.note
