"""The text encoder: every layout of files, features without padding, and what is wrong in one sentence."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.llamagen import text
from fastar_nodes.model_loaders.llamagen.captions import clean
from fastar_nodes.model_loaders.llamagen.text import load_text_encoder
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is not installed: the text encoder cannot be tested here")

import seeds  # noqa: E402

WIDTH = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face lays it out: a tiny random T5, with weights of a decoder, and a
    tokenizer of six words.
    """
    folder = seeds.write_t5(tmp_path_factory.mktemp("models") / "t5-tiny")
    decoder = {"decoder.final_layer_norm.weight": torch.ones(WIDTH), "lm_head.weight": torch.ones(120, WIDTH)}
    save_file(load_file(folder / "model.safetensors") | decoder, folder / "model.safetensors")
    return folder


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "t5")
    return tmp_path / "t5"


def test_features_are_those_of_the_padded_batch(model: Path) -> None:
    """The reference pads to 120 and masks; what the mask leaves is what is returned."""
    encoder = load_text_encoder(model)
    assert (encoder.width, encoder.name) == (WIDTH, "t5-tiny")
    texts = ["A Red <b>boat</b>", "", "small cat " * 100, "A Red <b>boat</b>"]
    out = encoder.encode(texts)
    # A word, and for T5's own tokenizer perhaps a piece before it; in any case an end mark.
    assert len(out[1]) == 1 and len(out[2]) == text.MAX_TOKENS and 1 < len(out[0]) < 9
    assert out[0] is out[3] and all(f.dtype == torch.float32 and not f.requires_grad for f in out)
    ids = [encoder.tokens(t) for t in texts]
    assert all(i[-1] == 1 for i in ids) and ids[0] == encoder.tokens(clean(texts[0]))
    padded = torch.tensor([i + [0] * (text.MAX_TOKENS - len(i)) for i in ids])
    mask = torch.tensor([[1] * len(i) + [0] * (text.MAX_TOKENS - len(i)) for i in ids])
    with torch.no_grad():
        whole = encoder.net(input_ids=padded, attention_mask=mask).last_hidden_state
    for i, features in enumerate(out):
        torch.testing.assert_close(features, whole[i, : len(features)], rtol=1e-5, atol=1e-5)


def test_weights_are_the_files(model: Path) -> None:
    stored, encoder = load_file(model / "model.safetensors"), load_text_encoder(model)
    for name, value in encoder.net.state_dict().items():
        assert torch.equal(value, stored["shared.weight" if "embed_tokens" in name else name]), name
    assert encoder.net.encoder.embed_tokens.weight is encoder.net.shared.weight
    assert not encoder.net.training and not any(p.requires_grad or p.is_meta for p in encoder.net.parameters())


def test_dtype(model: Path) -> None:
    assert load_text_encoder(model, "bf16").encode(["cat"])[0].dtype == torch.bfloat16
    for name in ("fp16", "fp8"):
        with pytest.raises(UserError, match="^dtype: "):
            load_text_encoder(model, name)


