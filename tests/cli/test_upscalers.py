"""What enlarges MuLo-SD's drafts: super-resolution models, read by spandrel, of which a stand-in is imported here; and
latent samplers.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import fastar_nodes
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders.loader import load_vq
from fastar_nodes.model_loaders.upscalers import load_upscaler
from fastar_nodes.networks.latent_samplers import LatentSamplers, LatentSamplersConfig
from safetensors.torch import save_file

CPU = torch.device("cpu")


class Descriptor:
    """A model that enlarges to twice the side, in the form in which spandrel returns one."""

    scale, input_channels = 2, 3
    architecture = SimpleNamespace(name="Compact")

    def __init__(self, output_channels: int = 3):
        self.output_channels = output_channels
        self.model = torch.nn.Identity()
        self.evaluates = False

    def eval(self):
        self.evaluates = True

    def __call__(self, images):
        assert self.evaluates and 0 <= images.min() and images.max() <= 1
        return images.repeat_interleave(2, 2).repeat_interleave(2, 3)


@pytest.fixture
def spandrel(monkeypatch):
    """The stand-in, which reads what a file's name says."""

    class ModelLoader:
        def __init__(self, device):
            assert device == CPU

        def load_from_file(self, path):
            if path.name.startswith("bad"):
                raise ValueError("no architecture fits")
            return Descriptor(1 if path.name.startswith("grey") else 3)

    monkeypatch.setitem(sys.modules, "spandrel", SimpleNamespace(ModelLoader=ModelLoader))


@pytest.fixture
def file(tmp_path):
    def made(name: str) -> Path:
        (tmp_path / name).write_bytes(b"weights")
        return tmp_path / name

    return made


def test_a_file_enlarges_images_and_has_a_name(spandrel, file):
    enlarge, name = load_upscaler(file("x2.pth"), CPU)
    assert name == "Compact x2" and enlarge(torch.rand(2, 3, 4, 5)).shape == (2, 3, 8, 10)


@pytest.mark.parametrize(
    ("name", "says"),
    [("bad.pth", "bad.pth holds no .*no architecture fits"), ("grey.pth", "grey.pth does not enlarge RGB images")],
)
def test_a_file_that_does_not_fit_is_refused(spandrel, file, name, says):
    with pytest.raises(UserError, match=f"^upscale_model: {says}.*"):
        load_upscaler(file(name), CPU)


def test_a_missing_file_and_a_missing_package_are_named(file, monkeypatch):
    with pytest.raises(UserError, match="^upscale_model: there is no file .*none.pth"):
        load_upscaler(Path("none.pth"), CPU)

    monkeypatch.setitem(sys.modules, "spandrel", None)
    with pytest.raises(UserError, match="^upscale_model: .* the package spandrel.* install "):
        load_upscaler(file("x2.pth"), CPU)


def test_python_enlarges_drafts_with_it(spandrel, file):
    """Its name is in the report, and the drafts are others than bicubic ones."""
    asked = {"sampler": "mulosd", "tau": 0.0, "draft_rows": 0, "draft_window": 4, "seed": 3}
    plain, _ = fastar_nodes.load("demo-llamagen").sample("cat", **asked)
    pipe = fastar_nodes.load("demo-llamagen", upscale_model=file("x2.pth"))
    other, report = pipe.sample("cat", **asked)
    assert report.settings["up_sampler"] == "Compact x2" and not torch.equal(plain, other)


def test_the_command_line_takes_it(spandrel, file, cli):
    answer = cli(f"compare --model demo-llamagen --samplers mulosd --upscale-model {file('grey.pth')}")
    assert answer.code == 2 and "grey.pth does not enlarge RGB images" in answer.err
    unused = cli(f"compare --model demo-llamagen --samplers llamagen --upscale-model {file('x2.pth')}")
    assert unused.code == 2 and "upscale-model: no sampler of this run uses this option" in unused.err


# ------------------------------------------------------------------------------------------------ latent samplers


@pytest.fixture(scope="module")
def latent_file(tmp_path_factory):
    """A file of latent samplers for the demo's tokenizer, with random weights."""
    vq = load_vq(Path(fastar_nodes.__file__).parent / "demo" / "checkpoints" / "vq.safetensors").net
    config = LatentSamplersConfig(2, vq.config.codes, vq.config.code_channels, 8, 1, 1, 8, 1)
    net = LatentSamplers(config)
    net.codebook.load_state_dict(vq.quantize.state_dict())

    path = tmp_path_factory.mktemp("latent") / "own.safetensors"
    save_file(net.state_dict(), path, metadata={"name": "own samplers"})
    return path


def up_sampler(model="demo-llamagen", **options) -> str:
    """The name of what enlarged a draft."""
    pipe = fastar_nodes.load(model, device="cpu", **options)
    _, report = pipe("cat", sampler="mulosd", tau=0.0, draft_rows=4, preset="custom")
    return report.settings["up_sampler"]


def test_a_file_of_latent_samplers_enlarges_drafts(latent_file):
    assert up_sampler(upscale_model=latent_file) == "own samplers"
    assert up_sampler(upscale_model="bicubic") == "bicubic"


def test_built_in_latent_samplers_enlarge_drafts_where_they_fit():
    assert up_sampler() == "demo-latent-samplers"
    assert up_sampler("demo-dtok") == "demo-latent-samplers", "the same tokenizer, and the same ratio"


def test_latent_samplers_that_do_not_fit_are_refused(latent_file, tmp_path):
    net = LatentSamplers(LatentSamplersConfig(2, 512, 8, 8, 1, 1, 8, 1))
    save_file(net.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"^latent_samplers: other .* codes of "):
        up_sampler(upscale_model=tmp_path / "other.safetensors")
