"""The nodes at work in a real ComfyUI, over HTTP."""

import io
import shutil
import time
import uuid

import block_models
import numpy as np
import pytest
import torch
from comfy_host import EDITOR, ROOT, TEMPLATES, graph, load_workflow, to_api, widgets
from fastar_nodes.lab.training import picture_book
from fastar_nodes.model_loaders.autoencoders.loader import load_kl
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# What makes sweeps and advice short, by node type.
FEW = {
    "FastARSweep": {
        "settings": "steps=4, diffusion_steps=6, threshold=0.8",
        "x": "lookahead",
        "x_values": "0, 2",
        "folder": "shared",
    },
    "FastARAdvisor": {"repeats": 1, "measure": "identical"},  # no candidate is left after the first round
    "ImageCompare": {"compare_view": {}},
    "FastARNextStepSampler": {"width": 128, "height": 128},  # of the tiny model that stands for the 14B
}


# Nodes with figures, and the number of their output for people.
TABLES = {"FastARCompare": 1, "FastARSweep": 1}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_runs(comfy, info, name):
    prompt = to_api(load_workflow(name), info)
    for key, node in list(prompt.items()):  # the same graph, in seconds
        node["inputs"].update({k: 8 for k in ("steps", "diffusion_steps") if k in node["inputs"]})
        node["inputs"].update(FEW.get(node["class_type"], {}))
        if node["class_type"] == "VAEDecode":  # every sampler's own image
            prompt[f"see {key}"] = {"class_type": "PreviewImage", "inputs": {"images": [key, 0]}}
        if node["class_type"] in TABLES:
            prompt[f"read {key}"] = {
                "class_type": "PreviewAny",
                "inputs": {"source": [key, TABLES[node["class_type"]]]},
            }
    outputs = comfy.run(prompt)
    shown = [image for output in outputs.values() for image in output.get("images", [])]
    assert shown and all(np.asarray(comfy.picture(image)).std() > 5 for image in shown)
    for key, output in outputs.items():
        if key.startswith("read "):
            assert "| seconds" in output["text"][0]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "download" not in name])
def test_no_template_warns_about_itself(comfy, info, name):
    """Neither a node with the saved settings nor ComfyUI's log."""
    before = len(comfy.log)
    entry = comfy.wait(comfy.queue(to_api(load_workflow(name), info), extra=EDITOR))
    assert not comfy.failure(entry)
    parts = [part for output in entry["outputs"].values() for part in output.get("fastar_text_parts", [])]
    assert parts and not any(part["warnings"] for part in parts)
    assert "WARNING" not in comfy.log[before:] and "Errno" not in comfy.log[before:]


def test_parallel_decoding_draws_the_identical_image(comfy, info):
    """What template 02 promises, at its own settings."""
    prompt = to_api(load_workflow("02 Identical"), info)
    for key, node in list(prompt.items()):
        if node["class_type"] == "VAEDecode":
            prompt[f"see {key}"] = {"class_type": "PreviewImage", "inputs": {"images": [key, 0]}}
    outputs = comfy.run(prompt)
    serial, parallel = (
        np.asarray(comfy.picture(output["images"][0])) for key, output in outputs.items() if key.startswith("see ")
    )
    assert np.array_equal(serial, parallel)


def test_pictures_are_decoded_and_the_same_for_the_same_seed(comfy):
    save = {"class_type": "SaveImage", "images": ["5", 0], "filename_prefix": "one"}
    first, again = (comfy.run(graph(n7={}, n8={}, n9=save))["9"]["images"] for _ in range(2))
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    fresh = comfy.run(graph(n9=save))["9"]["images"]
    other = comfy.run(graph(n3={"seed": 8}, n9=save))["9"]["images"]
    a, b, c, d = (np.asarray(comfy.picture(images[0])) for images in (first, again, fresh, other))
    assert len(first) == 2 and a.shape == (256, 256, 3) and a.std() > 5
    assert np.array_equal(a, b) and np.array_equal(a, c), "unloading changed the image"
    assert not np.array_equal(a, d)


