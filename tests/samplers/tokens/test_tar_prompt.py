"""Prompts to semantic codes: against a slow reference loop,
single settings, batches, unusual prompts, and the de-tokenizer.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_tar
from fastar_nodes.networks.llama import cache_bytes
from fastar_nodes.networks.ta_tok import TATokModel
from fastar_nodes.networks.tar import TarModel
from fastar_nodes.samplers.conditioning import CodeCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.features import features_of
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.prepare import prepare
from fastar_nodes.samplers.tokens.sampling import DrawSetup, penalised, tokens_from_logits
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, TokenSampling
from fastar_nodes.samplers.tokens.tar import DETAILS, TarPromptSettings, tar_prompt
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from qwen_reference import TINY, language_logits, tiny_tar
from safetensors.torch import save_file
from tar_files import DTOK, TA_TOK, detokenizer_state, language_model, tiny_ta_tok
from token_numbers import gumbel_of
from tokens_reference import pick

PROMPTS = ("a red boat", "cat", "a red boat", "")
DRAWN = TarPromptSettings(top_k=0, top_p=1.0)


def run(model: TarModel, prompts=PROMPTS, settings: TarPromptSettings = DRAWN, seed: int = 5, images=None):
    return finish(tar_prompt(model, prompts, settings, TokenNoise(seed, images or range(len(prompts)))))


def plain(model: TarModel, prompt: str, settings: TarPromptSettings, seed: int, image: int) -> list[int]:
    """One image, without a cache: everything is computed again for every code, and values are filtered one by one."""
    scale = DETAILS.index(settings.detail)
    ids, first = model.prompt(prompt, scale), model.special.code
    draws = TokenNoise(seed, [image])
    penalty = settings.repetition_penalty or model.repetition_penalty
    codes: list[int] = []
    for k in range(model.sides[scale] ** 2):
        logits = language_logits(model.net, torch.tensor([ids]))[0, -1].tolist()[first : first + model.special.codes]
        for code in set(codes):
            logits[code] = logits[code] * penalty if logits[code] < 0 else logits[code] / penalty
        noise = gumbel_of(draws, "code", torch.tensor([k]), model.special.codes)[0, 0]
        codes.append(pick(torch.tensor(logits), settings, noise))
        ids.append(first + codes[-1])
    return codes


@pytest.mark.parametrize(
    "settings",
    [
        DRAWN,
        TarPromptSettings(),
        replace(DRAWN, top_k=3),
        replace(DRAWN, top_p=0.6, temperature=1.4),
        replace(DRAWN, repetition_penalty=2.0, temperature=0.8),
        replace(DRAWN, repetition_penalty=0.6, top_k=5, top_p=0.9, temperature=1.3),
        replace(DRAWN, entropy_temperature=1.0, repetition_penalty=2.0),
        replace(DRAWN, temperature=0.0, entropy_temperature=1.0),
        replace(DRAWN, temperature=0.0),
        replace(DRAWN, detail="169"),
        replace(DRAWN, detail="81", repetition_penalty=1.0),
    ],
)
@pytest.mark.fast_cases(2)
def test_codes_are_those_of_the_plain_loop(settings: TarPromptSettings) -> None:
    model = tiny_tar(penalty=1.3)
    got = run(model, settings=settings)
    assert got.codes.tolist() == [plain(model, text, settings, 5, i) for i, text in enumerate(PROMPTS)]


def test_what_a_run_reads_counts_and_returns() -> None:
    model = tiny_tar()
    sampler = tar_prompt(model, PROMPTS, TarPromptSettings(detail="729"), TokenNoise(1, range(4)))
    step = next(sampler)
    assert (
        (step.done, step.total) == (1, 16) and step.latents.shape == (4, 4, 4) and not torch.is_inference_mode_enabled()
    )
    out = finish(sampler)
    report = out.report
    assert (report.sampler, report.model, report.images) == ("tar-prompt", "tiny", 4)
    # Three prompts of 5 rows were read (two are the same), then every image feeds all codes but the last.
    assert report.counts["transformer_passes"] == 16 and report.counts["transformer_tokens"] == 3 * 5 + 15 * 4
    assert report.counts["cache_bytes"] == cache_bytes(model.net, 4 * (5 + model.sides[0] ** 2 - 1))
    assert report.maps["step"].shape == (4, 4, 4) and report.maps["step"][3].ravel().tolist() == list(range(16))
    assert report.settings["repetition_penalty"] == 1.0, "what was used, not what was asked for"
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert out.condition.names == PROMPTS and out.condition.size == 20
    assert all(torch.equal(a, b) for a, b in zip(out.condition.codes, out.codes, strict=True))
    out.codes.add_(1)  # an ordinary tensor, and a copy
    assert not torch.equal(out.condition.codes[0], out.codes[0])


def test_repetition_penalty_defaults_to_the_files() -> None:
    model = tiny_tar(penalty=1.8)
    by_file, by_setting = run(model), run(tiny_tar(), settings=replace(DRAWN, repetition_penalty=1.8))
    none = run(model, settings=replace(DRAWN, repetition_penalty=1.0))
    assert torch.equal(by_file.codes, by_setting.codes) and torch.equal(none.codes, run(tiny_tar()).codes)
    assert not torch.equal(by_file.codes, none.codes)
    assert by_file.report.settings["repetition_penalty"] == 1.8
    logits, seen = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[True, True, False, False]])
    assert penalised(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_a_code_is_penalised_behind_its_cell_only() -> None:
    """Neither the guess in a cell nor those behind it count, nor the zero of a cell that holds nothing yet."""
    noise = TokenNoise(1, (0,)).stream("code", 3, torch.device("cpu"))
    setup = DrawSetup(TokenSampling(temperature=0.0), images=1, cell_noise=noise, penalty=2.0)

    # Cells 0, 1 and 2, which hold the codes 0, 1 and 2; padding behind them.
    tokens = torch.tensor([[0, 1, 2, 0]])
    logits = torch.tensor([[[2.0, 1.9, 0.0], [2.0, 1.9, 0.97], [1.9, 1.9, 0.97]]])
    # Halved are no code, then 0, then 0 and 1.
    assert tokens_from_logits(setup, logits, torch.arange(3), tokens).tolist() == [[0, 1, 2]]
    assert tokens_from_logits(setup, logits, torch.tensor([[0, 1, 2]]), tokens).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("prompts", [[], (), "a red boat", [3], [["x"]], [None]])
def test_what_is_no_list_of_prompts_is_refused(prompts) -> None:
    with pytest.raises(UserError, match="^text: "):
        next(tar_prompt(tiny_tar(), prompts, DRAWN, TokenNoise(0, range(max(1, len(prompts))))))


def test_prompts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="^text: .* 2 images"):
        next(tar_prompt(tiny_tar(), ["a", "b"], DRAWN, TokenNoise(0, range(3))))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> TarModel:
    return load_tar(language_model(tmp_path_factory.mktemp("models") / "tar"))


@pytest.mark.parametrize(
    "text", ["", "   ", "\n\n", "🙂👩‍🚀", "\ud83d", "<im_start><S0><I3><|im_end|>", "\0", "猫", "a\tb\r\nc"]
)
def test_prompts_of_every_kind(loaded: TarModel, text: str) -> None:
    settings = replace(DRAWN, detail="169")
    out = run(loaded, [text], settings)
    assert out.codes.shape == (1, 4) and 0 <= int(out.codes.min()) and int(out.codes.max()) < 20
    assert out.codes[0].tolist() == plain(loaded, text, settings, 5, 0)


def test_a_very_long_prompt(loaded: TarModel) -> None:
    text = ("a red boat at sunset. " * 500)[:10_000]
    with pytest.raises(UserError, match=r"^text: .* 2\d\d\d tokens .* 60; "):
        run(loaded, [text], replace(DRAWN, detail="169"))
    # A model with the official room reads all of it.
    roomy = tiny_tar(replace(TINY, positions=32768))
    assert run(roomy, [text], replace(DRAWN, detail="81")).codes.shape == (1, 1)


def parts(tmp_path: Path):
    config = replace(DTOK, absolute=16 + 16 - 1)
    save_file(detokenizer_state(config), tmp_path / "d.safetensors", metadata={"heads": "2", "grid": "4"})
    # The language model writes 20 codes.
    return TATokModel(tiny_ta_tok(replace(TA_TOK, codes=20)), "ta"), tmp_path / "d.safetensors"


def test_codes_become_features_and_a_picture(tmp_path: Path) -> None:
    ta_tok, path = parts(tmp_path)
    prompted = run(tiny_tar())
    model = load_detokenizer(path, ta_tok=ta_tok)
    draws = TokenNoise(5, range(4))
    made = finish(llamagen(model, prompted.condition, LlamaGenSettings(), draws))
    features = features_of(prompted.condition, ta_tok)
    assert features.names == PROMPTS and all(f.shape == (16, 24) and not f.requires_grad for f in features.features)
    for codes, rows in zip(prompted.codes, features.features, strict=True):
        torch.testing.assert_close(rows, ta_tok.net.features(codes[None])[0], rtol=0, atol=0)
    by_hand = finish(llamagen(load_detokenizer(path), features, LlamaGenSettings(), draws))
    assert torch.equal(made.latents, by_hand.latents) and made.latents.shape == (4, 4, 4)
    # Fewer codes stand in fewer rows, at the same network.
    short = run(tiny_tar(), settings=replace(DRAWN, detail="169")).condition
    few = finish(llamagen(model, short, LlamaGenSettings(), draws))
    assert few.latents.shape == (4, 4, 4) and not torch.equal(few.latents, made.latents)
    same = CodeCondition((prompted.codes[0], prompted.codes[0].clone()), ("x", "y"))
    first, second = features_of(same, ta_tok).features
    assert first is second


def codes(*images, size: int = 0) -> CodeCondition:
    return CodeCondition(tuple(torch.tensor(x, dtype=torch.int64) for x in images), ("",) * len(images), size=size)


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        (codes([0] * 16, size=65536), "codebook of 65536"),
        (codes([0, 1, 2, 20]), "code 20 "),
        (codes([0], [20]), "code 20 "),
        (codes([0, -1, 2, 3]), "code -1 "),
        (codes([-1], [3]), "code -1 "),
        (codes([0, 1, 2]), "3 codes do not form a square"),
        (codes(), "no image"),
        (codes([]), "neither features nor codes"),
        (codes([0], []), "neither features nor codes"),
        (codes([0] * 4, [0] * 16), "codes, 4 to 16;"),
    ],
)
@pytest.mark.fast_cases(5)
def test_codes_that_do_not_fit_are_refused(tmp_path: Path, condition: CodeCondition, found: str) -> None:
    ta_tok, path = parts(tmp_path)
    with pytest.raises(UserError, match=f"^condition: .*{found}"):
        prepare(load_detokenizer(path, ta_tok=ta_tok), condition, torch.device("cpu"))


def test_the_first_and_the_last_code_fit(tmp_path: Path) -> None:
    ta_tok, path = parts(tmp_path)
    fits = codes([0] * 16, [19] * 16, size=20)
    assert prepare(load_detokenizer(path, ta_tok=ta_tok), fits, torch.device("cpu")).entries.shape == (2, 16, 24)


def test_a_detokenizer_without_its_ta_tok_says_so(tmp_path: Path) -> None:
    _, path = parts(tmp_path)
    with pytest.raises(UserError, match="^condition: .*TA-Tok"):
        prepare(load_detokenizer(path), run(tiny_tar()).condition, torch.device("cpu"))


def test_a_single_code_needs_no_window() -> None:
    one, windowed = (run(tiny_tar(sides=(1,)), settings=replace(DRAWN, parallel=n)) for n in (0, 4))
    assert torch.equal(one.codes, windowed.codes) and one.report.counts == windowed.report.counts
