"""Take a toy from a saved file through all that a user can do with a family; what is wrong raises.

``python drive.py PACKAGE FOLDER``: a copy of the package with the toy's folder, record and line, and an empty folder.
"""

import importlib.util
import sys
from pathlib import Path

package, folder = Path(sys.argv[1]), Path(sys.argv[2])
spec = importlib.util.spec_from_file_location(
    "fastar_nodes", package / "__init__.py", submodule_search_locations=[str(package)]
)
fastar_nodes = importlib.util.module_from_spec(spec)
sys.modules["fastar_nodes"] = fastar_nodes
spec.loader.exec_module(fastar_nodes)

import fake_comfy  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

fake_comfy.install()
fake_comfy.state.folder = folder

from fastar_nodes.cli.main import main  # noqa: E402
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig  # noqa: E402
from fastar_nodes.nodes import compare, conditioning, filling, host, loaders, samplers, sharing, sweep  # noqa: E402
from fastar_nodes.runs.registry import FAMILIES  # noqa: E402
from tiny_files import write  # noqa: E402

# 1. The file, in the user's folder, and that of a decoder.
CHANNELS = 8
path = folder / "my toy.safetensors"
about = {"name": "my toy", "label_set": "imagenet-1k"}
save_file({"toy_scale": torch.full((CHANNELS,), 0.5)}, path, about)
small = KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=CHANNELS, groups=4)
kl = write(KLAutoencoder(small), folder / "kl.safetensors", 5, groups=4)

# 2. Python.
pipe = fastar_nodes.load(path, device="cpu", decoder=kl)
assert pipe.samplers == ["toy"], pipe.samplers
images, report = pipe("goldfish, tiger cat", seed=7, rows=2)
alone, _ = pipe("tiger cat", seed=7, first=1, rows=4)
assert len(images) == 2 and images[1].tobytes() == alone[0].tobytes() and report.sampler == "toy"
assert FAMILIES["toy"].memory(pipe.model, [0], None) == {"tokens": 16 * CHANNELS * 4}

# 3. Command line.
out = folder / "out.png"
model = ["--model", str(path), "--decoder", str(kl), "--device", "cpu"]
for command in (
    ["compare", *model, "--label", "tiger cat", "--out", str(out)],
    ["check", *model, "--label", "tiger cat"],
    ["list"],
):
    assert main(command) == 0, command
assert out.exists()

# 4. Its loader, whose menu is empty before there is a file, and then has it; and its sampler.
assert [node.define_schema() for node in loaders.NODES if node.options("checkpoint") == []]
host.folders.paths = lambda *kinds: [folder]
host.folders.local_files = lambda *kinds: [path.name, kl.name]
nodes = {node.define_schema().node_id: node for node in (*loaders.NODES, *samplers.NODES)}
load, sampler = nodes["FastARLoadToy"], nodes["FastARToySampler"]
assert path.name in load.options("checkpoint")
loaded, vae = load.execute(path.name, decoder=kl.name).result
labels = conditioning.ClassLabel.execute("goldfish").result[0]
latent, drawn = sampler.execute(model=loaded, condition=labels, seed=7, preset="custom", rows=2).result
assert drawn.settings["rows"] == 2 and vae.decode(latent["samples"]).shape[-1] == 3

# 5. The editor's preset request.
asked = {"class_type": load.node_id, "inputs": {"checkpoint": path.name}}
assert filling.fill(sampler.node_id, "recommended", asked) == {"values": {"rows": 1}, "model": "full-size toy"}

# 6. Any Sampler, Compare, and a sweep.
latents, reports = [], []
for line in ("toy: rows=1", "toy: rows=4"):
    made, own = sharing.AnySampler.execute(model=loaded, condition=labels, sampler=line, seed=7).result
    latents.append(vae.decode(made["samples"]))
    reports.append(own)
assert torch.equal(*latents)
told = compare.Compare.execute(
    labels=[""], columns=[0], baseline=[0], differences=[False],
    image_1=[latents[0]], report_1=[reports[0]], image_2=[latents[1]], report_2=[reports[1]],
)  # fmt: skip
assert "identical" in told.ui["fastar_text"][0], told.ui
plan = {"sampler": "toy", "x": "rows", "x_values": "1, 2", "y": "none", "y_values": "", "seeds": "7", "settings": ""}
swept, _ = sweep.run(sweep.SweepNode, loaded, labels, folder="toys", **plan)
assert [cell.report.settings["rows"] for cell in swept.cells] == [1, 2]
options = [vars(part) for part in sweep.SweepNode.define_schema().inputs]
assert "'toy'" in str(options)

# 7. The samplers of a family with the same decoder refuse it in a sentence, and name its own.
for refused, words in (
    (lambda: samplers.MARSampler.execute(model=loaded, condition=labels, seed=1), "^model: it got a toy (my toy); "),
    (
        lambda: sharing.AnySampler.execute(model=loaded, condition=labels, sampler="mar", seed=1),
        "sampler: mar works with a MAR, or a Harmon or UniPic, but the connected model is a toy (my toy); choose toy.",
    ),
):
    try:
        refused()
    except fastar_nodes.UserError as problem:
        assert str(problem).startswith(words.lstrip("^")), problem
    else:
        raise AssertionError(words)
print("done")
