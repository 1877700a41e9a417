"""TA-Tok: against a slow plain one, the official names, pooling and resizing, and what of a file is not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.networks import ta_tok
from fastar_nodes.model_loaders.networks.ta_tok import SimVQ, TATok, TATokConfig, TATokModel, unused
from tar_files import OF_CODES, tiny_ta_tok
from tar_files import TA_TOK as TINY
from torch import Tensor

OFFICIAL = TATokConfig(
    width=1152,
    code_width=1536,
    codes=65536,
    depth=3,
    heads=12,
    hidden=3072,
    places=16,
    encoder_depth=26,
    encoder_heads=16,
    encoder_hidden=4304,
    patch=14,
    side=27,
    input_size=384,
)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def layer_names(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for part in ("k", "v", "q", "out"):
        out |= {
            f"{prefix}self_attn.{part}_proj.weight": (width, width),
            f"{prefix}self_attn.{part}_proj.bias": (width,),
        }
    for n in (1, 2):
        out |= {f"{prefix}layer_norm{n}.{w}": (width,) for w in ("weight", "bias")}
    out |= {f"{prefix}mlp.fc1.weight": (hidden, width), f"{prefix}mlp.fc1.bias": (hidden,)}
    return out | {f"{prefix}mlp.fc2.weight": (width, hidden), f"{prefix}mlp.fc2.bias": (width,)}


def head_names(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The attention-pool head, which nothing uses."""
    out: dict[str, tuple[int, ...]] = {f"{prefix}head.probe": (1, 1, width)}
    out |= {
        f"{prefix}head.attention.in_proj_weight": (3 * width, width),
        f"{prefix}head.attention.in_proj_bias": (3 * width,),
    }
    out |= {
        f"{prefix}head.attention.out_proj.weight": (width, width),
        f"{prefix}head.attention.out_proj.bias": (width,),
    }
    out |= {f"{prefix}head.layernorm.{w}": (width,) for w in ("weight", "bias")}
    out |= {f"{prefix}head.mlp.fc1.weight": (hidden, width), f"{prefix}head.mlp.fc1.bias": (hidden,)}
    return out | {f"{prefix}head.mlp.fc2.weight": (width, hidden), f"{prefix}head.mlp.fc2.bias": (width,)}