def test_a_photograph_of_any_size_is_edited(comfy, book):
    """Load Image with a painted mask, core's VAE nodes, Paste: the rest of the image stays, at its own size."""
    photo = book[0].resize((150, 100)).convert("RGBA")
    photo.paste((0, 0, 0, 0), (75, 0, 150, 100))  # Load Image makes a mask of what is transparent
    photo.save(comfy.base / "input" / "photo.png")
    outputs = comfy.run(
        graph(
            n4={"latent_image": ["12", 0], "mask": ["10", 1]},
            n9={"class_type": "LoadImage", "image": "photo.png"},
            n10={"class_type": "FastARCropAroundMask", "image": ["9", 0], "mask": ["9", 1], "context": 1.25},
            n12={"class_type": "VAEEncode", "pixels": ["10", 0], "vae": ["1", 1]},
            n14={"class_type": "SaveImage", "filename_prefix": "photo", "images": ["16", 0]},
            n15={"class_type": "SaveImage", "filename_prefix": "three", "images": ["16", 1]},
            n16={
                "class_type": "FastARPasteInpaintedArea",
                "crop": ["10", 2],
                "inpainted": ["6", 0],
                "feather": 4,
                "match_colours": True,
            },
        )
    )
    after = np.asarray(comfy.picture(outputs["14"]["images"][0]))
    assert after.shape == (100, 150, 3) and np.array_equal(after[:, :71], np.asarray(photo)[:, :71, :3])
    assert after[:, 80:].std() > 5, "the transparent part was drawn"
    three = np.asarray(comfy.picture(outputs["15"]["images"][0]))
    assert three.shape == (100, 454, 3) and np.array_equal(three[:, -150:], after), "one beside the other"


def test_a_part_of_a_batch_is_drawn_as_in_the_whole_batch(comfy):
    """Core's Rebatch Latents and Latent From Batch: one label and one noise for every image of the batch."""

    def latents(**cut) -> list[torch.Tensor]:
        """Latents of the images of a batch, of which ``cut`` is a part if it is given."""
        source = ["24", 0] if cut else ["22", 0]
        prompt = graph(
            n2={"labels": "cat, boat, house"},
            n3={"latent_image": source, "mask": ["23", 0]},
            n21={"class_type": "EmptyImage", "width": 64, "height": 64, "batch_size": 3, "color": 0xA0B0C0},
            n22={"class_type": "VAEEncode", "pixels": ["21", 0], "vae": ["1", 1]},
            n23={"class_type": "SolidMask", "value": 0.4, "width": 64, "height": 64},
            n24=cut,
            n25={"class_type": "SaveLatent", "samples": ["3", 0], "filename_prefix": uuid.uuid4().hex},
        )
        used = ["1", "2", "3", "21", "22", "23", "25", *(["24"] if cut else [])]
        saved = comfy.run({key: prompt[key] for key in used})["25"]["latents"]
        return [load_file(comfy.base / "output" / one["filename"])["latent_tensor"] for one in saved]

    (whole,) = latents()
    assert min(float((whole[i] - whole[i - 1]).abs().max()) for i in range(3)) > 5, "three images"
    apart = latents(class_type="RebatchLatents", latents=["22", 0], batch_size=1)
    assert [len(part) for part in apart] == [1, 1, 1]
    # A batch rounds differently, and the demo's eight AR steps add it up.
    torch.testing.assert_close(torch.cat(apart), whole, rtol=0.02, atol=0.5)
    (last,) = latents(class_type="LatentFromBatch", samples=["22", 0], batch_index=1, length=2)
    torch.testing.assert_close(last, whole[1:], rtol=0.02, atol=0.5)


