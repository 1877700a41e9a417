"""Rules of loading.py and of planning a run, on stand-ins for models, with results worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.cli import models, planning
from fastar_nodes.cli.planning import Planned, assigned, by_key, measured_against, plan, split_samplers, usual_samplers
from fastar_nodes.errors import UserError
from fastar_nodes.networks.autoencoder import Codebook, VQModel
from fastar_nodes.reports.record import Report
from fastar_nodes.runs import drawing, loading
from fastar_nodes.runs.choice import ModelFacts, parse_choice
from fastar_nodes.runs.families.masked import MARFamily
from fastar_nodes.runs.loading import AUTO, Drafts, Ready, Source, defaults
from fastar_nodes.runs.registry import FAMILIES, HYBRID, LLAMAGEN, MAR, SAMPLERS, TAR


def mar(channels=16, patch=1, **about):
    tokens = about.pop("tokens", 256)
    dim = about.pop("dim", 768)
    config = SimpleNamespace(channels=channels, tokens=tokens, grid=math.isqrt(tokens), dim=dim)
    usual = {"name": "a MAR", "family": "mar", "condition": "class", "label_set": "", "max_beta": 0.999}
    return SimpleNamespace(net=SimpleNamespace(config=config), patch=patch, **usual | about)


def decoder(channels):
    return SimpleNamespace(name="a KL", net=SimpleNamespace(config=SimpleNamespace(z_channels=channels)))


@pytest.mark.parametrize(("channels", "patch", "reads"), [(16, 1, 16), (64, 2, 16), (36, 3, 4)])
def test_channels_of_a_token_are_divided_by_the_patch_squared(channels, patch, reads):
    FAMILIES[MAR].expect_decoder(decoder(reads), mar(channels, patch))
    for other in (reads // 2, reads * 2):
        words = f"^decoder: a KL decodes {other} latent channels, .* {reads};"
        with pytest.raises(UserError, match=words):
            FAMILIES[MAR].expect_decoder(decoder(other), mar(channels, patch))


def test_recommended_settings():
    """A MAR takes 64 AR steps, never more than it has tokens;
    Harmon 64 and UniPic, whose largest beta is below 0.5, 32.
    """
    assert defaults(Ready(MAR, mar())) == {"steps": 64}
    assert defaults(Ready(MAR, mar(tokens=16))) == {"steps": 16}
    assert defaults(Ready(MAR, mar(label_set="picture-book"))) == {"steps": 32}
    stated = Ready(MAR, mar(tokens=16), metadata={"defaults": '{"steps": 12, "cfg": 2.5}'})
    assert defaults(stated) == {"steps": 12, "cfg": 2.5}
    published = {"diffusion_steps": 100, "cfg": 3.0, "cfg_schedule": "constant", "temperature": 1.0}
    for beta, steps in ((0.999, 64), (0.5, 64), (0.1, 32)):
        assert defaults(Ready(HYBRID, mar(condition="prompt", max_beta=beta))) == {**published, "steps": steps}


class Doubled(torch.nn.Module):
    """A decoder of codes whose pixels are the first channel of the code vectors."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def vectors(self, codes):
        return codes

    def decode(self, latents):
        return latents[:, :1].repeat(1, 3, 1, 1)


def test_pixels_are_rounded():
    """(x + 1) * 127.5 of -1, -0.996, 0, 0.502, 1 and beyond: 0, 0.51, 127.5 (to even), 191.505, 255."""
    values = torch.tensor([-1.5, -1.0, -0.996, -0.9965, 0.0, 0.502, 0.9945, 1.0, 7.0])
    made = SimpleNamespace(latents=values.reshape(1, 1, 3, 3), report=Report("llamagen", "m", {}, 7, 1, "cpu"))
    ready = Ready(LLAMAGEN, mar(), VQModel(Doubled(), "doubled"))
    pictures = drawing.decode(ready, made)
    assert pictures.dtype == torch.uint8 and pictures.shape == (1, 3, 3, 3)
    assert pictures[0, ..., 0].flatten().tolist() == [0, 0, 1, 0, 128, 192, 254, 255, 255]
    assert made.report.counts == {"decoder_passes": 1} and "decoder" in made.report.phases


def book(rows):
    quantize = Codebook(len(rows), len(rows[0]))
    quantize.embedding.weight.data = torch.tensor(rows)
    return VQModel(SimpleNamespace(quantize=quantize), "book")


