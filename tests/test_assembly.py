"""assembly.py without nodes or command line, and the public API."""

from pathlib import Path

import fastar_nodes
import pytest
import torch
from fastar_nodes import assembly
from fastar_nodes.assembly import Drafts, Ready, Source, defaults
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.families import KINDS
from fastar_nodes.samplers.registry import FAMILIES, HYBRID, LLAMAGEN, MAR, SAMPLERS, TAR

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def built_in(choice: str, family: str) -> Path:
    return hub.resolve(choice, family, [], ROOT / "nowhere")


@pytest.fixture
def source() -> Source:
    return Source(built_in, CPU, "fp32")


@pytest.fixture(scope="module")
def demo() -> Ready:
    return assembly.load(MAR, "demo", Source(built_in, CPU))


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_is_public_with_its_settings(name):
    entry = SAMPLERS[name]
    for public in (entry.settings, *([] if "+" in name else [entry.run])):
        assert getattr(fastar_nodes, public.__name__) is public
        assert public.__name__ in dir(fastar_nodes)


def test_the_api_lists_what_it_has():
    for name in fastar_nodes._PUBLIC:
        assert getattr(fastar_nodes, name) is not None and name in dir(fastar_nodes)
    assert {"load_mar", "PairedNoise", "resolve_labels", "UserError"} <= {*fastar_nodes._PUBLIC}
    assert fastar_nodes.WEB_DIRECTORY == "./web"
    for name in ("nosuch", "NODE_CLASS_MAPPINGS", "__wrapped__"):
        with pytest.raises(AttributeError, match=name):
            getattr(fastar_nodes, name)


def test_a_model_comes_with_its_decoder(demo):
    assert demo.family == MAR and demo.demo and demo.condition == "class"
    assert (
        demo.decoder.name == "picture book KL, stride 8" and demo.latent_channels == demo.decoder.net.config.z_channels
    )
    assert demo.tokens == demo.model.net.config.tokens and demo.classes == demo.model.net.config.classes
    assert demo.device == CPU and defaults(demo)["ar_steps"] <= demo.tokens


def test_a_detokenizer_has_a_reader(source):
    ready = assembly.load(TAR, "demo-dtok-low", source)
    assert assembly.load_reader(ready, source).net.config.width == ready.classes
    assert ready.condition != "class" and defaults(ready)["top_k"] == 0
    assert assembly.language_model_for(ready) == assembly.DEMO_TAR
    assert assembly.language_model_for(Ready(TAR, ready.model, choice="mine.pth")) == assembly.OFFICIAL_TAR


def test_every_family_is_complete():
    assert set(FAMILIES) == set(assembly._LOADERS)
    for name, family in FAMILIES.items():
        assert family.files in KINDS and {*family.demo} <= {entry.id for entry in hub.entries(family.files)}
        assert all(name in SAMPLERS[sampler].families for sampler in family.usual.split(","))
        assert any(name in entry.families and entry.baseline for entry in SAMPLERS.values())


def test_files_are_identified():
    files = {"demo": MAR, "demo-kl": "", "demo-llamagen-low": LLAMAGEN, "demo-par": "par", "demo-dtok-low": TAR}
    kinds = {"demo": "mar", "demo-kl": "kl", "demo-dtok-low": "dtok"}
    for choice, family in files.items():
        assert assembly.identify(built_in(choice, kinds.get(choice, "llamagen"))) == family
    assert [assembly.listed_family(c) for c in ("mar-base", "ar-dtok-512", "mine.pth")] == [MAR, TAR, None]
    with pytest.raises(UserError, match="^model: tar-1.5b writes the codes"):
        assembly.listed_family("tar-1.5b")


def test_weights_are_placed_in_the_precision_of_the_compute_device(monkeypatch, source):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    families = {MAR: "fp16", LLAMAGEN: "bf16", TAR: "bf16", HYBRID: "bf16"}
    for family, name in families.items():
        assert Source(built_in, CPU, "auto", torch.device("cuda")).precision(family) == name
        assert Source(built_in, CPU, "int8").precision(family) == "int8"
    with pytest.raises(UserError, match="^dtype: 'int4'"):
        assembly.load(MAR, "demo", Source(built_in, CPU, "int4"))


def test_drafts_are_loaded_once(demo, source):
    drafts = Drafts(source, "demo", "demo")
    first = drafts.load("cspd", demo)
    assert first is not demo.model and drafts.load("cspd+lazymar", demo) is first
    with pytest.raises(UserError, match="^draft: cspd needs a small draft model beside mine; name one with --draft"):
        Drafts(source, "auto", "mine").load("cspd", Ready(MAR, demo.model, choice="mine.pth"))
    with pytest.raises(UserError, match="^draft: demo-kl "):
        Drafts(source, "demo-kl", "demo").load("cspd", demo)


def test_codes_of_two_tokenizers_differ(source):
    a, b = (assembly.load(LLAMAGEN, choice, source) for choice in ("demo-llamagen-low", "demo-par"))
    assembly.expect_same_codes(a.vq, b.vq, a.model.name)
    with torch.no_grad():
        b.vq.net.quantize.embedding.weight.neg_()
    with pytest.raises(UserError, match="^draft: its decoder is .* load both with the same decoder"):
        assembly.expect_same_codes(a.vq, b.vq, a.model.name)


def test_stated_settings_take_precedence(demo):
    assert assembly.stated_defaults({}) == {} and assembly.stated_defaults({"defaults": '{"cfg": 2}'}) == {"cfg": 2}
    for broken in ("[1]", "{", "[" * 100_000, '{"a": ' * 70 + "1" + "}" * 70):
        with pytest.raises(UserError, match="^model: the entry defaults in the model's metadata cannot be read"):
            assembly.stated_defaults({"defaults": broken})
    settings = assembly.prompt_settings({"top_k": 15, "cfg": 2.0, "detail": "81"}, {"detail": "169"})
    assert (settings.top_k, settings.detail) == (15, "169")
    assert defaults(Ready(MAR, demo.model, metadata={"defaults": '{"cfg": 2.0}'}))["cfg"] == 2.0