def test_an_empty_latent_is_a_size_and_a_number_of_images(comfy):
    """Core's Empty Latent Image with the nodes that say which images of a batch are drawn."""

    def latent(label: str, source: str = "", size: int = 256, images: int = 1, **cut) -> torch.Tensor:
        prompt = graph(
            n2={"labels": label},
            n3={"latent_image": [source, 0] if source else None},
            n21={"class_type": "EmptyLatentImage", "width": size, "height": size, "batch_size": images},
            n22=cut or {"class_type": "EmptyLatentImage"},
            n25={"class_type": "SaveLatent", "samples": ["3", 0], "filename_prefix": uuid.uuid4().hex},
        )
        used = {key: prompt[key] for key in ("1", "2", "3", "25", *filter(None, ["21", "22" if cut else ""]))}
        (saved,) = comfy.run(used)["25"]["latents"]
        return load_file(comfy.base / "output" / saved["filename"])["latent_tensor"]

    whole = latent("cat, cat, cat")
    assert torch.equal(latent("cat", "21", images=3), whole), "one label for all images"
    assert torch.equal(latent("cat, cat, cat", "21", size=64), whole), "the size that VAE Encode reads"

    # A batch rounds differently, and the demo's eight AR steps add it up.
    batch = {"samples": ["21", 0]}
    last = latent("cat", "22", images=3, class_type="LatentFromBatch", batch_index=1, length=2, **batch)
    torch.testing.assert_close(last, whole[1:], rtol=0.02, atol=0.5)
    same = latent("cat", "22", images=2, class_type="LatentBatchSeedBehavior", seed_behavior="fixed", **batch)
    torch.testing.assert_close(same, whole[[0, 0]], rtol=0.02, atol=0.5)

    prompt = graph(n3={"latent_image": ["21", 0]}, n21={"class_type": "EmptyLatentImage", "width": 512, "height": 384})
    prompt["21"]["inputs"]["batch_size"] = 1
    said = comfy.complaint(prompt)
    assert said.startswith("latent_image: ") and "512 x 384 pixels" in said and "generates 256 x 256 here" in said, said


def test_preview_as_text_of_our_values_is_a_sentence(comfy):
    sources = {
        "a model": ["1", 0],
        "a decoder": ["1", 1],
        "labels": ["2", 0],
        "a prompt": ["31", 0],
        "caches": ["32", 0],
    }
    prompt = graph(
        n31={"class_type": "FastARPrompt", **widgets("FastARPrompt"), "text": "a red boat"},
        n32={"class_type": "FastARLazyMARCache", **widgets("FastARLazyMARCache"), "preset": "fast"},
    )
    used = {key: prompt[key] for key in ("1", "2", "31", "32")}
    for name, source in sources.items():
        used[name] = {"class_type": "PreviewAny", "inputs": {"source": source}}

    outputs = comfy.run(used)
    texts = {name: outputs[name]["text"][0] for name in sources}
    assert texts["labels"] == "Class labels for 2 images: cat, boat."
    assert texts["a prompt"] == "Prompts for 1 image: a red boat."
    assert texts["a model"].startswith("The model demo MAR, with ")
    for text in texts.values():
        assert text.endswith(".") and len(text) < 300 and "\n" not in text, text