def official_names(c: TATokConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the official file, written down from its layout."""
    e, d, w = "encoder.", "decoder.vision_model.", c.width
    out: dict[str, tuple[int, ...]] = {
        f"{e}embeddings.patch_embedding.weight": (w, 3, c.patch, c.patch),
        f"{e}embeddings.patch_embedding.bias": (w,),
        f"{e}embeddings.position_embedding.weight": (c.side**2, w),
        f"{d}embeddings.patch_embedding.weight": (w, c.code_width),
        f"{d}embeddings.patch_embedding.bias": (w,),
        f"{d}embeddings.position_embedding.weight": (c.places**2, w),
        "bottleneck.in_linear.weight": (c.code_width, w),
        "bottleneck.in_linear.bias": (c.code_width,),
        "bottleneck.regularizer.embedding.weight": (c.codes, c.code_width),
        "scale_layer.shift": (1, 3, 1, 1),
        "scale_layer.scale": (1, 3, 1, 1),
    }
    for name in ("bottleneck.out_linear", "bottleneck.regularizer.embedding_proj"):
        out |= {f"{name}.weight": (c.code_width, c.code_width), f"{name}.bias": (c.code_width,)}
    for name in ("encode_task_layer.0", "decode_task_layer.0", "decode_task_layer.2"):
        out |= {f"{name}.weight": (w, w), f"{name}.bias": (w,)}
    for prefix, layers, hidden in ((e, c.encoder_depth + 1, c.encoder_hidden), (d, c.depth, c.hidden)):
        out |= {f"{prefix}post_layernorm.{part}": (w,) for part in ("weight", "bias")}
        for n in range(layers):
            out |= layer_names(f"{prefix}encoder.layers.{n}.", w, hidden)
        out |= head_names(prefix, w, hidden)
    return out


# ---------------------------------------------------------------------------------------------- the plain one


def plain_layer(state: dict[str, Tensor], prefix: str, x: Tensor, heads: int) -> Tensor:
    """One layer on the rows of one picture, head by head."""

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ state[f"{prefix}{name}.weight"].double().T + state[f"{prefix}{name}.bias"].double()

    def norm(name: str, y: Tensor) -> Tensor:
        y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return y * state[f"{prefix}{name}.weight"].double() + state[f"{prefix}{name}.bias"].double()

    y = norm("layer_norm1", x)
    q, k, v = (linear(f"self_attn.{part}_proj", y).chunk(heads, -1) for part in "qkv")
    seen = [(q[h] @ k[h].T / q[h].shape[-1] ** 0.5).softmax(-1) @ v[h] for h in range(heads)]
    x = x + linear("self_attn.out_proj", torch.cat(seen, -1))
    z = linear("mlp.fc1", norm("layer_norm2", x))
    z = 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    return x + linear("mlp.fc2", z)


def triangle(size: int, target: int) -> Tensor:
    """What every one of ``target`` new samples takes of ``size`` old ones: a triangle as wide as the coarser grid's step."""
    step = size / target
    at = (torch.arange(target, dtype=torch.float64) + 0.5) * step - 0.5
    weight = (1 - (torch.arange(size, dtype=torch.float64) - at[:, None]).abs() / max(step, 1)).clamp(min=0)
    return weight / weight.sum(1, keepdim=True)


def plain_features(net: TATok, codes: Tensor) -> Tensor:
    """Features float64 [n, C] of one picture's codes [n]."""
    s, c = net.state_dict(), net.config

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ s[f"{name}.weight"].double().T + s[f"{name}.bias"].double()

    z = linear("bottleneck.regularizer.embedding_proj", s["bottleneck.regularizer.embedding.weight"].double()[codes])
    x = linear("bottleneck.out_linear", z / z.norm(dim=-1, keepdim=True))
    d, side = "decoder.vision_model.", round(len(codes) ** 0.5)
    table = s[f"{d}embeddings.position_embedding.weight"].double().view(c.places, c.places, -1)
    at = triangle(c.places, side)
    x = linear(f"{d}embeddings.patch_embedding", x) + torch.einsum("ia,jb,abc->ijc", at, at, table).flatten(0, 1)
    for n in range(c.depth):
        x = plain_layer(s, f"{d}encoder.layers.{n}.", x, c.heads)
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = x * s[f"{d}post_layernorm.weight"].double() + s[f"{d}post_layernorm.bias"].double()
    return linear("decode_task_layer.2", linear("decode_task_layer.0", x).tanh())


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 9])
def test_features_are_those_of_the_plain_one(side: int) -> None:
    net = tiny_ta_tok()
    codes = torch.randint(30, (2, side**2), generator=torch.Generator().manual_seed(side))
    got = net.features(codes)
    for i in range(2):
        torch.testing.assert_close(got[i].double(), plain_features(net, codes[i]), **CLOSE)
        torch.testing.assert_close(net.features(codes[i : i + 1])[0], got[i], **CLOSE)


def plain_look(net: TATok, image: Tensor) -> Tensor:
    """Features float64 [side * side, C] of the picture encoder, of one picture of the right size."""
    s, c = net.state_dict(), net.config
    x = (image.double() - 0.5) / 0.5
    weight, p = s["encoder.embeddings.patch_embedding.weight"].double().flatten(1), c.patch
    rows = [
        weight @ x[:, i * p : i * p + p, j * p : j * p + p].flatten()
        + s["encoder.embeddings.patch_embedding.bias"].double()
        for i in range(c.side)
        for j in range(c.side)
    ]
    out = torch.stack(rows) + s["encoder.embeddings.position_embedding.weight"].double()
    for n in range(c.encoder_depth):
        out = plain_layer(s, f"encoder.encoder.layers.{n}.", out, c.encoder_heads)
    return out


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_codes_are_those_of_the_plain_one(pool: int) -> None:
    net, c = tiny_ta_tok(), TINY
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    got, side = TATokModel(net, "tiny").codes(images, pool), c.side // pool
    assert got.shape == (2, side**2) and got.dtype == torch.int64
    torch.testing.assert_close(net.codes(images, pool), got, rtol=0, atol=0)
    s = {k: v.double() for k, v in net.state_dict().items()}
    book = s["bottleneck.regularizer.embedding.weight"] @ s["bottleneck.regularizer.embedding_proj.weight"].T
    book = book + s["bottleneck.regularizer.embedding_proj.bias"]
    for i in range(2):
        grid = plain_look(net, images[i]).view(c.side, c.side, -1)
        # What is left at the right and below does not count.
        boxes = [
            grid[a * pool : a * pool + pool, b * pool : b * pool + pool].mean((0, 1))
            for a in range(side)
            for b in range(side)
        ]
        z = (torch.stack(boxes) @ s["encode_task_layer.0.weight"].T + s["encode_task_layer.0.bias"]).tanh()
        z = z @ s["bottleneck.in_linear.weight"].T + s["bottleneck.in_linear.bias"]
        likeness = (z / z.norm(dim=-1, keepdim=True)) @ (book / book.norm(dim=-1, keepdim=True)).T
        best = likeness.gather(1, got[i][:, None])[:, 0]
        assert (likeness.amax(1) - best < 1e-5).all()


