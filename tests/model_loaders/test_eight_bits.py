"""Weights of 8 bits: how they are rounded and multiplied, the
files that hold them, the dtypes int8 and fp8, and samplers.

What ComfyUI makes of them is in tests/comfyui/test_eight_bits_in_core.py.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.bitdance.loader import load_bitdance
from fastar_nodes.model_loaders.files.checkpoint import read
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.janus.loader import load_janus
from fastar_nodes.model_loaders.kinds import Precision
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_tar
from fastar_nodes.networks.eight_bits import FP8, INT8, Quantized, kind_of, round_to
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.ops import EightBitLinear, quantize, remark, unpacking_bytes
from fastar_nodes.reports.record import dtype_of
from fastar_nodes.runs.registry import find
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.settings import make
from fastar_nodes.samplers.tokens.draws import PairedDraws
from live_bytes import LiveBytes
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


def rounded(kind: str, ending: str = ".weight_scale", prefix: str = "") -> dict[str, torch.Tensor]:
    """A file whose blocks are rounded, the scales under these names."""
    state = {prefix + name: tensor for name, tensor in STATE.items()}
    for layer in LAYERS:
        weight = round_to(STATE[f"{layer}.weight"], kind)
        state[f"{prefix}{layer}.weight"] = weight.stored
        state[prefix + layer + ending] = weight.scale
    return state


def comfy(kind: str, **about) -> dict[str, torch.Tensor]:
    """As ComfyUI writes it."""
    form = {"int8": "int8_tensorwise", "fp8": "float8_e4m3fn"}[kind]
    return rounded(kind) | {f"{layer}.comfy_quant": statement(format=form, **about) for layer in LAYERS}


def older(count: int = 0, prefix: str = "") -> dict[str, torch.Tensor]:
    return rounded(FP8, ".scale_weight", prefix) | {f"{prefix}scaled_fp8": torch.zeros(count, dtype=E4M3)}


def save(path: Path, state: dict[str, torch.Tensor], **metadata: str) -> Path:
    save_file(state, path / "x.safetensors", metadata=HEADS | metadata)
    return path / "x.safetensors"


def table(kind: str = "float8_e4m3fn", layers=LAYERS) -> str:
    return json.dumps({"format_version": "1.0", "layers": {layer: {"format": kind} for layer in layers}})


READ = {
    "comfy_quant, int8": lambda: (comfy(INT8), {}),
    "comfy_quant, fp8": lambda: (comfy(FP8), {}),
    "metadata": lambda: (rounded(FP8), {"_quantization_metadata": table()}),
    "metadata, int8": lambda: (rounded(INT8), {"_quantization_metadata": table("int8_tensorwise")}),
    "scaled_fp8": lambda: (older(), {}),
    "scaled_fp8 behind a prefix": lambda: (older(prefix="model."), {}),
    "scaled_fp8 of two": lambda: (older(2), {}),
    "scale beside the name": lambda: (rounded(FP8), {}),
    "scale of the layer": lambda: (rounded(FP8, ".scale"), {}),
    "scale of the weight": lambda: (rounded(FP8, ".weight.scale"), {}),
    "scale_weight without a mark": lambda: (rounded(FP8, ".scale_weight"), {}),
    "int8 with a scale": lambda: (rounded(INT8), {}),
}


@pytest.mark.parametrize("form", READ)
@pytest.mark.fast_cases(
    "comfy_quant, int8",
    "comfy_quant, fp8",
    "metadata",
    "scaled_fp8 behind a prefix",
    "scale of the layer",
    "int8 with a scale",
)
def test_a_file_of_8_bits_is_read_in_any_form(tmp_path, form):
    state, metadata = READ[form]()
    path = save(tmp_path, state, **metadata)
    kind = INT8 if "int8" in form else FP8
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


def test_a_scale_for_every_output_of_fp8(tmp_path):
    """As other tools write it: rows of 1 and 100 with scales of their own."""
    state = dict(STATE)
    rows = torch.linspace(1, 100, 16)
    state[f"{OUT}.weight"] = (STATE[f"{OUT}.weight"] / rows[:, None]).to(E4M3)
    state[f"{OUT}.weight_scale"] = rows.bfloat16()
    expected = state[f"{OUT}.weight"].float() * rows.bfloat16().float()[:, None]
    for dtype in ("auto", "fp32"):
        layer = load_llamagen(save(tmp_path, state), dtype).net.get_submodule(OUT)
        weight = layer.weight.float() * (layer.weight_scale if dtype == "auto" else 1)
        assert torch.equal(weight, expected) and isinstance(layer, EightBitLinear) == (dtype == "auto")


def test_weights_outside_of_the_blocks_are_read_as_numbers(tmp_path):
    state, head = dict(STATE), round_to(STATE["output.weight"], FP8)
    state |= {"output.weight": head.stored, "output.weight_scale": head.scale}
    net = load_llamagen(save(tmp_path, state)).net
    assert torch.equal(net.output.weight, head.numbers()) and dtype_of(net) == "fp32"


def test_fp8_without_scales_stays_fp8(tmp_path):
    state = STATE | {f"{layer}.weight": STATE[f"{layer}.weight"].to(E4M3) for layer in LAYERS}
    net = load_llamagen(save(tmp_path, state)).net
    layer = net.get_submodule(OUT)
    assert dtype_of(net) == FP8 and layer.weight_scale == 1
    assert torch.equal(layer.weight.float(), STATE[f"{OUT}.weight"].to(E4M3).float())


def test_scales_of_inputs_are_kept_for_a_host(tmp_path):
    state = comfy(FP8) | {f"{OUT}.input_scale": torch.tensor([0.5])}
    file = read(save(tmp_path, state))
    assert file.state[f"{OUT}.weight"].input_scale == 0.5 and not file.state[f"{OUT}.weight"].exact_input
    assert file.state["layers.0.attention.wo.weight"].exact_input, "no scale, no rounding"
    stated = comfy(FP8, full_precision_matrix_mult=True) | {f"{OUT}.input_scale": torch.tensor([0.5])}
    assert read(save(tmp_path, stated)).state[f"{OUT}.weight"].exact_input
    # A mark of two values says that products are in full precision, also where inputs have a scale.
    for count, exact in ((0, False), (2, True)):
        marked = older(count) | {f"{OUT}.scale_input": torch.tensor([0.5])}
        weight = read(save(tmp_path, marked)).state[f"{OUT}.weight"]
        assert weight.input_scale == 0.5 and weight.exact_input == exact
    assert load_llamagen(save(tmp_path, state)).net is not None, "other layers have no use for it"
    whole = comfy(INT8) | {f"{OUT}.input_scale": torch.tensor([0.5])}
    assert read(save(tmp_path, whole)).state[f"{OUT}.weight"].exact_input, "ComfyUI's int8 has no such scale"


def test_scales_may_be_in_another_shard(tmp_path):
    state = rounded(FP8)
    scales = {name: state.pop(name) for name in [*state] if name.endswith("_scale")}
    save_file(state, tmp_path / "a.safetensors", metadata=HEADS)
    save_file(scales, tmp_path / "b.safetensors")
    file = read(tmp_path, shards=[tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert kind_of(file.state[f"{OUT}.weight"]) == FP8 and file.state.keys() == STATE.keys()


def test_shards_may_each_say_what_they_hold(tmp_path):
    """As a converter writes them that works shard by shard: the same mark in both, or a table of its own weights."""
    shards = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    middle = len(LAYERS) // 2

    def write(state, *about):
        for shard, layers, entry in zip(shards, (LAYERS[:middle], LAYERS[middle:]), about, strict=True):
            own = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in layers}
            rest = state.keys() - {name for name in state if name.startswith("layers.")}
            more = {name: state[name] for name in rest} if shard is shards[0] else {}
            save_file(own | more | entry.get("mark", {}), shard, metadata=HEADS | entry.get("metadata", {}))

    mark = {"mark": {"scaled_fp8": torch.empty(0, dtype=E4M3)}}
    write(rounded(FP8, ".scale_weight"), mark, mark)
    found = read(tmp_path, shards=shards).state
    assert all(kind_of(found[f"{layer}.weight"]) == FP8 for layer in LAYERS) and "scaled_fp8" not in found

    def stating(layers):
        about = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
        return {"metadata": {"_quantization_metadata": json.dumps({"layers": dict.fromkeys(layers, about)})}}

    scales = {f"{layer}.input_scale": torch.tensor(0.5) for layer in LAYERS}
    write(rounded(FP8) | scales, stating(LAYERS[:middle]), stating(LAYERS[middle:]))
    file = read(tmp_path, shards=shards)
    assert all(file.state[f"{layer}.weight"].exact_input for layer in LAYERS), "both tables are read"
    assert "_quantization_metadata" not in file.metadata

    write(rounded(FP8), {"mark": {"twice": torch.ones(1)}}, {"mark": {"twice": torch.ones(1)}})
    with pytest.raises(UserError, match="holds twice, which another shard holds too"):
        read(tmp_path, shards=shards)


def test_what_is_left_out_is_left_out_with_its_scales(tmp_path):
    """Also if the metadata names it."""

    def skip(name: str) -> bool:
        return name == f"{OUT}.weight"

    other = comfy(FP8) | {f"{OUT}.comfy_quant": statement(format="nvfp4")}
    for state, metadata in ((comfy(FP8), {}), (other, {}), (rounded(FP8), {"_quantization_metadata": table()})):
        file = read(save(tmp_path, state, **metadata), skip=skip)
        assert file.state.keys() == STATE.keys() - {f"{OUT}.weight"}


WRONG = {
    "a scale of no weight": ({"x.weight_scale": torch.ones(())}, "a scale that belongs to no weight of 8 bits"),
    "a scale of a plain weight": (
        {"output.weight_scale": torch.ones(())},
        "a scale that belongs to no weight of 8 bits, which FastAR cannot read (output.weight_scale)",
    ),
    "a statement about a plain weight": (
        {"output.comfy_quant": statement(format="float8_e4m3fn")},
        "states float8_e4m3fn of output.weight, which is float32",
    ),
    "another format than stated": (
        {f"{OUT}.comfy_quant": statement(format="int8_tensorwise")},
        f"states int8_tensorwise of {OUT}.weight, which is float8_e4m3fn",
    ),
    "a statement that is no text": ({f"{OUT}.comfy_quant": torch.ones(3)}, "an entry that is not a short text"),
    "a statement that is no JSON": ({f"{OUT}.comfy_quant": torch.ones(3, dtype=torch.uint8)}, "cannot be read"),
    "a format that is no text": ({f"{OUT}.comfy_quant": statement(format=[])}, "in ComfyUI's format [], which"),
    "two scales": (
        {f"{OUT}.scale_weight": torch.ones(())},
        f"a scale that belongs to no weight of 8 bits, which FastAR cannot read ({OUT}.scale_weight)",
    ),
    "a scale of another shape": ({f"{OUT}.weight_scale": torch.ones(16, 2)}, "a scale for every block"),
    "a scale of no numbers": ({f"{OUT}.weight_scale": torch.ones(16, 2, dtype=torch.uint8)}, "MXFP8"),
    "a scale of integers": ({f"{OUT}.weight_scale": torch.ones((), dtype=torch.int32)}, "that is int32"),
    "a scale of a scale": (
        {f"{OUT}.weight_scale": torch.ones(()).to(E4M3), f"{OUT}.weight_scale_scale": torch.ones(())},
        f"1 unexpected ({OUT}.weight_scale_scale)",
    ),
    "scales of an input": ({f"{OUT}.input_scale": torch.ones(2)}, "a scale that belongs to no weight of 8 bits"),
    "an infinite scale": ({f"{OUT}.weight_scale": torch.tensor(float("inf"))}, "NaN or infinite weights"),
    "an unknown key": ({f"{OUT}.weight_zero": torch.ones(())}, f"1 unexpected ({OUT}.weight_zero)"),
    "the scale of a bias": ({f"{OUT}.bias_scale": torch.ones(())}, f"1 unexpected ({OUT}.bias_scale)"),
}


@pytest.mark.fast_cases(every=3)
@pytest.mark.parametrize("what", WRONG)
def test_further_keys_are_accepted_for_their_own_layers_only(tmp_path, what):
    more, words = WRONG[what]
    assert load_llamagen(save(tmp_path, comfy(FP8))) is not None
    with pytest.raises(UserError) as error:
        load_llamagen(save(tmp_path, comfy(FP8) | more))
    assert words in str(error.value) and str(error.value).startswith("checkpoint: "), error.value
    assert "x.safetensors" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{}", "[]", '{"layers": 3}', '{"layers": {"a": 3}}', "{"])
def test_metadata_that_does_not_fit(tmp_path, text):
    with pytest.raises(UserError, match="^checkpoint: "):
        load_llamagen(save(tmp_path, rounded(FP8), _quantization_metadata=text))


def test_int8_without_a_scale_is_no_weight(tmp_path):
    state = STATE | {f"{OUT}.weight": STATE[f"{OUT}.weight"].to(torch.int8)}
    with pytest.raises(UserError, match=f"int8 and no plain weights in {OUT}.weight"):
        load_llamagen(save(tmp_path, state))


def test_the_tensors_of_the_file_are_not_kept(tmp_path):
    path = save(tmp_path, comfy(INT8))
    net = load_llamagen(path).net
    expected = round_to(STATE[f"{OUT}.weight"], INT8).stored
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(net.get_submodule(OUT).weight, expected)


# ------------------------------------------------------------------------------------------------ samplers


@pytest.mark.parametrize("kind", [INT8, FP8])
@pytest.mark.parametrize("sampler", ["mar", "fasthybrid", "lazymar"])
@pytest.mark.fast_cases("mar-int8")
def test_mar_samplers(demo, sampler, kind):
    entry, found = find(sampler), {}
    for dtype in ("fp32", kind):
        model = load_mar(demo / "mar.safetensors", dtype)
        settings = make(entry.settings, {"steps": 8, "diffusion_steps": 10, "temperature": 0.0})
        with torch.inference_mode():
            found[dtype] = finish(entry.run(model, from_ids([0, 3]), settings, PairedNoise(7, range(2))))
    a, b = found["fp32"].latents, found[kind].latents
    # Another image, or the same; not noise. Two images of other seeds differ by 1.2 to 1.4 of their norm.
    assert 0 < (a - b).norm() < 0.8 * a.norm()
    assert found[kind].report.note.startswith(f"{kind} weights") and not found["fp32"].report.note
    assert found[kind].report.dtype == kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INT8, FP8])
def test_image_of_a_batch_equals_the_image_alone(demo, kind):
    model, entry = load_llamagen(demo / "llamagen-low.safetensors", kind), find("llamagen")
    with torch.inference_mode():
        made = [
            finish(entry.run(model, from_ids(ids), make(entry.settings, {}), PairedDraws(7, at)))
            for ids, at in (([1, 5], range(2)), ([5], range(1, 2)))
        ]
    assert torch.equal(made[0].latents[1:], made[1].latents)
    assert made[0].report.note.startswith(f"{kind} weights")