# Samplers whose report comes from a combination: loaders by socket, and the sampler with a changed setting.
COMBINED = {
    "MAR Sampler with LazyMAR Cache": (
        {"model": ("FastARLoadMAR", "demo")},
        ("FastARMARSampler", {"cfg": 1.7, "cache": ["cache", 0]}),
    ),
    "FastHybrid Sampler with LazyMAR Cache": (
        {"model": ("FastARLoadMAR", "demo")},
        ("FastARFastHybridSampler", {"threshold": 0.5, "cache": ["cache", 0]}),
    ),
    "MuLo-SD Sampler": (
        {"target": ("FastARLoadLlamaGen", "demo-llamagen"), "draft": ("FastARLoadLlamaGen", "demo-llamagen-low")},
        ("FastARMuLoSDSampler", {"tau": 0.3, "neighbours": 100}),
    ),
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_run_repeats_from_the_image_that_it_saved(comfy, name):
    """Save Image, Load Report and Any Sampler, linked to the same model."""

    def node(kind: str, **inputs) -> dict:
        return {"class_type": kind, "inputs": {**widgets(kind), **inputs}}

    loaders, (sampler, changes) = COMBINED[name]
    models = {
        socket: node(kind, checkpoint=checkpoint, decoder="auto") for socket, (kind, checkpoint) in loaders.items()
    }
    links = {socket: [socket, 0] for socket in models}
    main = "target" if "target" in models else "model"
    shared = {**models, "label": node("FastARClassLabel", labels="cat, boat")}
    if "cache" in changes:
        shared["cache"] = node("FastARLazyMARCache", preset="custom", refresh_period=3)

    first = {
        **shared,
        "draw": node(sampler, **links, condition=["label", 0], seed=7, preset="custom", **changes),
        "see": {"class_type": "VAEDecode", "inputs": {"samples": ["draw", 0], "vae": [main, 1]}},
        "image": {"class_type": "SaveImage", "inputs": {"images": ["see", 0], "filename_prefix": "repeat"}},
        "latent": {"class_type": "SaveLatent", "inputs": {"samples": ["draw", 0], "filename_prefix": "first"}},
    }
    entry = comfy.wait(comfy.queue(first, extra=EDITOR))
    assert not comfy.failure(entry)
    saved = entry["outputs"]["image"]["images"][0]["filename"]
    shutil.copy(comfy.base / "output" / saved, comfy.base / "input" / saved)

    sockets = {"model": [main, 0], **({"draft": ["draft", 0]} if "draft" in models else {})}
    again = {
        **{key: about for key, about in shared.items() if key != "cache"},
        "report": {"class_type": "FastARLoadReport", "inputs": {"image": saved}},
        "draw": node("FastARAnySampler", **sockets, condition=["label", 0], sampler=["report", 3], seed=7),
        "latent": {"class_type": "SaveLatent", "inputs": {"samples": ["draw", 0], "filename_prefix": "again"}},
    }
    outputs = comfy.run(again)

    drawn, repeated = (
        load_file(comfy.base / "output" / one["latent"]["latents"][0]["filename"])["latent_tensor"]
        for one in (entry["outputs"], outputs)
    )
    assert len(drawn) == 2 and torch.equal(repeated, drawn)


def test_progress_and_previews_arrive(comfy):
    client = uuid.uuid4().hex
    with comfy.events(client) as events:
        prompt = comfy.queue(graph(n3={"steps": 32, "diffusion_steps": 60, "seed": 1234}), client, EDITOR)
        steps, previews, ended = [], [], False
        for kind, data in events:
            if kind == "progress" and data["node"] == "3":
                steps.append((data["value"], data["max"]))
            if kind == "preview" and data[0]["node_id"] == "3":
                previews.append(np.asarray(Image.open(io.BytesIO(data[1])).convert("RGB"), int))
            if kind == "execution_success" and data["prompt_id"] == prompt:
                ended = True
                break
            assert kind != "execution_error", data
    assert ended and steps == sorted(steps) and steps[-1] == (32, 32)
    assert previews
    grey = [float((np.abs(p - 128).max(axis=-1) <= 4).mean()) for p in previews]
    assert grey[-1] < 0.1, "the last preview still has undecided tokens"
    assert len(grey) == 1 or grey[0] > 0.2, "the first preview has no grey"


def test_no_previews_when_they_are_switched_off(comfy):
    client = uuid.uuid4().hex
    with comfy.events(client) as events:
        prompt = graph(n3={"seed": 4321})
        comfy.queue(prompt, client, EDITOR | {"preview_method": "none"})
        for kind, data in events:
            assert kind != "preview" and kind != "execution_error", data
            if kind == "execution_success":
                break


@pytest.mark.parametrize("asked, shown", [({}, False), ({"preview_method": "latent2rgb"}, True)])
def test_a_program_gets_no_binary_messages_unless_it_asks(comfy, asked, shown):
    """A widely used client takes each of them for an image; the server was started with previews at none."""
    client, seen = uuid.uuid4().hex, set()
    with comfy.events(client, editor=False) as events:
        comfy.queue(graph(n3={"steps": 32, "diffusion_steps": 60, "seed": 4300 + shown}), client, asked)
        for kind, data in events:
            seen.add(kind)
            assert kind != "execution_error", data
            if kind == "execution_success":
                break
    assert "progress" in seen and "text" not in seen
    assert ("preview" in seen) == shown


def test_a_decoder_whose_pixels_are_not_finite_ends_the_run_with_its_name(comfy):
    """Its weights are finite and overflow. Before, the image was black and the run a success."""
    source = ROOT / "demo" / "checkpoints" / "kl.safetensors"
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    weights = {}
    for name, value in load_file(source).items():
        weights[name] = value.float() * 1e12 if name.startswith("decoder.") else value.float()
    save_file(weights, comfy.base / "models" / "fastar" / "diverged.safetensors", metadata)
    comfy.get("/object_info/FastARLoadMAR")
    said = comfy.complaint(graph(n1={"decoder": "diverged.safetensors"}, n3={"seed": 99}))
    assert said.startswith("decoder: "), said
    assert "computed pixels that are not finite" in said


@pytest.fixture(scope="module")
def book():
    """Pages of the demo's picture book."""
    rgb, _ = picture_book.render(picture_book.scenes(3, 4), 64)
    return [Image.fromarray(page) for page in rgb]


def _round_trip(comfy, picture: Image.Image, kind: str = "", **sizes: int) -> np.ndarray:
    """An image through core's VAE Encode and VAE Decode."""
    name = f"{uuid.uuid4().hex}.png"
    picture.save(comfy.base / "input" / name)
    loader = graph(n1={"dtype": "fp32"})["1"]
    outputs = comfy.run(
        {
            "1": loader,
            "2": {"class_type": "LoadImage", "inputs": {"image": name}},
            "3": {"class_type": f"VAEEncode{kind}", "inputs": {"pixels": ["2", 0], "vae": ["1", 1], **sizes}},
            "4": {"class_type": f"VAEDecode{kind}", "inputs": {"samples": ["3", 0], "vae": ["1", 1], **sizes}},
            "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "trip"}},
        }
    )
    return np.asarray(comfy.picture(outputs["5"]["images"][0]), float)


def _direct(picture: Image.Image) -> np.ndarray:
    """The same by the network alone, without ComfyUI."""
    net = load_kl(ROOT / "demo" / "checkpoints" / "kl.safetensors").net
    x = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        y = net.decode(net.encode(x)[0])
    return ((y.clamp(-1, 1) + 1) * 127.5).round()[0].permute(1, 2, 0).numpy()


# Of one tile: pixels that are encoded, and pixels that are decoded.
TILES = {"tile_size": 256, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}


@pytest.mark.parametrize(("kind", "sizes"), [("", {}), ("Tiled", TILES)])
def test_core_encode_and_decode_round_trip(comfy, book, kind, sizes):
    back = _round_trip(comfy, book[0], kind, **sizes)
    assert np.abs(back - _direct(book[0])).max() <= 2
    small = back.reshape(64, 4, 64, 4, 3).mean((1, 3))
    assert np.abs(small - np.asarray(book[0], float)).mean() < 8, "no likeness"


def test_compare_takes_a_list_as_cells_and_names_what_differs(comfy):
    floats = {"class_type": "CreateList", "inputs.input0": ["20", 0], "inputs.input1": ["21", 0]}
    prompt = graph(
        n4={"threshold": ["22", 0]},
        n7={"image_1": ["6", 0], "report_1": ["4", 1], "image_2": None, "report_2": None, "labels": "first"},
        n9={"class_type": "PreviewAny", "source": ["7", 1]},
        n20={"class_type": "PrimitiveFloat", "value": 0.5},
        n21={"class_type": "PrimitiveFloat", "value": 1.01},
        n22=floats,
    )
    outputs = comfy.run(prompt)
    table = outputs["9"]["text"][0]
    assert "| first" in table and "| FastHybrid threshold 1.01" in table
    assert comfy.picture(outputs["8"]["images"][0]).width > 700


def test_own_files_in_the_model_folder(comfy):
    folder = comfy.base / "models" / "fastar"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "demo" / "checkpoints" / "mar.safetensors", folder / "mine.safetensors")
    shutil.copy(ROOT / "demo" / "checkpoints" / "kl.safetensors", folder / "my-kl.safetensors")
    (folder / "notes.safetensors").write_text("not weights at all")
    try:
        options = comfy.get("/object_info/FastARLoadMAR")["FastARLoadMAR"]["input"]["required"]["checkpoint"]
        menu = options[1]["options"]
        assert menu[0] == "demo" and {"mine.safetensors", "notes.safetensors"} <= set(menu)
        assert any(choice.startswith("mar-base (download ") for choice in menu)
        comfy.run(graph(n1={"checkpoint": "mine.safetensors", "decoder": "my-kl.safetensors"}))
        for name in ("my-kl.safetensors", "notes.safetensors"):
            assert comfy.complaint(graph(n1={"checkpoint": name})).startswith(f"checkpoint: {name}")
    finally:
        for name in ("mine", "my-kl", "notes"):
            (folder / f"{name}.safetensors").unlink()