def shards(folder: Path) -> None:
    """The weights in two numbered files."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    for i, part in enumerate((names[:20], names[20:]), 1):
        save_file({k: state[k] for k in part}, folder / f"model-0000{i}-of-00002.safetensors")


def test_layouts(copy: Path, tmp_path: Path) -> None:
    whole = load_text_encoder(copy).encode(["red cat"])[0]
    # A single file of the encoder alone, whose embedding has its other name, and a tokenizer elsewhere.
    state = load_file(copy / "model.safetensors")
    alone = {k: v for k, v in state.items() if k.startswith("encoder.")}
    save_file({**alone, "encoder.embed_tokens.weight": state["shared.weight"]}, tmp_path / "alone.safetensors")
    encoder = load_text_encoder(tmp_path / "alone.safetensors", tokenizer=copy)
    assert encoder.name == "alone" and torch.equal(encoder.encode(["red cat"])[0], whole)
    shards(copy)
    for path in (copy, copy / "model-00002-of-00002.safetensors"):
        encoder = load_text_encoder(path)
        assert encoder.name == "t5" and torch.equal(encoder.encode(["red cat"])[0], whole)
    for i in (1, 2):
        file = copy / f"model-0000{i}-of-00002.safetensors"
        torch.save(load_file(file), copy / f"pytorch_model-0000{i}-of-00002.bin")
        file.unlink()
    assert torch.equal(load_text_encoder(copy).encode(["red cat"])[0], whole)


def fails(path: Path, words: str, **arguments: object) -> None:
    with pytest.raises(UserError, match=f"^encoder: .*{words}") as error:
        load_text_encoder(path, **arguments)
    assert "\n" not in str(error.value)


def change(folder: Path, how) -> None:
    state = load_file(folder / "model.safetensors")
    how(state)
    save_file(state, folder / "model.safetensors")


Q, BIAS = (
    "encoder.block.0.layer.0.SelfAttention.q.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda s: s.pop("encoder.final_layer_norm.weight"), r"1 weight missing \(encoder.final_layer_norm.weight\)"),
        (lambda s: s.pop("shared.weight"), "embed_tokens.weight is missing"),
        (lambda s: s.pop(BIAS), "relative_attention_bias.weight is missing"),
        (lambda s: s.update({BIAS: torch.ones(3)}), "does not fit a T5 text encoder"),
        (lambda s: s.update({Q: torch.ones(12, 9)}), "wrong shape"),
        (lambda s: s.update({"encoder.extra": torch.ones(1)}), r"1 weight unexpected \(encoder.extra\)"),
        (lambda s: s.update({"shared.weight": torch.ones(5, WIDTH)}), "has 5 tokens"),
        (lambda s: s[Q].fill_(float("nan")), "NaN or infinite weights in"),
    ],
)
def test_what_does_not_fit(copy: Path, how, words: str) -> None:
    change(copy, how)
    fails(copy, words)


def test_the_other_family(copy: Path, root: Path) -> None:
    shutil.copy(root / "tests" / "parity" / "vq" / "vq8_tiny.safetensors", copy / "model.safetensors")
    fails(copy, "holds a VQ autoencoder, not a T5 text encoder")
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1])
    fails(copy, "is damaged or cut short")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails(tmp_path, "needs the Python package transformers.*pip install transformers")


def test_the_components_of_official_tokenizers(copy: Path) -> None:
    """Files written by old and new versions of transformers."""
    spec = json.loads((copy / "tokenizer.json").read_text())
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
    replace = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [strip, replace]}
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    load_text_encoder(copy)


def configure(folder: Path, **fields: object) -> Path:
    """A configuration as transformers writes it for this network, with fields changed."""
    usual = {"d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_heads": 3, "num_layers": 2, "vocab_size": 120}
    known = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True, "dropout_rate": 0.1}
    (folder / "config.json").write_text(json.dumps({**usual, **known, "model_type": "t5", **fields}))
    return folder


def test_the_configuration_is_read(copy: Path) -> None:
    usual = load_text_encoder(copy).encode(["red cat"])[0]
    assert torch.equal(load_text_encoder(configure(copy)).encode(["red cat"])[0], usual)
    changed = load_text_encoder(configure(copy, layer_norm_epsilon=0.5, relative_attention_max_distance=9))
    assert changed.net.encoder.final_layer_norm.variance_epsilon == 0.5
    assert changed.net.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance == 9
    assert not torch.equal(changed.encode(["red cat"])[0], usual)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_kv", 8),
        ("d_ff", 25),
        ("num_heads", 4),
        ("num_layers", 3),
        ("vocab_size", 119),
        ("relative_attention_num_buckets", 16),
        ("feed_forward_proj", "gated-silu"),
        ("feed_forward_proj", "relu"),
        ("dense_act_fn", "silu"),
        ("layer_norm_epsilon", "small"),
        ("relative_attention_max_distance", 0),
    ],
)
def test_a_configuration_of_another_network(copy: Path, field: str, value: object) -> None:
    fails(configure(copy, **{field: value}), f"t5 (has|states) {field} = ")


def test_the_configuration_beside_a_file_of_its_own_name_is_another_models(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "t5xxl.safetensors")
    load_text_encoder(configure(copy, d_kv=8) / "t5xxl.safetensors")


def test_an_id_outside_the_table(copy: Path) -> None:
    """The vocabulary has few words, and one of them a high number."""
    words = {"<pad>": 0, "</s>": 1, "cat": 2, "boat": 500}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "cat"}
    tokenizer = {"model": model, "added_tokens": [{"id": 1, "content": "</s>"}]}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    encoder = load_text_encoder(copy)
    encoder.encode(["cat"])
    with pytest.raises(UserError, match="^text: the tokenizer gives token 500, .* 120"):
        encoder.encode(["boat"])
