"""A family of a stranger: thirty lines, and it is drawn, compared, swept and seen in a node."""

import importlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fake_comfy
import pytest
import torch

fake_comfy.install()

from fastar_nodes.networks.speed import Recordable  # noqa: E402
from fastar_nodes.nodes import compare, samplers, sharing, sweep  # noqa: E402
from fastar_nodes.nodes.host.loaded import Loaded  # noqa: E402
from fastar_nodes.runs import registry  # noqa: E402
from fastar_nodes.runs.drawing import Drawing  # noqa: E402
from fastar_nodes.runs.families import Family  # noqa: E402
from fastar_nodes.runs.registry import Entry  # noqa: E402
from fastar_nodes.samplers.conditioning import from_ids  # noqa: E402
from fastar_nodes.samplers.engine import Canvas, decode, finish, new_report  # noqa: E402
from fastar_nodes.samplers.settings import Guarantees, knob  # noqa: E402
from tiny import a_vae  # noqa: E402

SIDE = 4


# ------------------------------------------------------------------------------------------------ thirty lines


@dataclass(frozen=True)
class ToyModel:
    net: Any
    name: str = "toy"
    family: ClassVar[str] = "toy"
    condition: ClassVar[str] = "class"
    label_set: str = ""
    note: str = ""
    parts: dict = field(default_factory=dict)

    @property
    def device(self):
        return torch.device("cpu")


@dataclass(frozen=True)
class ToySettings(Guarantees):
    rows: int = knob(1, "Rows of the image that a pass decides.", low=1, high=SIDE, step=1)


class ToyFamily(Family):
    kind = "toy"

    def grid(self, model, settings=None):
        return SIDE, SIDE


class ToyCanvas(Canvas):
    def to_latents(self, values):
        return values.unflatten(1, self.grid).permute(0, 3, 1, 2)


def toy(model, condition, settings, noise, edit=None):
    """Every pass decides rows of the image: their noise, which the network scales, and the class."""
    report = new_report("toy", model, settings, noise)
    canvas = ToyCanvas(model, settings, noise, (SIDE, SIDE), torch.zeros(len(noise), SIDE**2, 2), report)
    drawn = noise.first("full", SIDE**2, 2)
    classes = torch.tensor(condition.labels).view(-1, 1, 1)
    plan = dict(enumerate(torch.arange(SIDE**2).split(settings.rows * SIDE)))
    canvas.total = len(plan)

    def draw(k, cells, z):
        return drawn[:, cells] * z + classes

    yield from decode(canvas, plan, lambda k, cells: model.net.scale, draw)
    return canvas.finish()


# ------------------------------------------------------------------------------------------------ what it gets


class ToyNet(Recordable):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "toy", ToyFamily("toy", "a toy", load_file=None, files="mar"))
    entry = Entry("toy", "Toy", toy, lambda model, settings: None, ToySettings, ("toy",), baseline=True)
    monkeypatch.setitem(registry.SAMPLERS, "toy", entry)
    net = ToyNet()
    return Loaded.of(ToyModel(net, parts={"transformer": net}), a_vae())


def test_it_is_drawn_in_batches_and_alone(loaded):
    entry = registry.SAMPLERS["toy"]
    condition = from_ids([3, 5])

    drawing = Drawing(entry, loaded.model, ToySettings(), condition, 7, range(2))
    latents, report = finish(drawing.steps())
    assert latents.shape == (2, 2, SIDE, SIDE) and abs(float(latents[0].mean()) - 3) < 0.5
    alone, _ = finish(drawing.begin(range(1, 2)))
    assert torch.equal(alone, latents[1:]) and report.maps["step"][0, :, 0].tolist() == [0, 1, 2, 3]


def test_it_runs_in_a_node_and_is_compared(loaded):
    condition = from_ids([3])
    images, reports = [], []
    for line in ("toy: rows=1", "toy: rows=4"):
        latent, report = sharing.AnySampler.execute(model=loaded, condition=condition, sampler=line, seed=1).result
        images.append(loaded.vae.decode(latent["samples"]))
        reports.append(report)
    assert torch.equal(*images) and [r.settings["rows"] for r in reports] == [1, 4]

    told = compare.Compare.execute(
        labels=[""], columns=[0], baseline=[0], differences=[False],
        image_1=[images[0]], report_1=[reports[0]], image_2=[images[1]], report_2=[reports[1]],
    )  # fmt: skip
    assert "identical" in told.ui["fastar_text"][0]


def test_it_is_swept(loaded, monkeypatch, tmp_path):
    """Its menu is made when the module is imported."""
    monkeypatch.setattr(fake_comfy.state, "folder", tmp_path)
    axes = {"x": "rows", "x_values": "1, 2, 4", "y": "none", "y_values": ""}
    try:
        module = importlib.reload(sweep)
        plan = {"sampler": "toy", **axes, "seeds": "7", "settings": ""}
        found, _ = module.run(module.SweepNode, loaded, from_ids([3]), folder="toys", **plan)
    finally:
        monkeypatch.undo()
        importlib.reload(sweep)
    assert [cell.report.settings["rows"] for cell in found.cells] == [1, 2, 4]


def test_a_sampler_of_another_family_says_what_it_is(loaded):
    with pytest.raises(Exception, match="^model: it got .*; connect the output of Load MAR"):
        samplers.MARSampler.execute(model=None, condition=from_ids([3]), seed=1)
    with pytest.raises(Exception, match="sampler: zipar samples .*; choose"):
        sharing.AnySampler.execute(model=loaded, condition=from_ids([3]), sampler="zipar", seed=1)


class Oblong(Family):
    """Images of 2 rows of 3 tokens."""

    kind = "oblong"

    def grid(self, model, settings=None):
        return 2, 3


def test_sizes_in_pixels_are_height_and_width():
    assert Oblong("oblong", "an oblong model", load_file=None, files="mar").sizes(None, 16) == ((32, 48),)
