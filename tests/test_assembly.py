"""assembly.py without nodes or command line, and the public API."""

from pathlib import Path
from types import SimpleNamespace

import fastar_nodes
import pytest
import torch
from fastar_nodes import assembly
from fastar_nodes.assembly import Drafts, Ready, Source, defaults
from fastar_nodes.bench.folder import Folder
from fastar_nodes.cli.options import models_folder
from fastar_nodes.cli.options import source as cli_source
from fastar_nodes.errors import UserError, not_finite
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.families import KINDS
from fastar_nodes.model_loaders.networks.autoencoder import VQModel
from fastar_nodes.reports.record import Report
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
    assert assembly.stated_defaults({"defaults": "[1]"}) == assembly.stated_defaults({"defaults": "{"}) == {}
    settings = assembly.prompt_settings({"top_k": 15, "cfg": 2.0, "detail": "81"}, {"detail": "169"})
    assert (settings.top_k, settings.detail) == (15, "169")
    assert defaults(Ready(MAR, demo.model, metadata={"defaults": '{"cfg": 2.0}'}))["cfg"] == 2.0


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No user has a home directory, as in many containers."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)


def test_without_a_home_directory_built_in_models_load(homeless, tmp_path):
    options = SimpleNamespace(models=None, device="cpu", dtype="fp32", speed="plain")
    source = cli_source(options)
    assert assembly.load(MAR, "demo", source).choice == "demo"
    (tmp_path / "mine.safetensors").write_bytes(b"x")
    assert source.find(str(tmp_path / "mine.safetensors"), "mar") == tmp_path / "mine.safetensors"
    with pytest.raises(
        UserError,
        match="^models: mar-base is a download, and there is no home folder for it; name a folder with --models",
    ):
        source.find("mar-base", "mar")
    # The remedy: a folder that is named.
    (tmp_path / "mar-base.safetensors").write_bytes(b"x")
    options.models = tmp_path
    assert cli_source(options).find("mar-base", "mar") == tmp_path / "mar-base.safetensors"


@pytest.mark.parametrize("path", ["~nosuchuser/x.safetensors", "~nosuchuser"])
def test_a_home_that_does_not_exist_is_named(path, tmp_path):
    with pytest.raises(
        UserError, match="^decoder: the home folder in ~nosuchuser(/x.safetensors)? is not known; write the whole path"
    ):
        assembly.find_file(path, "kl", tmp_path)
    with pytest.raises(UserError, match="^models: the home folder in ~nosuchuser"):
        models_folder(Path(path))
    with pytest.raises(UserError, match="^folder: the home folder in ~nosuchuser"):
        Folder(path)


class _Decoder(torch.nn.Module):
    """Decodes a code to the pixel value of that number; latents to their first three channels."""

    def __init__(self, values: list[float]):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values), requires_grad=False)

    def vectors(self, codes: torch.Tensor) -> torch.Tensor:
        return codes[:, None].float()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.values[latents.long()].expand(-1, 3, -1, -1)


def _decoded(values: list[float]) -> list[int]:
    """Pixels of 8 bits that a decoder of these values in -1..1 becomes, on the command line and in Python."""
    ready = assembly.Ready("llamagen", SimpleNamespace(name="tiny"), VQModel(_Decoder(values), "tiny vq"))
    codes = torch.arange(len(values)).view(1, 1, -1)
    result = SimpleNamespace(codes=codes, report=Report("llamagen", "tiny", {}, 1, 1, "cpu"))
    return assembly.decode(ready, result)[0, 0, :, 0].tolist()


def test_decoded_pixels_are_rounded_and_not_cut():
    shades = [0.0, 100.3, 100.7, 254.4, 254.6, 255.0, 300.0, -20.0]
    assert _decoded([2 * shade / 255 - 1 for shade in shades]) == [0, 100, 101, 254, 255, 255, 255, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_decoded_pixels_that_are_not_finite_are_the_error_that_the_nodes_raise(value):
    """Rounding and clamping would hide them: the image was black."""
    with pytest.raises(UserError) as caught:
        _decoded([0.0, value, 0.5])
    assert str(caught.value) == str(not_finite("decoder", "tiny vq", "pixels"))


def test_latents_that_are_not_finite_are_not_the_decoders_fault(demo):
    latents = torch.zeros(1, 4, 2, 2)
    latents[0, 0, 0, 0] = float("nan")
    result = SimpleNamespace(latents=latents, report=Report("mar", "m", {}, 1, 1, "cpu"))
    with pytest.raises(UserError, match=f"^model: {demo.model.name} computed latents that are not finite"):
        assembly.decode(demo, result)