# ------------------------------------------------------------------------------------------------ BitDance, tiny files


@pytest.fixture(scope="module")
def bitdance(comfy):
    """Files in the model folder: an ImageNet model with its autoencoder inside, and a model of prompts."""
    folder = comfy.base / "models" / "fastar"
    folder.mkdir(parents=True, exist_ok=True)
    block_models.one_file(folder / "bitdance.safetensors", label_set="imagenet-1k")
    shutil.copytree(block_models.FOLDER / "native", folder / "bitdance-prompts")
    comfy.get("/object_info/FastARLoadBitDance")  # reads the folder again
    yield
    (folder / "bitdance.safetensors").unlink()
    shutil.rmtree(folder / "bitdance-prompts")


def bitdance_graph(**changes) -> dict:
    """Loader 1, condition 2, sampler 3, decoded 4 and saved by 5."""
    few = {"diffusion_steps": 3, "diffusion_steps_end": 3, "cfg": 2.0, "width": 8, "height": 8, "preset": "custom"}
    nodes = {
        "1": (
            "FastARLoadBitDance",
            {**widgets("FastARLoadBitDance"), "checkpoint": "bitdance.safetensors", "decoder": "auto"},
        ),
        "2": ("FastARClassLabel", {**widgets("FastARClassLabel"), "labels": "1, 2"}),
        "3": ("FastARBitDanceSampler", {**widgets("FastARBitDanceSampler"), **few, "seed": 7}),
        "4": ("VAEDecode", {"samples": ["3", 0], "vae": ["1", 1]}),
        "5": ("SaveImage", {"images": ["4", 0], "filename_prefix": "bitdance"}),
    }
    prompt = {key: {"class_type": kind, "inputs": dict(inputs)} for key, (kind, inputs) in nodes.items()}
    prompt["3"]["inputs"] |= {"model": ["1", 0], "condition": ["2", 0]}
    for key, inputs in changes.items():
        node = prompt.setdefault(key[1:], {"class_type": inputs.get("class_type"), "inputs": {}})
        node["inputs"] |= {name: value for name, value in inputs.items() if name != "class_type"}
    return prompt


