"""Weights of 4 bits and planes: how they are rounded, packed and multiplied, the dtypes int4 and int4-g64, samplers.

What ComfyUI makes of them is in tests/comfyui/test_four_bits_in_core.py.
"""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.bitdance.loader import load_bitdance
from fastar_nodes.model_loaders.catalogue.official import shapes_of
from fastar_nodes.model_loaders.files.formats import packed_format
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.kinds import choose_dtype
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.nextstep.loader import load_nextstep
from fastar_nodes.networks import ops, quantized
from fastar_nodes.networks.ops import EightBitLinear, PackedLinear, quantize, remark, rounded, unpacking_bytes
from fastar_nodes.networks.quantized import (
    FEW,
    INT4,
    INT4_SMALL,
    INT8,
    QUANTISED,
    Format,
    arranged,
    format_of,
    four_bit_product,
    from_tiles,
    kind_of,
    paired,
    planes,
    round_to_four,
    unpaired,
)
from fastar_nodes.reports.record import dtype_of
from fastar_nodes.runs.registry import find
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.settings import settings_from
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from nextstep_models import FOLDER, PROMPTS, tiny_nextstep
from torch import nn

FORMS = {"int4": Format(INT4, 32), "int4-g64": Format(INT4, 64), "planes": Format(INT8, 128)}


def weight_of(n: int = 48, k: int = 128) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) / 8


def layer_of(format: Format, dtype=torch.float32, bias: bool = True, n: int = 48, k: int = 128) -> PackedLinear:
    made = PackedLinear(nn.Linear(k, n, bias=bias).requires_grad_(False).to(dtype), format, dtype, torch.device("cpu"))
    made.hold(rounded(weight_of(n, k), format))
    return made


# ------------------------------------------------------------------------------------------------ numbers


def test_int4_by_hand():
    """32 numbers from 0 to 15.5 in steps of 1/2: the scale is 15.5 / 15, in bf16 1.03125, the zero is 8.25."""
    w = torch.arange(0, 16, 0.5)[None].repeat(16, 1)
    found = round_to_four(w, 32)
    assert found.scales.shape == (1, 16, 2) and found.scales[0, 3].tolist() == [1.03125, 8.25]
    codes = unpaired(found.codes)
    assert codes[3].tolist() == [round(x / 2 / 1.03125) for x in range(32)]
    assert torch.equal(found.numbers(), codes.float() * 1.03125)


def test_the_error_of_a_weight():
    """Of normal numbers 8 % in groups of 32, 9 % in groups of 64, 0.7 % in planes."""
    w = weight_of(64, 512)
    errors = {name: float((rounded(w, form).numbers() - w).norm() / w.norm()) for name, form in FORMS.items()}
    assert 0.07 < errors["int4"] < 0.085 < errors["int4-g64"] < 0.1 and 0.005 < errors["planes"] < 0.009


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-30])
def test_equal_numbers_are_kept(value):
    w = torch.full((16, 64), value)
    for form in (Format(INT4, 32), Format(INT8, 64)):
        torch.testing.assert_close(rounded(w, form).numbers(), w, rtol=0.03, atol=1e-37)


def test_codes_in_pairs():
    """The even column is in the upper half of a byte."""
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    assert paired(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x12, 0xF0]]
    assert torch.equal(unpaired(paired(codes)), codes)


def test_planes_are_int8():
    """q s with q of -127 to 127; s is the scale, rounded up to 4 significant bits."""
    w = weight_of()
    found = planes(w, 64)
    numbers = found.numbers()
    scale = found.scales[0, 48:, 0].float()
    q = numbers / scale[:, None]
    assert torch.equal(q, q.round()) and 119 <= q.abs().amax() <= 127
    torch.testing.assert_close(q, (w / scale[:, None]).round(), rtol=0, atol=0)

    least = w.abs().amax(1) / 127
    mantissa = scale / torch.exp2(scale.log2().floor()) * 8
    assert torch.equal(mantissa, mantissa.round()) and bool((least <= scale).all() and (scale <= 1.125 * least).all())
    # Each plane's numbers are exact in bf16, to which the product on CUDA devices rounds them.
    of_a_plane = quantized._numbers(unpaired(found.codes), found.scales)
    assert torch.equal(of_a_plane.bfloat16().float(), of_a_plane)


# ------------------------------------------------------------------------------------------------ packing and products