def test_code_vectors_are_compared_by_direction():
    """Loaders store them normalised or not; a direction that differs by 0.6 is another code."""
    loading.expect_same_codes(book([[3.0, 4.0], [0.0, 2.0]]), book([[0.6, 0.8], [0.0, 1.0]]), "target")
    for other in ([[0.8, 0.6], [0.0, 1.0]], [[0.6, 0.8]]):
        with pytest.raises(UserError, match="^draft: .*\\(book\\) .*target \\(book\\)"):
            loading.expect_same_codes(book([[3.0, 4.0], [0.0, 2.0]]), book(other), "target")


def test_drafts_are_kept_by_family_and_choice_and_have_the_targets_grid(monkeypatch):
    loaded = []

    def load(family, path, source, grid=None):
        loaded.append((family, path, grid))
        return object()

    monkeypatch.setattr(loading, "_load_model", load)
    source = Source(lambda choice, family: f"{family}/{choice}", torch.device("cpu"))
    target = Ready(MAR, mar(), choice="demo")
    drafts = Drafts(source, "small", "demo")
    first = drafts.load("cspd", target)
    assert drafts.load("cspd+lazymar", target) is first
    assert drafts.load("cspd", Ready(HYBRID, mar(condition="prompt"))) is not first
    assert loaded == [(MAR, "mar/small", 16), (HYBRID, "hybrid/small", 16)]


def test_two_targets_have_a_draft_each(monkeypatch):
    monkeypatch.setattr(loading, "_load_model", lambda family, path, source, grid=None: path)
    monkeypatch.setattr(loading.hub, "draft_for", lambda choice: f"draft of {choice}")
    drafts = Drafts(Source(lambda choice, family: choice, torch.device("cpu")), AUTO, "x")
    assert [drafts.load("cspd", Ready(MAR, mar(), choice=c)) for c in "ab"] == ["draft of a", "draft of b"]


def test_the_decoder_that_a_file_states_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "_load_model", lambda *_: mar())
    monkeypatch.setattr(loading.ck, "read_metadata", lambda path: {"decoder": "stated"})
    monkeypatch.setattr(loading.hub, "decoder_for", lambda *a: asked.append(a) or "found")
    monkeypatch.setattr(MARFamily, "load_decoder", staticmethod(lambda *_: decoder(16)))
    monkeypatch.setattr(MARFamily, "expect_decoder", lambda *_: None)
    monkeypatch.setattr(MARFamily, "with_note", lambda family, model, note: model)
    source = Source(lambda choice, family: choice, torch.device("cpu"))
    loading.load(MAR, "mine.pth", source)
    loading.load(MAR, "mine.pth", source, "chosen")
    assert asked == [("mine.pth", "mar", "stated", False)], "the user's choice is not looked up"


def test_models_of_the_demo_by_the_samplers_of_a_run():
    """A sampler of two families follows those of one; with a
    prompt it is Tar's, and a MAR's without a label the hybrid's.
    """

    def families(names, prompted=False, labelled=False):
        return models._families([SAMPLERS[name] for name in names], prompted, labelled)

    assert families(["zipar"]) == {"zipar": LLAMAGEN}
    assert families(["tar", "zipar"]) == {"tar": TAR, "zipar": TAR}
    assert families(["par", "tar", "zipar"]) == {"par": LLAMAGEN, "tar": TAR, "zipar": LLAMAGEN}
    assert families(["zipar", "mar"], prompted=True, labelled=True) == {"zipar": TAR, "mar": MAR}
    assert families(["mar"], prompted=True) == {"mar": HYBRID}


def test_a_size_is_taken_from_the_sampler_that_has_one(monkeypatch):
    """The PAR of the demo has one size; the LlamaGen of the same grid is compared with it."""
    grids = {"demo-par": "16", "demo-llamagen": "16", "demo-llamagen-low": "8"}
    monkeypatch.setattr(models.ck, "read_metadata", lambda path: {"grid": grids[path]})
    files = Source(lambda choice, family: choice, torch.device("cpu"))

    def chosen(names):
        entries = [SAMPLERS[name] for name in names]
        found = models.choose_models("demo", entries, files)
        return {name: choice for name, (_, choice) in found.items()}

    assert chosen(["par", "zipar"]) == {"par": "demo-par", "zipar": "demo-llamagen"}
    grids["demo-par"] = "8"
    assert chosen(["par", "zipar"]) == {"par": "demo-par", "zipar": "demo-llamagen-low"}
    assert chosen(["zipar"]) == {"zipar": "demo-llamagen"}


