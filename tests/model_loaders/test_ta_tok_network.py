"""TA-Tok: against a slow plain one, the official names, pooling and resizing, and what of a file is not used."""

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks import ta_tok
from fastar_nodes.networks.ta_tok import SimVQ, TATok, TATokConfig, TATokModel, unused
from tar_files import OF_CODES, tiny_ta_tok
from tar_files import TA_TOK as TINY
from torch import Tensor, nn

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


def siglip(c: TATokConfig, decoder: bool) -> nn.Module:
    """The vision transformer of transformers that one half of a TA-Tok is a variant of, with an attention-pool head."""
    tf = pytest.importorskip("transformers", reason="TA-Tok's two halves are compared with those of transformers")
    if decoder:
        shape = dict(num_hidden_layers=c.depth, num_attention_heads=c.heads, intermediate_size=c.hidden)
        made = tf.Siglip2VisionModel(tf.Siglip2VisionConfig(hidden_size=c.width, num_patches=c.places**2, **shape))
        net = getattr(made, "vision_model", made)  # a level of names that newer versions leave out
        net.embeddings.patch_embedding = nn.Linear(c.code_width, c.width)
        return net.eval()
    shape = dict(num_attention_heads=c.encoder_heads, intermediate_size=c.encoder_hidden, patch_size=c.patch)
    size = dict(hidden_size=c.width, num_hidden_layers=c.encoder_depth + 1, image_size=c.side * c.patch)
    made = tf.SiglipVisionModel(tf.SiglipVisionConfig(**shape, **size))
    return getattr(made, "vision_model", made).eval()


def official_names(c: TATokConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the official file."""
    w = c.width
    out: dict[str, tuple[int, ...]] = {
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
    for prefix, decoder in (("encoder.", False), ("decoder.vision_model.", True)):
        with torch.device("meta"):
            out |= {f"{prefix}{k}": tuple(v.shape) for k, v in siglip(c, decoder).state_dict().items()}
    return out


def loaded(net: TATok, decoder: bool) -> nn.Module:
    """A half of ``net`` in transformers, in float64."""
    half, prefix = siglip(net.config, decoder).double(), "decoder.vision_model." if decoder else "encoder."
    own = {k.removeprefix(prefix): v.double() for k, v in net.state_dict().items() if k.startswith(prefix)}
    assert not half.load_state_dict(own, strict=False).unexpected_keys
    return half


def plain_features(net: TATok, codes: Tensor) -> Tensor:
    """Features float64 [n, C] of one image's codes [n]."""
    s, side = {k: v.double() for k, v in net.state_dict().items()}, round(len(codes) ** 0.5)

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    z = linear("bottleneck.regularizer.embedding_proj", s["bottleneck.regularizer.embedding.weight"][codes])
    x = linear("bottleneck.out_linear", z / z.norm(dim=-1, keepdim=True))
    with torch.no_grad():
        out = loaded(net, True)(x[None], torch.ones(1, len(x), dtype=torch.int64), torch.tensor([[side, side]]))
    return linear("decode_task_layer.2", linear("decode_task_layer.0", out.last_hidden_state[0]).tanh())


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 9])
@pytest.mark.fast_cases("1", "4", "9")
def test_features_are_those_of_the_plain_one(side: int) -> None:
    net = tiny_ta_tok()
    codes = torch.randint(30, (2, side**2), generator=torch.Generator().manual_seed(side))
    got = net.features(codes)
    for i in range(2):
        torch.testing.assert_close(got[i].double(), plain_features(net, codes[i]), **CLOSE)
        torch.testing.assert_close(net.features(codes[i : i + 1])[0], got[i], **CLOSE)


def triangle(size: int, target: int) -> Tensor:
    """What every one of ``target`` new samples takes of ``size``
    old ones: a triangle as wide as the coarser grid's step.
    """
    step = size / target
    at = (torch.arange(target, dtype=torch.float64) + 0.5) * step - 0.5
    weight = (1 - (torch.arange(size, dtype=torch.float64) - at[:, None]).abs() / max(step, 1)).clamp(min=0)
    return weight / weight.sum(1, keepdim=True)


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
    with torch.no_grad():  # 16 pixels hold five whole patches of 3
        seen = loaded(net, False)(2 * images[..., :15, :15].double() - 1, output_hidden_states=True).hidden_states[-2]
    for i in range(2):
        grid = seen[i].view(c.side, c.side, -1)
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
        ({"input_size": 99}, "25 positions of 3 pixels do not fit images of 99"),
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
    with pytest.raises(UserError, match="^ta_tok: the file half .* no image encoder"):
        TATokModel(tiny_ta_tok(OF_CODES), "half").codes(torch.rand(1, 3, 16, 16))
