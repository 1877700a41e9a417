"""The language model: against that of transformers, cached against uncached, batches against single prompts."""

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.lab.training.initialise import initialise_llama
from fastar_nodes.networks.llama import HEAD, Llama, LlamaConfig, qwen_config
from qwen_reference import TINY, language_logits, tiny_qwen, tiny_tar, transformers_qwen

UNTIED = replace(TINY, tied=False)
SPAN = (20, 40)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# Prompts of unlike length; the last has one token.
PROMPTS = [[3, 7, 1, 0, 14, 2], [5, 5, 9], [11, 4, 6, 8], [2]]


@pytest.mark.parametrize(
    "config", [TINY, UNTIED, replace(TINY, kv_heads=6), replace(TINY, kv_heads=1)], ids=["tied", "untied", "MHA", "MQA"]
)
def test_logits_are_those_of_transformers(config: LlamaConfig) -> None:
    theirs, net = transformers_qwen(config), tiny_qwen(config)
    missing = theirs.load_state_dict(net.state_dict(), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {HEAD}
    theirs.tie_weights()
    ids = torch.randint(config.vocab, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(language_logits(net, ids), theirs(ids).logits, **CLOSE)


def replay(net: Llama, prompts: list[list[int]], codes: torch.Tensor, images=None, padding: int = 0) -> torch.Tensor:
    """Cached logits [B, n + 1, codes] of prompts with known codes [B, n] behind them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([p + [padding] * (longest - len(p)) for p in prompts])
    lengths = torch.tensor([len(p) for p in prompts])
    hidden, cache = net.prefill(net.prefix(ids), 9, codes.shape[1], lengths if lengths.min() < longest else None)
    if images is not None:
        hidden = hidden[images]
        cache.keep(images)
    for k in range(codes.shape[1]):
        at = torch.tensor([k])
        x = net.tok_embeddings(SPAN[0] + codes[:, k : k + 1])
        hidden = torch.cat([hidden, net.feed(x, at, at + longest, cache, longest + k + 1)], 1)
    assert all(block.shape[2] == longest + codes.shape[1] for block in cache.blocks)
    return net.logits(hidden, SPAN)


def whole(net: Llama, prompt: list[int], codes: torch.Tensor) -> torch.Tensor:
    """The same of one prompt, without a cache."""
    ids = torch.cat([torch.tensor(prompt), SPAN[0] + codes])
    return language_logits(net, ids[None], SPAN)[0, len(prompt) - 1 :]


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_a_ragged_batch_with_a_cache_is_every_prompt_alone_without(config: LlamaConfig) -> None:
    net, codes = tiny_qwen(config), torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(2))
    got = replay(net, PROMPTS, codes)
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(got[i], whole(net, prompt, codes[i]), **CLOSE)
    torch.testing.assert_close(replay(net, PROMPTS, codes, padding=37), got, rtol=0, atol=0)  # what pads is never seen


def test_images_of_one_prompt_share_its_pass() -> None:
    net, codes = tiny_qwen(), torch.randint(20, (5, 6), generator=torch.Generator().manual_seed(3))
    images = [1, 0, 1, 3, 1]
    got = replay(net, PROMPTS, codes, torch.tensor(images))
    for i, which in enumerate(images):
        torch.testing.assert_close(got[i], whole(net, PROMPTS[which], codes[i]), **CLOSE)


def test_a_span_is_a_part_of_all_logits() -> None:
    for config in (TINY, UNTIED):
        net, ids = tiny_qwen(config), torch.tensor([[1, 30, 2]])
        every = language_logits(net, ids)
        torch.testing.assert_close(language_logits(net, ids, SPAN), every[..., 20:40], rtol=1e-5, atol=1e-5)
        assert every.shape[-1] == config.vocab


def test_half_precision_keeps_logits_in_fp32() -> None:
    net = tiny_qwen().to(torch.bfloat16)
    hidden, cache = net.prefill(net.prefix(torch.tensor([[1, 2]])), 2, 3)
    assert net.logits(hidden, SPAN).dtype == torch.float32 and cache.blocks[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (qwen_config(1536, 28, 12, 2, 128, 8960, 217_206), 1_643_969_024),
        (qwen_config(3584, 28, 28, 4, 128, 18944, 217_206, tied=False), 8_082_554_368),
    ],
    ids=["Tar-1.5B", "Tar-7B"],
)
def test_official_sizes(config: LlamaConfig, parameters: int) -> None:
    with torch.device("meta"):
        net, state = Llama(config), transformers_qwen(config).state_dict()
    if config.tied:
        del state[HEAD]  # official files leave the second name out
    assert LlamaConfig.of_qwen(state) == config
    assert {k: v.shape for k, v in net.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert sum(p.numel() for p in net.parameters()) == parameters
    per_token = {1536: 28_672, 3584: 57_344}[config.dim]  # bytes of bf16, keys and values
    assert 2 * config.depth * config.kv_heads * config.head_dim * 2 == per_token


def test_shape_from_a_state_dict() -> None:
    for config in (TINY, UNTIED, replace(TINY, kv_heads=1)):
        assert LlamaConfig.of_qwen(tiny_qwen(config).state_dict(), 6, positions=64, theta=100.0) == config
    state = tiny_qwen().state_dict()
    for heads in (5, 7, 24):
        with pytest.raises(ValueError, match="; correct num_attention_heads"):
            LlamaConfig.of_qwen(state, heads)
    with pytest.raises(KeyError, match="gate_proj"):
        LlamaConfig.of_qwen({k: v for k, v in state.items() if "gate" not in k}, 6)


def test_initialisation() -> None:
    torch.manual_seed(0)
    net = initialise_llama(Llama(UNTIED))
    spread = [float(w.detach().std()) for w in (net.tok_embeddings.weight, net.output.weight)]
    assert all(0.015 < s < 0.025 for s in spread)
    assert not net.layers[0].attention.wq.bias.any() and net.norm.weight.eq(1).all()
    language_logits(net, torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_prompts_with_and_without_a_chat() -> None:
    model = tiny_tar()
    assert model.prompt("a red boat", 0) == [1, 3, 4, 15, 16] and model.prompt("", 2) == [15, 18]
    chat = replace(
        model,
        special=replace(model.special, chat=(12, 13)),
        tokenize=lambda text: [text.count("x") + 1] if text else [],
    )
    # A turn: opened, "system..." as one piece, closed, a line end; the user's with the prompt; the assistant's, opened.
    assert chat.prompt("xx", 1) == [12, 1, 13, 1, 12, 3, 13, 1, 12, 1, 15, 17]
    asked: list[str] = []
    replace(chat, tokenize=lambda text: asked.append(text) or [0]).prompt("hé\n", 0)
    assert [*dict.fromkeys(asked)] == ["system\nYou are a helpful assistant.", "\n", "user\nhé\n", "assistant\n"]


@pytest.mark.parametrize("made", [15, 16, 18, 20, 39])
def test_a_tokenizer_that_makes_marks_of_text_is_refused(made: int) -> None:
    with pytest.raises(UserError, match="^text: .* a special token of tiny"):
        replace(tiny_tar(), tokenize=lambda text: [1, made]).prompt("x", 0)


def test_prompts_that_do_not_fit() -> None:
    model = tiny_tar()
    assert len(model.prompt("a " * 46, 0)) == 48
    with pytest.raises(
        UserError,
        match="^text: .* 49 tokens .* tiny reads at most 48; shorten the prompt.$",
    ):
        model.prompt("a " * 47, 0)
    assert model.prompt("a " * 58, 1)
    with pytest.raises(UserError, match=r"^detail: tiny writes only 16 codes, so "):
        tiny_tar(sides=(4,)).prompt("a", 1)
    with pytest.raises(UserError, match="^text: the tokenizer gives token 40, .* 40"):
        replace(model, tokenize=lambda text: [40]).prompt("x", 0)