def test_weights_and_what_computes_them():
    """``auto`` and ``speed`` are for the device that computes, not for the one that keeps the weights."""
    calls = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loading, "choose", lambda net, speed, device: calls.append((speed, device)))
        of_device = replace(FAMILIES[MAR], load_file=lambda path, dtype, device, **more: mar(device=device))
        patched.setitem(FAMILIES, MAR, of_device)
        source = Source(None, torch.device("cpu"), "fp32", torch.device("meta"), "compile")
        assert loading._load_model(MAR, "x", source).device == torch.device("cpu")
        loading._load_model(MAR, "x", Source(None, torch.device("cpu"), "fp32"))
    assert calls == [("compile", torch.device("meta")), ("auto", torch.device("cpu"))]


# ------------------------------------------------------------------------------------------------ planning


def planned(names, ready):
    return [(p.entry.name, p.variant) for p in plan(names, [], ready)]


def test_the_baseline_of_each_family_is_first_and_its_variants_follow():
    assert planned("mar:disa,fasthybrid,mar", {}) == [("mar", ""), ("mar", "disa"), ("fasthybrid", "")]
    assert planned("zipar,fasthybrid,llamagen,mar", {}) == [
        ("llamagen", ""), ("zipar", ""), ("mar", ""), ("fasthybrid", ""),
    ]  # fmt: skip


def test_settings_of_one_sampler_beat_those_of_all_in_any_order():
    for sets in (["cfg=2", "mar.cfg=4"], ["mar.cfg=4", "cfg=2"]):
        one, fast = plan("mar,fasthybrid", sets, {})
        assert (one.settings.cfg, fast.settings.cfg) == (4, 2)


# A sampler with settings to those that differ from its own defaults.
CHOICES = {
    "fasthybrid:threshold=0.9": {"threshold": 0.9},
    "fasthybrid: preset=exact, guided_steps=3": {"lookahead": 0, "guided_steps": 3},
    "LazyMAR+FastHybrid: refresh_period=2; threshold = 0.8": {"refresh_period": 2, "threshold": 0.8},
    "mar:steps=16,diffusion_steps=20": {"steps": 16, "diffusion_steps": 20},
}


@pytest.mark.parametrize("text", CHOICES)
def test_settings_after_a_colon_are_read_as_in_any_sampler(text):
    _, planned = plan(f"mar,{text}", [], {})
    choice = parse_choice(text, "sampler")
    assert (planned.entry, planned.settings) == (choice.entry, choice.settings(ModelFacts(demo=True)))
    assert {name: getattr(planned.settings, name) for name in CHOICES[text]} == CHOICES[text]


def test_labels_and_settings_after_a_colon():
    wide, narrow, labelled = plan("zipar:window=8,zipar:window=2,zipar:wide", ["zipar:wide.window=4", "parallel=2"], {})
    assert [p.settings.window for p in (wide, narrow, labelled)] == [8, 2, 4]
    assert {p.settings.parallel for p in (wide, narrow, labelled)} == {2}, "a setting of all"
    assert [p.label for p in (wide, narrow, labelled)] == ["ZipAR window 8", "ZipAR window 2", "ZipAR, wide"]
    (custom,), (preset,) = plan("fasthybrid:lookahead=2", [], {}), plan("fasthybrid:lookahead=2", ["preset=fast"], {})
    assert (custom.settings.guided_steps, preset.settings.guided_steps) == (10, 5), "no preset unless one is named"
    assert split_samplers("mar,a:x=1,y=2,b,c:label,d") == ["mar", "a:x=1,y=2", "b", "c:label", "d"]