def test_the_product_on_a_cpu_reads_what_is_packed():
    """Of unit rows the product is the weight, with scales of one and zeros of zero the codes."""
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    scales = torch.tensor([1.0, 0.0]).repeat(2, 32, 1)
    found = four_bit_product(torch.eye(64), arranged(paired(codes)), 32, scales)
    assert torch.equal(found.T, codes.float() - 8)


def tiled(codes: torch.Tensor, tiles: int) -> torch.Tensor:
    """Pairs uint8 [N, K / 2] as the product on CUDA devices has them, word by word as ``int4mm.cu`` packs them."""
    rows, half = codes.shape
    out = torch.zeros(rows // 8, half // (8 * tiles), 32, tiles // 2, dtype=torch.int64)
    for row_tile in range(out.shape[0]):
        for column_tile in range(out.shape[1]):
            for lane in range(32):
                for word in range(tiles // 2):
                    first = (column_tile * tiles + 2 * word) * 8 + lane % 4
                    v = [int(codes[row_tile * 8 + lane // 4, first + 4 * i]) for i in range(4)]
                    nibbles = [byte >> 4 for byte in v] + [byte & 15 for byte in v]
                    out[row_tile, column_tile, lane, word] = sum(code << 4 * i for i, code in enumerate(nibbles))

    return out.to(torch.uint32).view(torch.uint8).reshape(codes.shape)


@pytest.mark.parametrize(("k", "tiles"), [(32, 2), (64, 4), (256, 8)])
def test_the_inverse_of_cudas_order(k, tiles):
    codes = torch.randint(0, 256, (16, k // 2), dtype=torch.uint8)
    assert torch.equal(from_tiles(tiled(codes, tiles)), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_the_product_is_that_of_the_numbers(form, dtype, rows):
    layer = layer_of(FORMS[form], dtype)
    x = torch.randn(2, rows, 128).to(dtype)
    expected = F.linear(x.float(), rounded(weight_of(), FORMS[form]).numbers(), layer.bias.float())
    found = layer(x)
    close = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert found.dtype is dtype and float((found.float() - expected).norm() / expected.norm()) < close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form, dtype, monkeypatch):
    """The product of 1, 2, 3, 8 and 16 rows is that of 64, bit for bit."""
    monkeypatch.setattr(quantized, "FEW", 64)
    layer = layer_of(FORMS[form], dtype, n=256, k=512)
    x = torch.randn(64, 512).to(dtype)
    whole = layer(x)
    for count in (1, 2, 3, 8, 16):
        parts = torch.cat([layer(x[i : i + count]) for i in range(0, 64, count)])
        assert torch.equal(parts, whole), count


@pytest.mark.parametrize("form", FORMS)
def test_many_rows_on_a_cuda_device_are_unpacked(form, monkeypatch):
    """As it is there: few rows take the product, more a plain one with codes that are in the product's order."""
    plain = layer_of(FORMS[form])
    few = deepcopy(plain)(torch.eye(128)[:FEW])
    codes = plain.weight.view(torch.uint8).clone()
    plain.weight.data = tiled(codes, 8).view(plain.weight.dtype)
    plain.arranged = "cuda"
    monkeypatch.setattr(ops, "takes", lambda device, dtype, rows: False)
    monkeypatch.setattr(quantized, "UNPACKED", 128 * 20)  # 48 outputs in three parts
    torch.testing.assert_close(plain(torch.eye(128))[:FEW], few, rtol=1e-5, atol=1e-6)


def test_the_rule_of_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert quantized.takes(cuda, torch.bfloat16, FEW) and not quantized.takes(cuda, torch.bfloat16, FEW + 1)
    assert quantized.takes(cpu, torch.float32, FEW) and not quantized.takes(cpu, torch.float32, FEW + 1)
    assert quantized.takes(torch.device("mps"), torch.float32, 999) and not quantized.takes(cuda, torch.float16, 1)
    assert quantized.pays_as_planes(cuda, torch.bfloat16) and not quantized.pays_as_planes(cpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not quantized.has_product(cuda, torch.bfloat16) and not quantized.has_product(
        torch.device("xpu"), torch.bfloat16
    )


def test_a_cpu_keeps_a_copy_in_its_order():
    """Beside the codes as they are, which many rows and other devices need; it goes when the weights move."""
    layer = layer_of(FORMS["int4"])
    before = layer.weight.clone()
    assert ops.packed_bytes(nn.Sequential(layer)) == layer.weight.nbytes
    layer(torch.zeros(1, 128))
    assert torch.equal(layer.weight, before) and not torch.equal(layer.copy, before) and not layer.arranged
    assert layer.to(torch.float32).copy is None


def test_codes_in_another_devices_order_are_one_sentence():
    layer = layer_of(FORMS["int4"])
    layer.arranged = "mps"
    with pytest.raises(UserError, match="mps.*load the model again for cpu"):
        layer(torch.zeros(1, 128))


def test_a_device_without_a_product_is_one_sentence():
    """fp16, for example, on a card before Ampere."""
    net = nn.Sequential(layer_of(FORMS["int4"], torch.float16))
    words = "cpu in float16 cannot multiply 4-bit weights, so every pass unpacks them, which is slower"
    assert remark(net) == f"int4 weights change the images (see docs/precision.md); {words}"
    assert remark(nn.Sequential(layer_of(FORMS["int4"]))) == "int4 weights change the images (see docs/precision.md)"


def test_int8_becomes_planes_where_these_are_faster(monkeypatch):
    """By device and shape. Elsewhere each weight is converted for every product."""
    wanted, device, dtype = Format(INT8), torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert ops.FAST.format(wanted, (4096, 4096), device, dtype) == Format(INT8, 256)
    assert ops.FAST.format(wanted, (4096, 96), device, dtype) == Format(INT8, 32)
    assert (
        ops.FAST.format(wanted, (4096, 100), device, dtype)
        == wanted
        == ops.FAST.format(wanted, (8, 256), device, dtype)
    )
    assert ops.FAST.format(wanted, (4096, 4096), torch.device("cpu"), dtype) == wanted
    assert ops.FAST.format(Format("fp8"), (4096, 4096), device, dtype) == Format("fp8")


# ------------------------------------------------------------------------------------------------ dtypes


def test_what_a_dtype_makes_of_a_layer():
    int4, small = QUANTISED[INT4], QUANTISED[INT4_SMALL]
    assert format_of(int4, "layers.0.feed_forward.w1", (11008, 4096)) == Format(INT4, 32)
    assert format_of(int4, "layers.0.attention.wo", (4096, 4096)) == Format(INT8, 256)
    assert format_of(int4, "model.layers.0.self_attn.q_proj", (48, 96)) == Format(INT8, 32)
    assert format_of(int4, "layers.0.feed_forward.w2", (128, 176)) == Format(INT8)
    assert format_of(small, "layers.0.attention.wo", (4096, 4096)) == Format(INT4, 64)
    assert format_of(small, "layers.0.feed_forward.w1", (4096, 96)) == Format(INT4, 32)
    assert format_of(QUANTISED[INT8], "layers.0.feed_forward.w1", (4096, 4096)) == Format(INT8)


@pytest.mark.parametrize("dtype", [INT4, INT4_SMALL])
def test_bits_are_those_of_the_tensors(dtype):
    for layer in ("feed_forward.w1", "attention.wo"):
        form = format_of(QUANTISED[dtype], layer, (64, 512))
        made = layer_of(form, bias=False, n=64, k=512)
        assert 8 * sum(p.nbytes for p in made.parameters()) == form.bits * 64 * 512


def test_the_demo_in_int4(root):
    """Feed-forward layers in 4 bits but w2, whose 176 columns are no multiple of 32; attention in planes."""
    net = load_llamagen(root / "demo" / "checkpoints" / "llamagen-low.safetensors", INT4).net
    block = net.layers[0]
    assert block.feed_forward.w1.format == block.feed_forward.w3.format == Format(INT4, 32)
    assert isinstance(block.feed_forward.w2, EightBitLinear) and block.attention.wo.format == Format(INT8, 128)
    assert kind_of(block.feed_forward.w1.weight) == INT4 and kind_of(block.attention.wo.weight) == INT8
    assert not kind_of(net.output.weight) and dtype_of(net) == INT4

    plain = load_llamagen(root / "demo" / "checkpoints" / "llamagen-low.safetensors", "fp32").net
    shapes = {name: shape for name, shape in shapes_of(net).items() if not name.endswith("weight_scale")}
    assert shapes == shapes_of(plain), "those of the numbers"
    same = quantize(deepcopy(plain), INT4)
    for name, weight in net.named_parameters():
        assert torch.equal(weight, dict(same.named_parameters())[name]), name
    assert unpacking_bytes(net) == 2 * 4 * 384 * 128, "wqkv, the largest"


def test_bitdance_in_int4(root):
    net = load_bitdance(root / "tests" / "parity" / "bitdance" / "native", INT4_SMALL).net
    kinds = {kind_of(layer.weight) for layer in net.layers.modules() if hasattr(layer, "weight_scale")}
    assert kinds <= {INT4, INT8} and kinds and not kind_of(net.tok_embeddings.weight)


@pytest.mark.parametrize(("dtype", "feed_forward", "attention"), [
    (INT4, Format(INT4, 32), Format(INT8, 64)),
    (INT4_SMALL, Format(INT4, 64), Format(INT4, 64)),
])  # fmt: skip
def test_nextstep_in_4_bits(dtype, feed_forward, attention):
    """The blocks of the language model; w2, whose 112 columns are no multiple of 32, is int8."""
    net = load_nextstep(FOLDER / "model", dtype).net
    for block in net.layers:
        assert block.feed_forward.w1.format == block.feed_forward.w3.format == feed_forward
        assert isinstance(block.feed_forward.w2, EightBitLinear)
        layers = block.attention.wq, block.attention.wk, block.attention.wv, block.attention.wo
        assert {layer.format for layer in layers} == {attention}
    rounded = [name for name, weight in net.named_parameters() if kind_of(weight)]
    assert len(rounded) == 7 * len(net.layers) and all(name.startswith("layers.") for name in rounded)


def test_what_was_not_measured_in_4_bits_is_refused(root):
    for load, file, noun in ((load_mar, "mar", "a MAR"), (load_hybrid, "hybrid", "a Harmon or UniPic")):
        with pytest.raises(UserError, match=f"dtype: FastAR does not offer 4-bit weights for {noun}, .*; choose int8"):
            load(root / "demo" / "checkpoints" / f"{file}.safetensors", INT4)
    with pytest.raises(UserError, match="dtype: FastAR cannot load .* in 'int4'"):
        choose_dtype(INT4, "cpu", "vq")


# ------------------------------------------------------------------------------------------------ samplers


def drawn(model, name: str, parallel: int, images: int = 2) -> torch.Tensor:
    entry = find(name)
    settings = settings_from(entry.settings, {"parallel": parallel, "top_k": 0})
    with torch.inference_mode():
        return finish(entry.run(model, from_ids([1, 4][:images]), settings, TokenNoise(5, range(images)))).latents


@pytest.mark.parametrize("dtype", [INT4, INT4_SMALL, INT8])
@pytest.mark.parametrize(("name", "file"), [("llamagen", "llamagen-low"), ("par", "par")])
@pytest.mark.fast_cases(1)
def test_parallel_decoding_equals_serial(root, name, file, dtype):
    """In fp32 for any number of rows, image by image."""
    model = load_llamagen(root / "demo" / "checkpoints" / f"{file}.safetensors", dtype)
    serial = drawn(model, name, 0)
    assert torch.equal(drawn(model, name, 1), serial) and torch.equal(drawn(model, name, 8), serial)


@pytest.mark.parametrize(("dtype", "most"), [(INT4, 0.05), (INT4_SMALL, 0.15)])
def test_nextstep_stays_close(dtype, most):
    """Mean differences, as a share of those of another seed. Nobody has measured them on a published model."""
    entry = find("nextstep")
    settings = settings_from(entry.settings, {"diffusion_steps": 4, "cfg": 2.0})
    condition = PromptCondition(PROMPTS[:2])

    def drawn(model, seed=5):
        return finish(entry.run(model, condition, settings, PairedNoise(seed, range(2))))

    plain, other = drawn(tiny_nextstep()), drawn(tiny_nextstep(), 6)
    found = drawn(replace(load_nextstep(FOLDER / "model", dtype), side=3))
    apart = (other.latents - plain.latents).abs().mean()
    assert 0 < (found.latents - plain.latents).abs().mean() < most * apart
    assert found.report.note.startswith("int4 and int8 weights") and found.report.dtype == INT4


# ------------------------------------------------------------------------------------------------ other formats


def test_convrot_w4a4_is_refused_with_the_reason():
    text = torch.tensor([*json.dumps({"format": "convrot_w4a4"}).encode()], dtype=torch.uint8)
    found, _ = packed_format({"layers.0.wo.weight": None, "layers.0.wo.comfy_quant": text}, {})
    assert found == (
        "holds weights in convrot_w4a4, which FastAR does not read, because this format also rounds the inputs of "
        "matrix products to 4 bits, with an error of 20 % (layers.0.wo.comfy_quant)"
    )
    for other in (torch.ones(3, dtype=torch.uint8), torch.zeros(2, 2), None):
        assert "in a quantised format of ComfyUI" in packed_format({"layers.0.wo.comfy_quant": other}, {})[0]