def test_pictures_of_any_size_are_stretched() -> None:
    net = tiny_ta_tok()
    image = torch.rand(1, 3, 23, 40, generator=torch.Generator().manual_seed(1))
    small = torch.einsum("ih,jw,bchw->bcij", triangle(23, 16), triangle(40, 16), image.double()).float()
    torch.testing.assert_close(net.encode(image), net.encode(small), **CLOSE)


def test_the_nearest_code_is_found_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    book = SimVQ(50, 6)
    book.embedding.weight.data[40] = book.embedding.weight.data[7]  # a tie: the first counts
    x = book.vectors(torch.arange(50)) * torch.rand(50, 1) * 9
    expected = torch.arange(50)
    expected[40] = 7
    for block in (1, 7, 49, 50, 4096):
        monkeypatch.setattr(ta_tok, "_BLOCK", block)
        assert torch.equal(book.nearest(x.view(5, 10, 6)), expected.view(5, 10))


# ----------------------------------------------------------------------------------------------------- names


def test_official_names_and_shapes() -> None:
    listed = official_names(OFFICIAL)
    assert len(listed) == 527 and sum(torch.Size(s).numel() for s in listed.values()) == 591_032_000 + 6
    state = {k: torch.empty(shape, device="meta") for k, shape in listed.items()}
    assert TATokConfig.from_state_dict(state) == OFFICIAL
    with torch.device("meta"):
        net = TATok(OFFICIAL)
    ours = {k: tuple(v.shape) for k, v in net.state_dict().items()}
    idle = unused(state)
    assert ours == {k: v for k, v in listed.items() if k not in idle}
    assert idle == {k for k in listed if ".head." in k or k.startswith(("encoder.post", "encoder.encoder.layers.26."))}
    # Without the encoder little more than a quarter remains.
    with torch.device("meta"):
        small = TATok(replace(OFFICIAL, encoder_depth=0))
    assert sum(p.numel() for p in small.parameters()) < 0.28 * 591_032_000


@pytest.mark.parametrize("config", [TINY, OF_CODES], ids=["whole", "codes only"])
def test_what_was_saved_from_here_is_read_again(config: TATokConfig) -> None:
    state = tiny_ta_tok(config).state_dict()
    assert not unused(state)
    assert TATokConfig.from_state_dict(state, 12, 3, 16) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 7}, "7 attention heads do not fit the width 24"),
        ({"encoder_heads": 5}, "5 attention heads of the encoder do not fit the width 24"),
        ({"encoder_heads": None}, "0 attention heads of the encoder"),
        ({"input_size": 99}, "25 positions of 3 pixels do not fit pictures of 99"),
    ],
)
def test_numbers_that_do_not_fit(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TATokConfig.from_state_dict(tiny_ta_tok().state_dict(), **{"heads": 12, "encoder_heads": 3, **change})


def test_tables_that_are_no_grid() -> None:
    for name in ("decoder.vision_model", "encoder"):
        state = tiny_ta_tok().state_dict()
        state[f"{name}.embeddings.position_embedding.weight"] = torch.ones(15, 24)
        with pytest.raises(ValueError, match="15 positions"):
            TATokConfig.from_state_dict(state, 12, 3)


def test_pictures_that_are_none() -> None:
    with pytest.raises(UserError, match="^ta_tok: half holds no picture encoder"):
        TATokModel(tiny_ta_tok(OF_CODES), "half").codes(torch.rand(1, 3, 16, 16))
    model = TATokModel(tiny_ta_tok(), "tiny")
    for shape in ((3, 16, 16), (1, 4, 16, 16), (0, 3, 16, 16)):
        with pytest.raises(UserError, match="^image: pictures have 3 channels"):
            model.codes(torch.rand(shape))
    for pool in (0, 6):
        with pytest.raises(UserError, match="^detail: "):
            model.codes(torch.rand(1, 3, 16, 16), pool)


def test_half_precision() -> None:
    net = tiny_ta_tok().to(torch.bfloat16)
    codes = net.codes(torch.rand(1, 3, 16, 16))
    assert codes.shape == (1, 25) and net.features(codes).dtype == torch.bfloat16