def test_a_bitdance_draws_and_a_part_of_its_image_is_drawn_again(comfy, bitdance):
    outputs = comfy.run(bitdance_graph())
    first, second = (np.asarray(comfy.picture(image)) for image in outputs["5"]["images"])
    assert first.shape == (8, 8, 3) and first.std() > 1 and not np.array_equal(first, second)
    assert "1" not in outputs, "an ImageNet model has one size; the loader says nothing"

    # The latent through core's nodes: encoded from an image of another size, half of it drawn again.
    edit = {
        "n6": {"class_type": "EmptyImage", "width": 20, "height": 30, "batch_size": 1, "color": 0x3366CC},
        "n7": {"class_type": "VAEEncode", "pixels": ["6", 0], "vae": ["1", 1]},
        "n8": {"class_type": "SolidMask", "value": 1.0, "width": 8, "height": 8},
        "n9": {"class_type": "SetLatentNoiseMask", "samples": ["7", 0], "mask": ["8", 0]},
    }
    whole = comfy.run(bitdance_graph(**edit, n3={"latent_image": ["9", 0]}))
    again = [np.asarray(comfy.picture(image)) for image in whole["5"]["images"]]
    assert np.array_equal(again[0], first), "everything was masked"


def test_a_bitdance_reads_prompts_in_shapes_that_are_not_square(comfy, bitdance):
    prompt = {"class_type": "FastARPrompt", **widgets("FastARPrompt"), "text": "a red house"}
    changes = bitdance_graph(n1={"checkpoint": "bitdance-prompts"}, n3={"height": 16})
    changes["2"] = {"class_type": prompt.pop("class_type"), "inputs": prompt}
    (image,) = comfy.run(changes)["5"]["images"]
    assert np.asarray(comfy.picture(image)).shape == (16, 8, 3)


def test_what_cannot_be_on_a_bitdance_is_a_sentence(comfy, bitdance):
    tiled = {"class_type": "VAEDecodeTiled", "samples": ["3", 0], "vae": ["1", 1], **TILES}
    said = comfy.complaint(bitdance_graph(n6=tiled, n5={"images": ["6", 0]}))
    assert said.startswith("samples: ") and "in tiles" in said, said

    line = {"class_type": "FastARAnySampler", "model": ["1", 0], "condition": ["2", 0], "seed": 7}
    reasons = {
        "bitdance: parallel=4": "parallel: exact parallel decoding",
        "lazymar": "sampler: lazymar works with a MAR",
    }
    for sampler, wanted in reasons.items():
        prompt = bitdance_graph(n6={**line, "sampler": sampler}, n4={"samples": ["6", 0]})
        said = comfy.complaint(prompt)
        assert wanted in said, said