WRONG = {
    "zipar:windo=4": "samplers: zipar: .*did you mean window",
    "zipar:window=0": "samplers: zipar: window: 0 is outside",
    "zipar:window=four": "samplers: zipar: window: 'four' is not a number",
    "zipar:window=": "samplers: 'window=' is not of the form",
    "zipar:window=4,window=8": "samplers: window is given twice",
    "fasthybrid:preset=quick": "samplers: fasthybrid: preset: ",
    "mar,window=4": "samplers: there is no sampler 'window=4'",
    "zipar:wide,window=4": "samplers: there is no sampler 'window=4'",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_settings_after_a_colon_are_refused(line):
    with pytest.raises(UserError, match=f"^{WRONG[line]}"):
        plan(line, [], {})


def test_a_setting_in_samplers_and_in_set_is_refused():
    entries = by_key(["zipar: window=4"])
    assert list(entries) == ["zipar:window=4"]
    assert assigned(entries, [("zipar:window=4.parallel", 2)]) == {"zipar:window=4": ({}, {"parallel": 2})}
    with pytest.raises(UserError, match="^set: .* zipar:window=4.window"):
        assigned(entries, [("zipar:window=4.window", 8)])
    with pytest.raises(UserError, match="^set: zipar is not a sampler of this run; .* zipar:window=4"):
        plan("zipar:window=4", ["zipar.window=8"], {})


def test_presets_by_the_models_size():
    """FastHybrid's published lookahead is 7, 8, 9 for widths of 768, 1024, 1280; the demo's balanced is 8."""
    widths = {768: 7, 1024: 8, 1280: 9}
    for width, lookahead in widths.items():
        ready = {"fasthybrid": Ready(MAR, mar(dim=width))}
        assert plan("fasthybrid", ["preset=balanced"], ready)[0].settings.lookahead == lookahead
    demo = {"fasthybrid": Ready(MAR, mar(label_set="picture-book"))}
    assert plan("fasthybrid", ["preset=balanced"], demo)[0].settings.lookahead == 8
    assert plan("fasthybrid", [], demo)[0].settings.steps == 32, "the model's own"


def test_zipars_window_of_a_whole_row_is_a_baseline():
    """On 16 x 16 tokens a window of 16 is plain decoding, and PAR is
    measured against it; with 15 nothing is, and the first is taken.
    """

    def against(window):
        on = Ready(LLAMAGEN, SimpleNamespace(grid=16, net=None))
        names = {"par": {}, "zipar": {"window": window}}
        return measured_against(
            [Planned(SAMPLERS[n], SAMPLERS[n].settings(**own), {}, ready=on) for n, own in names.items()]
        )

    assert against(16) == [1, 1] and against(15) == [0, 0]
    on = Ready(LLAMAGEN, SimpleNamespace(grid=16, net=None))
    alone = Planned(SAMPLERS["par"], SAMPLERS["par"].settings(), {}, ready=on)
    assert measured_against([alone]) == [None], "nothing is compared with it"


def test_usual_samplers(monkeypatch):
    def usual(kind, model="x", names=(), **about):
        monkeypatch.setattr(
            planning, "identified", lambda *_: (kind, FAMILIES[kind].samplers_of_file(names) if kind else ())
        )
        options = {"samplers": None, "model": model, "text": None, "draft": AUTO, "models": None, "device": "cpu"}
        return usual_samplers(SimpleNamespace(**options | {"dtype": AUTO, "speed": "plain"} | about))

    assert usual("", samplers="zipar") == "zipar"
    assert usual("", "demo") == "mar,fasthybrid" and usual("", "demo", text=["a boat"]) == "tar,zipar,mulosd"
    assert (
        usual(LLAMAGEN, names=["spe_tok_embeddings.weight"]) == "par"
        and usual(TAR) == "tar,zipar"
        and usual(TAR, draft="y") == "tar,zipar,mulosd"
    )
    assert usual("") == "mar,fasthybrid" and usual(LLAMAGEN) == "llamagen,zipar"


def test_a_grid_of_2_to_128_is_possible(monkeypatch):
    grids = []
    monkeypatch.setattr(planning, "choose_models", lambda *_: {"zipar": (LLAMAGEN, "x")})
    monkeypatch.setattr(planning.loading, "load", lambda *a: grids.append(a[-2]))
    monkeypatch.setattr(planning, "source", lambda options: None)
    for grid in ("2", "128", None):
        planning.load(SimpleNamespace(grid=grid, model="x", decoder=AUTO, weights=AUTO, text=None), [SAMPLERS["zipar"]])
    assert grids == [2, 128, None]
    for grid in ("1", "129", "x"):
        with pytest.raises(UserError, match="^grid: "):
            planning.load(
                SimpleNamespace(grid=grid, model="x", decoder=AUTO, weights=AUTO, text=None), [SAMPLERS["zipar"]]
            )


def test_a_prompts_settings_are_taken_out_of_those_of_samplers():
    assert planning.of_prompt(["prompt.detail=81", "cfg=2"]) == (["cfg=2"], {"detail": "81"})
