"""Every node of ComfyUI that takes a VAE, with one of this pack: it works, or ends in one sentence.

A node of a newer ComfyUI that is on none of the lists fails the first test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from comfy_host import ROOT, Comfy, Missing, widgets
from safetensors import safe_open

LOADERS = {
    "kl": ("FastARLoadMAR", "demo"),
    "vq": ("FastARLoadLlamaGen", "demo-llamagen"),
    "binary": ("FastARLoadBitDance", "demo-bitdance"),
}
SIDE = 64  # of an image, in pixels
# Its latents [C, h, w], in the size that each model encodes; a position is 8 pixels, and is decoded to 32.
LATENTS = {"kl": [8, 8, 8], "vq": [8, 16, 16], "binary": [16, 8, 8]}
DECODED = 32

# What a node is for decides what it does with a VAE of images.
OF_IMAGES = {
    "InpaintModelConditioning",
    "SelectVAEDevice",
    "VAEDecode",
    "VAEDecodeTiled",
    "VAEEncode",
    "VAEEncodeForInpaint",
    "VAEEncodeTiled",
}
SAVING = {"CheckpointSave", "ImageOnlyCheckpointSave", "VAESave"}
# They put latents into a condition of another image model, which says itself if it cannot read them; most
# of these encode, and the ControlNets keep the VAE until the model samples.
OF_OTHER_IMAGE_MODELS = {
    "ControlNetApplyAdvanced",
    "ControlNetApplySD3",
    "ControlNetInpaintingAliMamaApply",
    "InstructPixToPixConditioning",
    "MakeTrainingDataset",
    "QwenImageDiffsynthControlnet",
    "StableCascade_StageC_VAEEncode",
    "StableCascade_SuperResolutionControlnet",
    "StableZero123_Conditioning",
    "StableZero123_Conditioning_Batched",
    "SUPIRApply",
    "TextEncodeBooguEdit",
    "TextEncodeJoyImageEdit",
    "TextEncodeMageFlowEdit",
    "TextEncodeQwenImageEdit",
    "TextEncodeQwenImageEditPlus",
    "TextEncodeZImageOmni",
    "TripoSplatConditioning",
    "ZImageFunControlnet",
}
OF_VIDEOS = {
    "ARVideoI2V",
    "BerniniConditioning",
    "CosmosImageToVideoLatent",
    "CosmosPredict2ImageToVideoLatent",
    "HunyuanImageToVideo",
    "HunyuanVideo15ImageToVideo",
    "HunyuanVideo15SuperResolution",
    "Kandinsky5ImageToVideo",
    "LTXVImgToVideo",
    "MiniMaxH3ImageToVideo",
    "MiniMaxH3ReferenceToVideo",
    "SV3D_Conditioning",
    "SVD_img2vid_Conditioning",
    "VOIDInpaintConditioning",
    "Wan22FunControlToVideo",
    "Wan22ImageToVideoLatent",
    "WanAnimate2ToVideo",
    "WanAnimateToVideo",
    "WanCameraImageToVideo",
    "WanDancerVideo",
    "WanFirstLastFrameToVideo",
    "WanFunControlToVideo",
    "WanFunInpaintToVideo",
    "WanHuMoImageToVideo",
    "WanImageToVideo",
    "WanInfiniteTalkToVideo",
    "WanMoveTrackToVideo",
    "WanPhantomSubjectToVideo",
    "WanSCAILToVideo",
    "WanSoundImageToVideo",
    "WanSoundImageToVideoExtend",
    "WanTrackToVideo",
    "WanVaceToVideo",
}
OF_SOUNDS = {
    "LTXVAudioVAEEncode",
    "LTXVReferenceAudio",
    "VAEDecodeAudio",
    "VAEDecodeAudioTiled",
    "VAEEncodeAudio",
}
# What they look for in the VAE.
BY_NAMES = {
    "LTXVAddGuide": "frames",
    "LTXVAudioVAEDecode": "output_sample_rate",
    "LTXVEmptyLatentAudio": "latent_frequency_bins",
    "LTXVImgToVideoInplace": "frames",
    "LTXVLatentUpsampler": "per_channel_statistics",
    "Trellis2UpsampleStage": "upsample_shape",
    "TripoSplatSamplingPreview": "gaussians_per_point",
    "VAEDecodeHunyuan3D": "num_chunks, octree_resolution",
    "VAEDecodeTripoSplat": "gaussians_per_point",
    "VaeDecodeShapeTrellis": "resolution",
    "VaeDecodeStructureTrellis2": "decode_structure",
    "VaeDecodeTextureTrellis": "decode_tex_slat",
}
# They refuse another input first, in a sentence of core's.
REFUSED_BEFORE = {
    "MiniMaxH3AddGuide": "expects a MiniMax H3 AV latent",
    "WanUni3CControlnetApply": "not a Uni3C ControlNet",
}
# It samples with a model of poses right after encoding, for which nothing stands in here.
NOT_RUN = {"SDPoseKeypointExtractor"}
KNOWN = {
    *OF_IMAGES,
    *SAVING,
    *OF_OTHER_IMAGE_MODELS,
    *OF_VIDEOS,
    *OF_SOUNDS,
    *BY_NAMES,
    *REFUSED_BEFORE,
    *NOT_RUN,
}

SOURCES = {"VAE": ["1", 1], "IMAGE": ["image", 0], "MASK": ["mask", 0], "AUDIO": ["audio", 0], "LATENT": ["latent", 0]}
WIDGETS = ("INT", "FLOAT", "FLOAT,INT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
# What a node needs beside the values of its defaults.
SPECIAL: dict[str, dict[str, Any]] = {
    "LTXVImgToVideo": {"length": 9},
    "Trellis2UpsampleStage": {"shape_latent": ["meshes", 0]},
    "VaeDecodeShapeTrellis": {"samples": ["meshes", 0]},
    "VaeDecodeTextureTrellis": {"samples": ["meshes", 0]},
    "WanInfiniteTalkToVideo": {"previous_frames": None},
}


class WithStandIns(Comfy):
    def _copy_example(self) -> None:
        super()._copy_example()
        (self.base / "custom_nodes" / "stand-ins").symlink_to(ROOT / "tests/lib/stand_ins", target_is_directory=True)


@pytest.fixture(scope="module")
def host() -> Iterator[Comfy]:
    try:
        server = WithStandIns()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


@pytest.fixture(scope="module")
def nodes(host) -> dict[str, Any]:
    """/object_info of all nodes that are not of this pack."""
    return {name: about for name, about in host.get("/object_info").items() if not name.startswith("FastAR")}


def takes_a_vae(about: dict[str, Any]) -> bool:
    """Also where the input is one of several types, or belongs to a choice of another input."""
    return '"VAE"' in json.dumps(about["input"]).replace(",", '"')


def value_of(kind: Any, about: dict[str, Any]) -> Any:
    """Of an input that is no socket: its default, or the first value that it takes."""
    if isinstance(kind, list):
        return about.get("default", kind[0])
    if kind in ("COMBO", "COMFY_DYNAMICCOMBO_V3"):
        first = about["options"][0]
        return about.get("default", first["key"] if isinstance(first, dict) else first)
    return about.get("default", {"STRING": "", "BOOLEAN": False}.get(kind, about.get("min", 1)))


def prompt_for(node: str, about: dict[str, Any], loader: str = "kl") -> dict[str, Any]:
    """A node with a VAE of this pack, every image, mask, sound and latent that it takes, and stand-ins for models."""
    prompt = sources(loader)
    inputs: dict[str, Any] = {}
    for group in ("required", "optional"):
        for name, (kind, *more) in about["input"].get(group, {}).items():
            options = more[0] if more else {}
            if kind in SOURCES:
                inputs[name] = SOURCES[kind]
            elif kind == "COMFY_AUTOGROW_V3":
                template = options["template"]
                ((item, *_),) = template["input"]["required"].values()
                first = template["names"][0] if "names" in template else f"{template['prefix']}0"
                inputs[f"{name}.{first}"] = SOURCES[item]
            elif isinstance(kind, list) or kind in WIDGETS:
                inputs[name] = value_of(kind, options)
            elif group == "required":
                prompt[kind] = {"class_type": "StandIn", "inputs": {"kind": kind}}
                inputs[name] = [kind, 0]

    inputs |= {name: SIDE for name in ("width", "height") if name in inputs}
    inputs |= {"length": 5} if "length" in inputs else {}
    inputs |= SPECIAL.get(node, {})
    prompt["node"] = {"class_type": node, "inputs": {name: v for name, v in inputs.items() if v is not None}}
    for i, _ in enumerate(about["output"]):
        prompt[f"told {i}"] = {"class_type": "Tell", "inputs": {"value": ["node", i]}}
    return prompt


def sources(loader: str) -> dict[str, Any]:
    """A loader of this pack, and what else is connected."""
    node, checkpoint = LOADERS[loader]
    recorded = {"checkpoint": checkpoint, "decoder": "auto", "dtype": "auto", "allow_download": False, "speed": "plain"}
    recorded |= {"vq": {"grid": "auto"}, "kl": {"weights": "auto"}, "binary": {"weights": "auto"}}[loader]
    return {
        "1": {"class_type": node, "inputs": recorded},
        "image": {"class_type": "EmptyImage", "inputs": {"width": SIDE, "height": SIDE, "batch_size": 1, "color": 99}},
        "mask": {"class_type": "SolidMask", "inputs": {"width": SIDE, "height": SIDE, "value": 1.0}},
        "audio": {"class_type": "EmptyAudio", "inputs": {"duration": 0.1, "sample_rate": 44100, "channels": 2}},
        "latent": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["1", 1]}},
        "meshes": {"class_type": "StandIn", "inputs": {"kind": "LATENT OF MESHES"}},
    }


def told(outputs: dict[str, Any]) -> list[Any]:
    """What the nodes Tell got, in the order of the sockets."""
    return [json.loads(outputs[name]["text"][0]) for name in sorted(outputs) if name.startswith("told")]


def run(host: Comfy, nodes: dict[str, Any], node: str, loader: str = "kl") -> list[Any]:
    return told(host.run(prompt_for(node, expect_there(host, nodes, node), loader)))


def expect_there(host: Comfy, nodes: dict[str, Any], node: str) -> dict[str, Any]:
    if node not in nodes:
        pytest.skip(f"ComfyUI {host.version} has no {node}")
    return nodes[node]


def sentence(host: Comfy, nodes: dict[str, Any], node: str, loader: str = "kl") -> str:
    """The UserError in which a node ends."""
    entry = host.wait(host.queue(prompt_for(node, expect_there(host, nodes, node), loader)))
    assert host.exception_type(entry) == "fastar.UserError", host.failure(entry) or "it ran"
    return host.failure(entry).strip()


def test_every_node_with_a_vae_is_on_a_list(nodes):
    found = {name for name, about in nodes.items() if takes_a_vae(about)} - {"AsCores"}
    assert len(found) > 60 and not found - KNOWN, "decide what each does, and put it on a list"


@pytest.mark.parametrize("loader", LOADERS)
def test_it_is_cores_vae_with_all_of_its_names(host, loader):
    prompt = sources(loader) | {"compared": {"class_type": "AsCores", "inputs": {"vae": ["1", 1]}}}
    found = json.loads(host.run(prompt)["compared"]["text"][0])

    # The two that nodes for sounds and videos read.
    assert found.pop("missing") == [["audio_sample_rate", "ValueError"], ["downscale_index_formula", "UserError"]]
    assert found.pop("names") > 40 and found.pop("images at once") >= 1
    assert found == {
        "is core's": True,
        "bytes": 0,
        "dynamic": False,
        "frames": None,
        "pixels": [8, DECODED],
        "dtypes": ["torch.float32"] * 3,
        "by hand": 0.0,
        "uncropped": [1, 9, 9, 3],
    }


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("node", sorted(OF_IMAGES))
def test_nodes_of_images_work(host, nodes, node, loader):
    if loader == "binary" and node.endswith("Tiled"):
        assert "normalises over the whole image" in sentence(host, nodes, node, loader)
        return

    shape = LATENTS[loader]
    latents = {"samples": [1, *shape]}
    masked = {**latents, "noise_mask": [1, 1, SIDE, SIDE]}
    made = run(host, nodes, node, loader)
    if node.startswith("VAEDecode"):
        assert made == [[1, DECODED * shape[1], DECODED * shape[2], 3]]
    elif node == "VAEEncodeForInpaint":
        assert made == [masked]
    elif node == "InpaintModelConditioning":
        assert made[2] == masked
    elif node == "SelectVAEDevice":
        assert made == ["FastARVAE"]
    else:
        assert made == [latents]


@pytest.mark.parametrize(
    ("node", "loader"), [("VAEDecodeTiled", "kl"), ("VAEDecodeTiled", "vq"), ("VAEEncodeTiled", "vq")]
)
def test_tiles_smaller_than_an_image_of_the_demo_are_refused(host, nodes, node, loader):
    """The tokenizer reads and writes 128 pixels here, the KL autoencoder 64: one tile."""
    prompt = prompt_for(node, expect_there(host, nodes, node), loader)
    prompt["node"]["inputs"] |= {"tile_size": 64, "overlap": 32}
    entry = host.wait(host.queue(prompt))
    assert host.exception_type(entry) == "fastar.UserError", host.failure(entry) or "it ran"
    assert "; take VAE" in host.failure(entry)


@pytest.mark.parametrize(("node", "socket"), [("VAEEncodeForInpaint", 0), ("InpaintModelConditioning", 2)])
def test_a_sampler_draws_what_an_inpainting_node_masks(host, nodes, node, socket):
    """The left half; the right one stays as it was encoded."""
    prompt = prompt_for(node, expect_there(host, nodes, node))
    prompt = {name: about for name, about in prompt.items() if not name.startswith("told")}
    prompt["node"]["inputs"]["grow_mask_by"] = 0

    size = {"width": SIDE, "height": SIDE}
    joined = {"destination": ["none", 0], "source": ["left", 0], "x": 0, "y": 0, "operation": "add"}
    labels = {"labels": "cat", "label_set": "picture-book", "images_per_label": 1, "add_label": "none"}
    asked = {"model": ["1", 0], "condition": ["labels", 0], "seed": 7, "steps": 4, "diffusion_steps": 4}
    asked["latent_image"] = ["node", socket]
    more = {
        "none": ("SolidMask", {**size, "value": 0.0}),
        "left": ("SolidMask", {**size, "width": SIDE // 2, "value": 1.0}),
        "mask": ("MaskComposite", joined),
        "labels": ("FastARClassLabel", labels),
        "drawn": ("FastARMARSampler", {**widgets("FastARMARSampler"), **asked}),
        "changes": ("Changes", {"before": ["node", socket], "after": ["drawn", 0]}),
    }
    prompt |= {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in more.items()}
    columns = json.loads(host.run(prompt)["changes"]["text"][0])
    assert min(columns[:4]) > 1e-2 and max(columns[4:]) < 1e-5


@pytest.mark.parametrize("loader", LOADERS)
def test_latents_that_core_enlarged_are_decoded_larger(host, loader):
    by = {"samples": ["latent", 0], "upscale_method": "bicubic", "scale_by": 2.0}
    prompt = sources(loader) | {
        "larger": {"class_type": "LatentUpscaleBy", "inputs": by},
        "node": {"class_type": "VAEDecode", "inputs": {"samples": ["larger", 0], "vae": ["1", 1]}},
        "told": {"class_type": "Tell", "inputs": {"value": ["node", 0]}},
    }
    side = 2 * DECODED * LATENTS[loader][1]
    assert told(host.run(prompt)) == [[1, side, side, 3]]


@pytest.mark.parametrize("node", sorted(SAVING))
def test_saving_nodes_write_the_weights(host, nodes, node):
    host.run(prompt_for(node, expect_there(host, nodes, node)))
    (file,) = (host.base / "output").rglob({"VAESave": "vae/*"}.get(node, "checkpoints/*") + ".safetensors")
    with safe_open(file, "pt") as opened:
        assert "fastar_groups" in opened.keys() and "decoder.conv_in.weight" in opened.keys()
    file.unlink()


@pytest.mark.parametrize("node", sorted(OF_OTHER_IMAGE_MODELS))
def test_nodes_of_other_image_models_get_latents(host, nodes, node):
    assert run(host, nodes, node)


@pytest.mark.parametrize("node", sorted(OF_VIDEOS))
def test_nodes_for_videos_end_in_a_sentence(host, nodes, node):
    assert sentence(host, nodes, node).endswith("this node is for videos; connect a VAE for videos.")


@pytest.mark.parametrize("node", sorted(OF_SOUNDS))
def test_nodes_for_sounds_end_in_a_sentence(host, nodes, node):
    assert sentence(host, nodes, node).endswith("this node is for sounds; connect a VAE for sounds.")


@pytest.mark.parametrize(
    ("node", "loader"), [*((node, "kl") for node in BY_NAMES), *(("VAEDecodeTripoSplat", loader) for loader in LOADERS)]
)
def test_nodes_that_look_for_a_name_end_in_a_sentence(host, nodes, node, loader):
    if node == "LTXVLatentUpsampler" and host.version.startswith("0.27"):
        pytest.skip("ComfyUI 0.27 reads the model before the VAE, and the model of this test is a stand-in")

    assert sentence(host, nodes, node, loader) == (
        f"vae: this node needs {BY_NAMES[node]!r}, which a VAE of FastAR does not have, because it is for single "
        "images only; connect a different VAE."
    )


@pytest.mark.parametrize("node", REFUSED_BEFORE)
def test_nodes_that_refuse_another_input_first(host, nodes, node):
    assert REFUSED_BEFORE[node] in host.complaint(prompt_for(node, expect_there(host, nodes, node)))
