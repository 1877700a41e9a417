"""Parity cases of Tar: AR-DTok, its VQ tokenizer, TA-Tok and its codebook, top-k and top-p filters.

A folder contains any of the files named below. ``X_io`` belongs to the weights ``X_state``; files of AR-DTok's variants
contain weights (``sd.``) and results. All sizes are read from the files. MuLo-SD has cases of its own (``mulosd.py``).
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model_loaders.files.checkpoint import read_metadata
from ...model_loaders.tar.loader import load_detokenizer
from ...networks.autoencoder import HISTORY, VQAutoencoder, VQConfig
from ...networks.llama import Llama, LlamaConfig, TokenModel
from ...networks.ta_tok import TABLE, Bottleneck, TATok, TATokConfig, TATokModel, unused
from ...samplers.conditioning import CodeCondition, FeatureCondition
from ...samplers.engine import finish
from ...samplers.tokens.canvas import token_canvas
from ...samplers.tokens.decode import decode_schedule
from ...samplers.tokens.features import features_of
from ...samplers.tokens.sampling import allowed
from ...samplers.tokens.schedule import raster
from ...samplers.tokens.settings import TokenSettings
from .cases import Case, Check, exact, gathered, read_json, read_tensors, same_shapes
from .llamagen import MultinomialNoise, replay

_GREEDY = re.compile(r"greedy_(cond4_)?cfg([\d.]+?)(?:_interval(\d+))?")
_SAMPLED = re.compile(r"sampled_cfg([\d.]+)_(?:topk(\d+)_topp(\d+)|default)_seed(\d+)")
_FILTER = re.compile(r"probs_t([\d.]+)_k(\d+)_p([\d.]+)")

Tensors = dict[str, Tensor]


def cases(folder: Path) -> list[Case]:
    """The cases whose files are in ``folder``."""
    known: dict[str, Callable[[Path], Iterable[Case]]] = {
        "ar_tiny_io": _detokenizer,
        "ar_tiny_fixedpe": _variant,
        "ar_tiny_gqa": _variant,
        "ar_tiny_class": _variant,
        "vq_tiny_io": _vq,
        "simvq_bottleneck": _codebook,
        "tatok_tiny_io": _ta_tok,
        "sampling_filter": _filters,
    }
    out: list[Case] = []

    for stem, make in known.items():
        if (path := folder / f"{stem}.safetensors").is_file():
            out += gathered(f"tar/{stem}", partial(make, path))

    if (listed := folder / "full_size_shapes.json").is_file():
        out += gathered("tar/keys", partial(_key_lists, listed))
    return out


def _weights(path: Path) -> tuple[Tensors, Path]:
    """The weights of recorded results, and their file."""
    weights = path.with_name(path.name.replace("_io", "_state"))
    if not weights.is_file():
        raise FileNotFoundError(f"{weights.name} is not beside it")
    return read_tensors(weights), weights


def _own(data: Tensors) -> Tensors:
    return {name.removeprefix("sd."): t for name, t in data.items() if name.startswith("sd.")}


# ------------------------------------------------------------------------------------------------ AR-DTok


@lru_cache(maxsize=2)
def _loaded(path: Path) -> TokenModel:
    return load_detokenizer(path, "fp32")


def _features(rows: Tensor) -> FeatureCondition:
    return FeatureCondition(tuple(rows), tuple(map(str, range(len(rows)))))


def _full(net: Llama, cond: Tensor, tokens: Tensor, grid: int) -> Tensor:
    """Logits [B, N, V] of all image tokens from one pass."""
    prefix = net.prefix(cond)
    x, rows = torch.cat([prefix, net.tok_embeddings(tokens)], 1), prefix.shape[1]
    return net(x, torch.arange(-rows, tokens.shape[1]), net.positions(grid, rows))[:, rows - 1 :]


def _detokenizer(path: Path) -> Iterator[Case]:
    io, name = read_tensors(path), path.stem.removesuffix("_io")
    weights = _weights(path)[1]

    def condition(four: bool) -> FeatureCondition:
        return _features(io["cond4" if four else "cond"])

    def full(key: str) -> Iterator[Check]:
        model, tokens = _loaded(weights), io["idx"]
        four, null = key.endswith("cond4"), key.endswith("uncond")
        cond = io["cond4"] if four else io["cond"]
        yield Check(_full(model.net, torch.zeros_like(cond) if null else cond, tokens[:, :-1], model.grid), io[key])
        # The same with the KV cache, token by token.
        yield Check(replay(model, condition(four), raster(model.grid), tokens, null), io[key])

    def generated(key: str, four: bool, settings: TokenSettings, seed: int) -> Iterator[Check]:
        model, what = _loaded(weights), condition(four)
        canvas, prepared = token_canvas("verify", model, what, settings, MultinomialNoise(seed, len(what), False))
        yield exact(finish(decode_schedule(canvas, prepared, raster(model.grid))).latents.flatten(1), io[key])

    for key in sorted(io):
        case = f"tar/{name}.{key}"
        if key.startswith("logits_full"):
            yield Case(case, partial(full, key))
        elif m := _GREEDY.fullmatch(key):
            settings = TokenSettings(cfg=float(m[2]), top_k=1, cfg_interval=int(m[3]) if m[3] else None)
            yield Case(case, partial(generated, key, bool(m[1]), settings, 0))
        elif m := _SAMPLED.fullmatch(key):
            top_p = float(f"{m[3][0]}.{m[3][1:]}") if m[3] else 1.0  # topp095 is 0.95
            settings = TokenSettings(cfg=float(m[1]), top_k=int(m[2] or 0), top_p=top_p)
            yield Case(case, partial(generated, key, False, settings, int(m[4])))


def _network(state: Mapping[str, Tensor], heads: int) -> Llama:
    net = Llama(LlamaConfig.of_llamagen(state, heads))
    net.load_state_dict(dict(state))
    return net.eval()


def _heads(path: Path) -> int:
    """Head count of the variants, from the base weights in the same folder."""
    plain = path.with_name("ar_tiny_state.safetensors")
    return int(json.loads(read_metadata(plain).get("config", "{}")).get("n_head", 4))


def _variant(path: Path) -> Iterator[Case]:
    data = read_tensors(path)

    def checks() -> Iterator[Check]:
        state = _own(data)
        net, tokens, cond = _network(state, _heads(path)), data["idx"], data["cond"]
        expected = data["logits"]
        grid = int(expected.shape[1] ** 0.5)
        yield Check(_full(net, cond, tokens, grid), expected)
        model = TokenModel(net, path.stem, grid)

        # The reference does not support this with fewer key heads. The last token is not an input.
        yield Check(
            replay(model, _features(cond), raster(grid), torch.cat([tokens, tokens[:, -1:]], 1), False), expected
        )

    yield Case(f"tar/{path.stem}", checks)


# ------------------------------------------------------------------------------------------------ VQ, TA-Tok


def _vq(path: Path) -> Iterator[Case]:
    io, name = read_tensors(path), path.stem.removesuffix("_io")
    state = _weights(path)[0]

    @lru_cache(maxsize=1)
    def made() -> VQAutoencoder:
        net = VQAutoencoder(VQConfig.from_state_dict(state))
        net.load_state_dict(state)
        return net.eval()

    def encode() -> Iterator[Check]:
        net = made()
        yield Check(net.features(io["x"]), io["prequant"])
        vectors, codes = net.encode(io["x"])
        yield exact(codes, io["indices"])
        yield Check(vectors, io["quant"])
        yield Check(net.decode(vectors), io["decoded"])

    def decode() -> Iterator[Check]:
        net = made()
        yield Check(net.vectors(io["rand_codes"]), io["rand_entry"])
        yield Check(net.decode_codes(io["rand_codes"]), io["rand_decoded"])

    yield Case(f"tar/{name}.encode", encode)
    yield Case(f"tar/{name}.decode", decode)


def _codebook(path: Path) -> Iterator[Case]:
    data = read_tensors(path)

    def checks() -> Iterator[Check]:
        state = _own(data)
        (code_width, width), codes = state["in_linear.weight"].shape, len(state["regularizer.embedding.weight"])
        net = Bottleneck(width, code_width, codes, encoding=True)
        net.load_state_dict(state)
        yield Check(net.regularizer.vectors(torch.arange(codes)), data["emb"])
        yield Check(net.in_linear(data["feat"]), data["projected_z"])
        yield exact(net.codes(data["feat"]), data["indices"])
        yield Check(net.regularizer.vectors(data["indices"]), data["regularized_z"])
        yield Check(net.decode(data["indices"]), data["output"])
        yield Check(net.regularizer.vectors(data["codes"]), data["codes_entry"])
        yield Check(net.decode(data["codes"]), data["codes_decoded"])

    yield Case(f"tar/{path.stem}", checks)


def _ta_tok(path: Path) -> Iterator[Case]:
    io, name = read_tensors(path), path.stem.removesuffix("_io")
    state = _weights(path)[0]
    about = path.with_name("tiny_siglip") / "config.json"
    heads = read_json(about)["vision_config"]["num_attention_heads"] if about.is_file() else None

    @lru_cache(maxsize=1)
    def made() -> TATokModel:
        net = TATok(TATokConfig.from_state_dict(state, encoder_heads=heads))
        idle = unused(state)
        net.load_state_dict({key: t for key, t in state.items() if key not in idle})
        return TATokModel(net.eval(), name)

    def encode(pool: int) -> Iterator[Check]:
        model = made()
        if pool == 1:
            yield Check(model.net.encode(io["img"]), io["hidden_m2"])
        yield Check(model.net.pooled(io["img"], pool), io[f"vq_feats_ps{pool}"])
        yield exact(model.codes(io["img"], pool), io[f"indices_ps{pool}"])

    def decoded(pool: int) -> Iterator[Check]:
        codes = io[f"indices_ps{pool}"]
        computed = torch.stack(features_of(CodeCondition(tuple(codes), ("",) * len(codes)), made()).features)
        yield Check(computed, io[f"decoded_from_indices_ps{pool}"])
        yield Check(computed, io[f"rec_ps{pool}"])

    def other_size() -> Iterator[Check]:
        yield exact(made().codes(io["img_big"]), io["indices_big"])

    for pool in sorted(int(key.removeprefix("indices_ps")) for key in io if key.startswith("indices_ps")):
        yield Case(f"tar/{name}.encode.pool{pool}", partial(encode, pool))
        yield Case(f"tar/{name}.decode.pool{pool}", partial(decoded, pool))

    if "img_big" in io:
        yield Case(f"tar/{name}.encode.resized", other_size)


# ------------------------------------------------------------------------------------------------ sampling, names


def _filters(path: Path) -> Iterator[Case]:
    io = read_tensors(path)

    def checks(key: str, temperature: float, top_k: int, top_p: float) -> Iterator[Check]:
        yield Check(allowed(io["logits"] / temperature, top_k, top_p).softmax(-1), io[key])

    for m in filter(None, map(_FILTER.fullmatch, sorted(io))):
        chosen = partial(checks, m[0], float(m[1]), int(m[2]), float(m[3]))
        yield Case(f"tar/{path.stem}.{m[0].removeprefix('probs_')}", chosen)


def _key_lists(path: Path) -> Iterator[Case]:
    """Names and shapes of the official files, and what follows from them."""

    def checks(about: Mapping[str, Any]) -> Iterator[Check]:
        shapes = {key: shape for key, (shape, _) in about["tensors"].items()}
        # Buffers are listed but not counted.
        weights = [shape for key, shape in shapes.items() if key != HISTORY and not key.startswith("scale_layer.")]
        yield exact(torch.tensor(sum(map(math.prod, weights))), torch.tensor(about["params"]))
        configs: list[LlamaConfig] = []

        def make(state: dict[str, Tensor]) -> torch.nn.Module:
            if TABLE in state:
                return TATok(TATokConfig.from_state_dict(state))
            if "tok_embeddings.weight" not in state:
                return VQAutoencoder(VQConfig.from_state_dict(state))
            configs.append(LlamaConfig.of_llamagen(state))
            return Llama(configs[0])

        yield same_shapes(shapes, make, unused(shapes) if TABLE in shapes else (HISTORY,))

        for config in configs:
            stated = about["INFERRED_args"]
            length = stated["max_seq_len"] + stated["cls_token_num"] - 1
            yield exact(torch.tensor([config.heads, config.absolute]), torch.tensor([stated["n_head"], length]))

    for name, about in read_json(path).items():
        yield Case(f"tar/keys.{name}", partial(checks, about))
