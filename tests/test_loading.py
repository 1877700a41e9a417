"""runs/loading.py without nodes or command line, and the public API."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.errors import UserError, not_finite
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.kinds import KINDS
from fastar_nodes.networks.autoencoder import TOO_LITTLE_TO_DECODE, KLAutoencoder, KLConfig, VQModel
from fastar_nodes.networks.llama import Llama
from fastar_nodes.networks.mar import MAR as MAR_
from fastar_nodes.reports.record import Report
from fastar_nodes.runs import drawing, loading
from fastar_nodes.runs.loading import Drafts, Ready, Source, defaults
from fastar_nodes.runs.memory import DECODE
from fastar_nodes.runs.registry import FAMILIES, HYBRID, JANUS, LLAMAGEN, MAR, SAMPLERS, TAR
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import PairedNoise
from janus_files import one_file
from tiny_files import GPT_SIZE, MAR_SIZE, write, write_vq

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def built_in(choice: str, family: str) -> Path:
    return hub.resolve(choice, family, [], ROOT / "nowhere")


@pytest.fixture
def source() -> Source:
    return Source(built_in, CPU, "fp32")


@pytest.fixture(scope="module")
def demo() -> Ready:
    return loading.load(MAR, "demo", Source(built_in, CPU))


def test_a_model_comes_with_its_decoder(demo):
    assert demo.family == MAR and demo.demo and demo.condition == "class"
    assert (
        demo.decoder.name == "demo KL, stride 8, enlarges 4 x"
        and demo.latent_channels == demo.decoder.net.config.z_channels
    )
    assert demo.tokens == demo.model.net.config.tokens and demo.classes == demo.model.net.config.classes
    assert demo.device == CPU and defaults(demo)["steps"] <= demo.tokens


def test_a_detokenizer_has_a_reader(source):
    ready = loading.load(TAR, "demo-dtok-low", source)
    assert loading.load_reader(ready, source).net.config.width == ready.classes
    assert ready.condition != "class" and defaults(ready)["top_k"] == 0
    assert loading.language_model_for(ready) == loading.DEMO_TAR
    assert loading.language_model_for(Ready(TAR, ready.model, choice="mine.pth")) == loading.OFFICIAL_TAR


def test_every_family_is_complete():
    for name, family in FAMILIES.items():
        assert family.files in KINDS and {*family.demo} <= {entry.id for entry in hub.entries(family.files)}
        assert all(name in SAMPLERS[sampler].families for sampler in family.usual_samplers)
        assert any(name in entry.families and entry.baseline for entry in SAMPLERS.values())


def test_files_are_identified():
    files = {
        "demo": (MAR, ("mar", "fasthybrid")),
        "demo-kl": ("", ()),
        "demo-llamagen-low": (LLAMAGEN, ("llamagen", "zipar")),
        "demo-par": (LLAMAGEN, ("par",)),
        "demo-dtok-low": (TAR, ("tar", "zipar")),
    }
    kinds = {"demo": "mar", "demo-kl": "kl", "demo-dtok-low": "dtok"}
    for choice, found in files.items():
        assert loading.identify(built_in(choice, kinds.get(choice, "llamagen"))) == found
    assert [loading.listed_family(c) for c in ("mar-base", "ar-dtok-512", "mine.pth")] == [MAR, TAR, None]
    with pytest.raises(UserError, match="^model: tar-1.5b is Tar's language model"):
        loading.listed_family("tar-1.5b")


def test_weights_are_placed_in_the_precision_of_the_compute_device(monkeypatch, source):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    families = {MAR: "fp16", LLAMAGEN: "bf16", TAR: "bf16", HYBRID: "bf16"}
    for family, name in families.items():
        assert Source(built_in, CPU, "auto", torch.device("cuda")).precision_name(family) == name
        for dtype in ("int8", "fp8"):
            source = Source(built_in, CPU, dtype, torch.device("cuda"))
            assert source.precision_name(family) == dtype and source.precision(family).bits == dtype
            assert loading.dtype_name(source.precision(family).compute) == name
    for dtype, says in {"fp4": "FastAR cannot load a MAR in 'fp4'", "int4": "FastAR does not offer 4-bit .*"}.items():
        with pytest.raises(UserError, match=f"^dtype: {says}; choose "):
            loading.load(MAR, "demo", Source(built_in, CPU, dtype))


@pytest.mark.parametrize(("choice", "stated", "remark"), [
    ("kl.safetensors", None, "the model's file does not name its decoder"),
    ("kl.safetensors", "demo-kl", "the model was trained with demo-kl"),
    ("kl.safetensors", "kl16", "the model was trained with kl16"),
    ("sub/kl16.safetensors", "kl16", ""),
    ("auto", "demo-kl", ""),
    ("auto", None, "the model's file does not name its decoder"),
    ("demo-kl", None, "the model's file does not name its decoder"),
    ("demo-kl", "demo-kl", ""),
])  # fmt: skip
@pytest.mark.fast_cases(1)
def test_a_decoder_that_is_not_known_to_fit_stands_in_the_report(tmp_path, choice, stated, remark):
    about = {} if stated is None else {"decoder": stated}
    write(MAR_(MAR_SIZE), tmp_path / "mar.safetensors", 0, heads=2, latent_scale="0.5", **about)
    kl = KLAutoencoder(KLConfig(8, (1, 2), 1, 4, groups=4))
    (tmp_path / "sub").mkdir()
    for name in ("kl.safetensors", "sub/kl16.safetensors", "kl16", "demo-kl"):
        write(kl, tmp_path / name, 0, groups=4, name="a KL")
    ready = loading.load(MAR, "mar.safetensors", Source(lambda c, family: tmp_path / c, CPU, "fp32"), choice)
    unknown = "FastAR cannot tell whether this decoder fits the scale (0.5) and the statistics of the model's latents"
    assert ready.model.note == (f"decoder a KL: {remark}; {unknown}" if remark else "")
    settings = SAMPLERS["mar"].settings(steps=2, diffusion_steps=2)
    sampler = SAMPLERS["mar"].run(ready.model, from_ids([1]), settings, PairedNoise(0, (0,)))
    assert finish(sampler).report.note == ready.model.note


def test_published_models_and_the_demo_have_no_remark(source):
    for family, choice in (
        (MAR, "demo"),
        (LLAMAGEN, "demo-llamagen-low"),
        (LLAMAGEN, "demo-par"),
        (TAR, "demo-dtok-low"),
    ):
        assert loading.load(family, choice, source).model.note == "", choice


def test_the_weights_of_a_training_file_are_the_users_choice(tmp_path):
    averaged, trained = (Llama(GPT_SIZE).state_dict() for _ in range(2))
    content = {"model": trained, "ema": averaged, "args": {"heads": 2, "image_size": 64, "num_classes": 10}}
    torch.save(content, tmp_path / "x.pt")
    write_vq(tmp_path / "vq.safetensors")
    files = Source(lambda choice, family: tmp_path / choice, CPU, "fp32")
    for weights, expected in (("auto", averaged), ("ema", averaged), ("trained", trained)):
        model = loading.load(LLAMAGEN, "x.pt", files, "vq.safetensors", weights=weights).model
        assert torch.equal(model.net.output.weight, expected["output.weight"])
        assert ("averaged (EMA) weights; the file also holds" in model.note) == (weights == "auto")


def test_a_home_folder_that_is_not_known(tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match="^checkpoint: the home folder in ~nosuchuser/x.pth is unknown; write the whole"
    ):
        loading.find_file("~nosuchuser/x.pth", "mar", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "x.pth").write_bytes(b"")
    assert loading.find_file("~/x.pth", "mar", tmp_path / "models") == tmp_path / "x.pth"


def test_drafts_are_loaded_once(demo, source):
    drafts = Drafts(source, "demo", "demo")
    first = drafts.load("cspd", demo)
    assert first is not demo.model and drafts.load("cspd+lazymar", demo) is first
    with pytest.raises(UserError, match="^draft: cspd needs a small draft model in addition to mine;"):
        Drafts(source, "auto", "mine").load("cspd", Ready(MAR, demo.model, choice="mine.pth"))
    with pytest.raises(UserError, match="^draft: demo-kl "):
        Drafts(source, "demo-kl", "demo").load("cspd", demo)


def test_stated_settings_take_precedence(demo):
    assert loading.stated_defaults({}) == {} and loading.stated_defaults({"defaults": '{"cfg": 2}'}) == {"cfg": 2}
    for broken in ("[1]", "{", "[" * 100_000):
        with pytest.raises(UserError, match="^model: the entry defaults in the model's metadata cannot be read"):
            loading.stated_defaults({"defaults": broken})
    settings = loading.prompt_settings({"top_k": 15, "cfg": 2.0, "detail": "81"}, {"detail": "169"})
    assert (settings.top_k, settings.detail) == (15, "169")
    assert defaults(Ready(MAR, demo.model, metadata={"defaults": '{"cfg": 2.0}'}))["cfg"] == 2.0


class _Decoder(torch.nn.Module):
    """Decodes a code to the pixel value of that number; latents to their first three channels."""

    def __init__(self, values: list[float]):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(values), requires_grad=False)

    def vectors(self, codes: torch.Tensor) -> torch.Tensor:
        return codes[:, None].float()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.values[latents.long()].repeat(1, 3, 1, 1)


def _decoded(values: list[float]) -> list[int]:
    """Pixels of 8 bits that a decoder of these values in -1..1 becomes, on the command line and in Python."""
    ready = loading.Ready("llamagen", SimpleNamespace(name="tiny"), VQModel(_Decoder(values), "tiny vq"))
    codes = torch.arange(len(values)).view(1, 1, -1)
    result = SimpleNamespace(latents=codes, report=Report("llamagen", "tiny", {}, 1, 1, "cpu"))
    return drawing.decode(ready, result)[0, 0, :, 0].tolist()


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
        drawing.decode(demo, result)


def test_the_memory_of_decoding_is_that_of_a_pass_and_of_images_before_it(demo):
    """On a CPU a pass decodes one image; those of 256 pixels have 3 x 256 x 256 numbers of 4 bytes."""
    latents = torch.zeros(3, demo.latent_channels, 8, 8)
    result = SimpleNamespace(latents=latents, report=Report("mar", "demo", {}, 7, 3, "cpu"))
    drawing.decode(demo, result)
    assert result.report.counts == {"decoder_passes": 3}
    assert result.report.memory == {DECODE: demo.decoder.net.decode_bytes(1, 8, 8) + 2 * 3 * 256 * 256 * 4}


def test_insufficient_memory_for_pixels_is_a_sentence(demo, monkeypatch):
    def insufficient(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(drawing, "to_pixels", insufficient)
    result = SimpleNamespace(
        latents=torch.zeros(1, demo.latent_channels, 8, 8), report=Report("mar", "demo", {}, 7, 1, "cpu")
    )
    with pytest.raises(UserError, match=TOO_LITTLE_TO_DECODE[:40]):
        drawing.decode(demo, result)


def test_the_outline_of_a_janus_needs_no_weights(tmp_path):
    """Its image tokens are computed once from two networks."""
    ready = loading.outline(JANUS, "mine", one_file(tmp_path / "janus.safetensors"))
    assert ready.model.grid == 4
    assert all(parameter.device.type == "meta" for parameter in ready.model.net.parameters())
