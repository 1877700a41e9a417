"""Sampler nodes, one for each sampler of the registry, and the node LazyMAR Cache.

The classes of the sampler nodes hold mainly texts. :class:`_Sampler` holds what these nodes have in common, and
``running`` runs the samplers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from comfy_api.v0_0_2 import io

from ..networks.torch_state import in_own_state
from ..runs import presets, registry
from ..runs.labels import unknown_words
from ..runs.registry import SAMPLERS, Entry, plain_sampler
from ..samplers.mar.gtr.settings import GtRSettings
from ..samplers.mar.gtr.stages import QUARTERS
from ..samplers.mar.lazy.settings import CacheSettings
from ..samplers.settings import in_words, knobs, settings_from
from .caches import CachePlan, expect_cache
from .running import ModelFirst, Sockets, expect_loaded, loaders_of, reported, run, texts_of
from .schema import (
    CACHE,
    HIDDEN,
    LATENT_SAMPLERS,
    RECOMMENDS,
    REPORT,
    checked_first_image,
    checked_preset,
    checked_switch,
    condition_input,
    explained,
    first_image_widget,
    output,
    preset_widget,
    schema,
    seed_widget,
    setting_widgets,
)
from .sent import PLAIN, PRESETS, RECOMMENDED, expect_removed_to_hold, facts_of, settings_sent, take_removed


def sampled(vae: str = "the model's loader") -> list[io.Output]:
    """Outputs of a sampler; ``vae`` is the loader whose VAE decodes the latent."""
    return [
        output(
            io.Latent,
            "latent",
            f"The generated images as a latent. Decode the latent with VAE Decode and the vae of {vae}.",
        ),
        output(
            REPORT,
            "report",
            "A report of what the sampler did: time, passes, accepted drafts, settings. Connect the report to "
            "Compare, Token Map or Report.",
        ),
    ]


_CACHE = CACHE.Input(
    "cache",
    optional=True,
    tooltip="Connect LazyMAR Cache to reuse most of the transformer's work from one AR step to the next. If nothing "
    "is connected, the transformer computes all tokens again in every AR step.",
)
_SOFT_EDGE = "The area under the soft edge of a mask is regenerated too."
_SEED_IN_BATCH = "An image does not depend on the other images of its batch."

_GUIDED_BY_IMAGE = "If the condition comes from Image and Prompt, turning guidance off saves only a third of the work."


def _edit(vae: str, mask: str, more: str) -> list[io.Input]:
    """The sockets for an image to inpaint.

    Args:
        vae: the loader whose VAE encodes the image.
        mask: the tooltip of the socket *mask*.
        more: what the help page adds to the tooltip of the socket *latent_image*.
    """
    latent_image = io.Latent.Input(
        "latent_image",
        optional=True,
        tooltip=f"The image to inpaint, from VAE Encode with the vae of {vae}. Also connect a mask to the input named "
        "mask, or use Set Latent Noise Mask. If you connect an Empty Latent Image instead, nothing is inpainted: the "
        "empty latent only sets the number of images, and must have the size of the images that the model generates.",
    )
    where = io.Mask.Input("mask", optional=True, tooltip=mask)
    return [explained(latent_image, more), where]


_LABEL_OR_TEXT = (
    "What to generate: one label or prompt per image. Connect Class Label or, for LlamaGen's text-to-image models, "
    "LlamaGen Prompt."
)


class _Sampler(ModelFirst):
    """The node of a sampler of the registry. The classes that derive from this class hold mainly texts."""

    sampler: ClassVar[str]  # name in the registry
    node_id: ClassVar[str]  # the registry's
    description: ClassVar[str]
    aliases: ClassVar[list[str]]
    # The sockets for models: name to tooltip. {}: one socket named "model", with a tooltip made from the family.
    models: ClassVar[dict[str, str]] = {}
    condition: ClassVar[str] = ""  # tooltip of the socket; "": the family's condition_help
    # Whether the node has the presets of an accelerated sampler, and the switch *enabled*.
    preset: ClassVar[bool] = True
    vae: ClassVar[str] = "the model's loader"  # the loader whose VAE encodes and decodes images

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # To run a node, ComfyUI derives a class from the node's class, with a copy of all attributes, and locks them.
        # Such a class already has its ``node_id``.
        if "node_id" in vars(cls):
            return

        entry = SAMPLERS[cls.sampler]
        cls.node_id = entry.node
        family = entry.family
        usual = family.model_help or f"The model to sample, from {loaders_of(family.kind)}."
        cls.models = cls.models or {"model": usual}

    @classmethod
    def optional(cls) -> list[io.Input]:
        """Optional sockets."""
        entry = SAMPLERS[cls.sampler]
        edit = _edit(cls.vae, entry.family.mask_help, entry.family.image_help)
        return [_CACHE, *edit] if entry.caches else edit

    @classmethod
    def define_schema(cls) -> io.Schema:
        entry = SAMPLERS[cls.sampler]

        # Sockets.
        family = entry.family
        socket = io.Custom(family.socket)
        sockets = [socket.Input(name, tooltip=tooltip) for name, tooltip in cls.models.items()]
        sockets.append(condition_input(cls.reads(), cls.condition or family.condition_help))

        # Widgets: seed, switch, preset, settings.
        main = [seed_widget(optional=False)]
        if cls.preset:
            plain = f"{plain_sampler(family).title} Sampler"
            switch = io.Boolean.Input(
                "enabled",
                default=True,
                optional=True,
                tooltip=f"When this is off, the node works like {plain} with the same seed: it runs without "
                f"acceleration, and uses only the settings that {plain} also has. To turn the acceleration off, use "
                "this setting and do not bypass the node, because a bypassed sampler breaks the workflow.",
            )
            main.append(switch)

        main.append(preset_widget(cls.options()))
        main += setting_widgets(entry.settings, cls.options())
        main.append(first_image_widget())

        return schema(
            node_id=cls.node_id,
            display_name=f"{entry.title} Sampler",
            category="FastAR/sample",
            description=cls.description,
            search_aliases=cls.aliases,
            sockets=sockets,
            widgets=main,
            optional=cls.optional(),
            outputs=sampled(cls.vae),
            hidden=HIDDEN,
        )

    @classmethod
    def reads(cls) -> set[str]:
        """Kinds of conditions that the models of the sampler read. The registry has LlamaGen's sampler twice, as
        "llamagen" and as "tar"; the node reads the conditions of both entries.
        """
        run = SAMPLERS[cls.sampler].run

        kinds: set[str] = set()
        for entry in SAMPLERS.values():
            if entry.run is run:
                for family in entry.families:
                    kinds.update(registry.FAMILIES[family].reads)
        return kinds

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The choices of the preset widget."""
        return PRESETS if cls.preset else PLAIN

    @classmethod
    @in_own_state
    def execute(
        cls, condition: Any, seed: Any, enabled: Any = True, first_image: Any = 0, **inputs: Any
    ) -> io.NodeOutput:
        entry = SAMPLERS[cls.sampler]

        # 1. Take the models and the optional sockets out of ``inputs``. Only widgets remain there.
        field = "target" if entry.needs_draft else "model"
        loaded = expect_loaded(inputs.pop(field), field, entry.family.kind)
        draft = inputs.pop("draft", None)
        if entry.needs_draft:
            expect_loaded(draft, "draft", entry.family.kind)

        optional = {socket.id: inputs.pop(socket.id, None) for socket in cls.optional()}
        sockets = Sockets(condition, draft=draft, first_image=checked_first_image(first_image), **optional)

        removed = take_removed(cls, entry.settings, inputs)

        # 2. Make the settings, and the warnings about them.
        facts = facts_of(loaded)
        preset = checked_preset(inputs.pop("preset", cls.options()[0]), cls.options())
        settings, said = settings_sent(entry.settings, cls.options(), preset, facts, inputs)
        expect_removed_to_hold(entry.settings, removed, facts.own_values(settings))
        warnings = [said]
        if sockets.cache is not None:
            _, said = expect_cache(sockets.cache).settings(loaded, settings.steps)
            warnings.append(said)

        if preset == presets.CUSTOM:
            # Compare only the settings that the unaccelerated sampler also has. The other settings of an accelerated
            # sampler choose between speed and likeness, so a value that differs from the file's is no mistake.
            of_model = knobs(plain_sampler(entry.family).settings)
            differing: dict[str, Any] = {}
            for name, value in loaded.recommended.items():
                if name in of_model and name in inputs and value != inputs[name]:
                    differing[name] = value
            if differing:
                warnings.append(f"This model's file recommends {in_words(entry.settings, differing)}.")

        # 3. Run the sampler. If *enabled* is off, run the plain sampler with the settings that both samplers have.
        if not checked_switch(enabled, "enabled"):
            entry = plain_sampler(entry.family)
            shared = {name: value for name, value in vars(settings).items() if name in knobs(entry.settings)}
            settings = settings_from(entry.settings, shared)

        made = run(entry, loaded, settings, seed, sockets)
        unknown = unknown_words(loaded.model, texts_of(condition))
        return reported(cls, made, warnings, unknown, facts.own_values(settings))


class MARSampler(_Sampler):
    sampler = "mar"
    preset = False
    description = (
        "Generates an image with MAR as published, without acceleration. Use it to see what the accelerated MAR "
        "samplers change."
    )
    aliases = ["masked autoregressive", "mar", "autoregressive sampler", "baseline sampler", "disa", "inpaint"]

    more = {
        "preset": (
            "*recommended* uses the values that the model's file recommends, or else the paper's values. *few steps* "
            "is much faster and gives a different image. We have not measured *few steps* on full-size models. The "
            "preset *fast* of LazyMAR Sampler has the same AR steps, diffusion steps and order, but also uses caches."
        ),
        "seed": _SEED_IN_BATCH,
    }

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return (RECOMMENDED, presets.FEW_STEPS, presets.CUSTOM)


class FastHybridSampler(_Sampler):
    sampler = "fasthybrid"
    description = (
        "Drafts the tokens of several AR steps at once, and refines the drafts that it accepts in only a few guided "
        "steps (FastHybrid, CVPR 2026). The image differs from MAR's image for the same seed, but usually shows the "
        "same subject."
    )
    aliases = ["fast hybrid", "lookahead", "speculative", "accelerated mar", "fasthybrid"]
    more = {
        "preset": (
            "*exact* gives the image of unaccelerated MAR, up to rounding. We measured *balanced* and *fast* on the "
            "demo. For full-size models, *balanced* has the paper's values, and *fast* has a lower *threshold*, which "
            "gives slightly worse images in the paper. On full-size models, both presets make fewer calls of the "
            "diffusion head than MAR, but a run performs more operations in total (docs/full_size.md in the "
            "repository)."
        ),
        "cache": (
            "With the cache or with DiSA (*diffusion_steps_end*), all images of a batch are always at the same AR "
            "step. A batch therefore needs more calls of the diffusion head."
        ),
    }


class LazyMARSampler(_Sampler):
    sampler = "lazymar"
    description = (
        "Runs MAR and reuses features that hardly change from one AR step to the next (LazyMAR, ICCV 2025). Most AR "
        "steps therefore take less work, and the image may differ from MAR's image."
    )
    aliases = ["lazy mar", "feature cache", "token cache", "condition cache", "accelerated mar"]
    more = {
        "preset": (
            "*exact* gives the image of unaccelerated MAR. For full-size models, *balanced* is the configuration "
            "that the paper measured. *fast* also takes fewer AR steps and fewer diffusion steps, and most of its "
            "speed-up comes from the smaller numbers of steps. To see what the caches add, compare *fast* with the "
            "preset *few steps* of MAR Sampler, which has the same steps and order but no caches. We have not "
            "measured *balanced* or *fast* on full-size models."
        ),
        "speculation": "*speculation* works only if *head_cache* is off.",
    }


class CSpDSampler(_Sampler):
    sampler = "cspd"
    vae = "the target's loader"
    description = (
        "A small model drafts the tokens of several AR steps, and a large model verifies these drafts together "
        "(CSpD, 2024). The mode lossless keeps the distribution of the large model exactly; the modes published and "
        "paper only approximate it."
    )
    aliases = ["continuous speculative decoding", "speculative", "draft model", "cspd", "accelerated mar"]
    models = {
        "target": "The large model whose images you want (a MAR, Harmon or UniPic); it verifies the drafts.",
        "draft": "The smaller model, which drafts the tokens. Load it with a second loader of the same kind as the "
        "target's loader. The draft model must have the same kind of tokens, the same grid and the same classes as "
        "the target.",
    }
    more = {
        "preset": (
            "*exact* uses no drafts and gives the image of the target alone. *balanced* and *fast* use the mode "
            "*published*; we measured both presets on the demo."
        ),
        "draft": (
            "For the demo, choose *demo-draft*. The more similar the distributions of the two models are, the more "
            "drafts are accepted."
        ),
        "t_max": "In CSpD, *t_max* applies to both models.",
    }


class GtRSampler(_Sampler):
    sampler = "gtr"
    description = (
        "Divides the tokens into the two colours of a checkerboard, and decides the tokens of one colour in many AR "
        "steps, but the other tokens in only one or two AR steps (GtR, ICLR 2026). GtR takes fewer AR steps and "
        "diffusion steps than MAR, and gives a different image."
    )
    aliases = ["gtr", "generation then reconstruction", "checkerboard", "two-stage", "accelerated mar"]
    more = {
        "preset": (
            "*exact* gives the image of unaccelerated MAR. *balanced* and *fast* also set *steps*, *diffusion_steps*, "
            "*diffusion_steps_end* and *t_max*. For full-size models, *balanced* has the paper's values. Nobody has "
            "measured *fast* on full-size models."
        ),
        "steps": "If *steps* is too large for the number of tokens of the image, the run stops with an error.",
        "diffusion_steps": (
            "In GtR, only the tokens of the first AR step and the tokens with the most detail (see *detail_share*) "
            "get all of these steps. The paper uses 50 steps."
        ),
        "diffusion_steps_end": "In GtR, the whole reconstruction uses this value. The paper uses 20 steps.",
        "order": "In GtR, the stages follow one another, and *order* applies to the tokens within each stage.",
        "mask": "If the images of a batch have different masks, each stage must have the same number of tokens to "
        "regenerate in every image.",
    }

    @classmethod
    def execute(
        cls, condition: Any, seed: Any, enabled: Any = True, first_image: Any = 0, **inputs: Any
    ) -> io.NodeOutput:
        others = [name for name in knobs(GtRSettings) if name != "stages"]
        if "stages" not in inputs and all(name in inputs for name in others):
            inputs["stages"] = QUARTERS  # a prompt that was saved before this setting existed

        return super().execute(condition, seed, enabled, first_image, **inputs)


class LazyMARCache(io.ComfyNode):
    more = {
        "preset": (
            "*exact* caches nothing. For full-size models, *balanced* is the configuration that the paper measured. "
            "If a full-size model takes 64 AR steps, *fast* is the same as *balanced*. We have not measured "
            "*balanced* or *fast* on full-size models."
        ),
    }
    more_of_outputs = {
        "cache": "You can connect this output to several samplers.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARLazyMARCache",
            display_name="LazyMAR Cache",
            category="FastAR/sample",
            description="Adds LazyMAR's caches to a MAR sampler that has a cache input. Use this node to combine "
            "LazyMAR with another method.",
            search_aliases=["lazy mar", "feature cache", "combine accelerators"],
            widgets=[preset_widget(), *setting_widgets(CacheSettings)],
            outputs=[
                output(
                    CACHE,
                    "cache",
                    "The settings of the caches. Connect them to the input named cache of a MAR sampler.",
                )
            ],
            hidden=[io.Hidden.prompt],
        )

    @classmethod
    @in_own_state
    def execute(cls, preset: Any = PRESETS[0], **values: Any) -> io.NodeOutput:
        removed = take_removed(cls, CacheSettings, values)
        settings_from(CacheSettings, values)  # checks them
        return io.NodeOutput(CachePlan(checked_preset(preset), values, removed))


class LlamaGenSampler(_Sampler):
    sampler = "llamagen"
    preset = False
    description = (
        "Generates an image with LlamaGen, Janus or Tar as published: one token after another, row by row. Use it to "
        "see what the accelerated samplers change."
    )
    aliases = ["llamagen", "tar", "autoregressive sampler", "token sampler", "raster", "baseline sampler"]
    more = {
        "preset": RECOMMENDS,
        "seed": _SEED_IN_BATCH,
        "cfg": _GUIDED_BY_IMAGE,
        "parallel": "If you set *parallel* to 16, the demo takes 57 passes instead of 256. For a single image on a "
        "GPU, twice the usual value may be faster still. On a CPU, batches of four or more images hardly get faster.",
        "mask": _SOFT_EDGE,
    }


class PARSampler(_Sampler):
    sampler = "par"
    preset = False
    description = (
        "Divides the image into regions and decides one token of every region in each pass (PAR, CVPR 2025). The "
        "sampler needs a PAR model; use it with a LlamaGen only to repeat two experiments of the paper."
    )
    aliases = ["par", "parallelized autoregressive", "parallel decoding", "accelerated llamagen"]
    condition = _LABEL_OR_TEXT
    models = {
        "model": "A PAR model from Load LlamaGen / PAR. A LlamaGen works only if you set 'grouping' to one of the "
        "two ablations (experiments of the paper)."
    }
    more = {
        "preset": RECOMMENDS,
        "cfg_interval": "Each token counts as one step, so one pass is several steps.",
    }


class ZipARSampler(_Sampler):
    sampler = "zipar"
    description = (
        "Starts a row of tokens as soon as the row above is a few tokens ahead, so several rows are decided at the "
        "same time (ZipAR, ICML 2025). It works with LlamaGen, Janus and Tar, without training."
    )
    aliases = ["zipar", "parallel decoding", "spatial locality", "accelerated llamagen", "accelerated tar"]
    more = {
        "preset": (
            "*exact* decides the rows one after another, without acceleration. *balanced* and *fast* make fewer "
            "passes than the unaccelerated sampler, but perform 1 to 5 % more operations. We measured their windows "
            "only on the demo. *PJD* is Parallel Jacobi Decoding (CVPR 2026). In fp32, its images are the same as with "
            "*balanced*; *PJD* makes fewer passes, but computes more tokens in each pass."
        ),
        "cfg": _GUIDED_BY_IMAGE,
        "model": "FastAR refuses a PAR model.",
        "cfg_interval": "Each token counts as one step, so one pass may be several steps.",
        "parallel": "If you set *parallel* to 16, the demo takes 42 passes with a window of 8, instead of 144.",
    }

    @classmethod
    def options(cls) -> tuple[str, ...]:
        return presets.names(SAMPLERS[cls.sampler].settings)


class MuLoSDSampler(_Sampler):
    sampler = "mulosd"
    vae = "the target's loader"
    condition = f"{_LABEL_OR_TEXT} For Tar, connect the node Tar Prompt or the node Image to Codes."
    description = (
        "Drafts a small image, enlarges the draft, and resamples only the tokens that the large model finds unlikely "
        "(MuLo-SD, CVPR 2026). The image differs from the image of the large model alone."
    )
    aliases = [
        "mulo-sd",
        "mulosd",
        "multi-scale",
        "upscale",
        "speculative decoding",
        "accelerated tar",
        "accelerated llamagen",
    ]
    models = {
        "target": "The large model whose images you want: a de-tokenizer of Tar for 512 or 1024 pixels, or a LlamaGen.",
        "draft": "The small model, of the same kind and with the same decoder as the target. The side of its images "
        "must be a half, a third or a quarter of the side of the target's images. Usual for Tar: the de-tokenizer "
        "for 256 pixels.",
    }

    more = {
        "preset": (
            "*exact* uses no draft and gives the image of the target alone. For full-size models, *balanced* accepts "
            "about 95 % of the draft tokens, and *fast* accepts about 98 %. With *balanced*, the two models take "
            "turns, as in the paper. With *fast*, the small model first drafts the whole small image. Both presets "
            "make far fewer passes than the target alone, but perform 1.5 to 2.3 times as many operations "
            "(docs/full_size.md in the repository)."
        ),
        "upscale_model": "The upscale model may enlarge by any factor; FastAR resizes its result to the target's size.",
    }

    @classmethod
    def optional(cls) -> list[io.Input]:
        upscale_model = io.UpscaleModel.Input(
            "upscale_model",
            optional=True,
            tooltip="The model that enlarges the draft, from the node Load Upscale Model; if the enlarged draft is "
            "sharper, more tokens are accepted. If you connect neither this input nor latent_samplers, the demo's own "
            "latent samplers enlarge drafts of the demo, and bicubic interpolation enlarges all other drafts.",
        )
        latent_samplers = LATENT_SAMPLERS.Input(
            "latent_samplers",
            optional=True,
            tooltip="The two networks from Load Latent Samplers: one enlarges the draft for the large model, and the "
            "other reduces the large model's result for the draft model. Connect this input or upscale_model, but "
            "not both.",
        )

        return [upscale_model, latent_samplers]


class NextStepSampler(_Sampler):
    sampler = "nextstep"
    preset = False
    description = (
        "Generates an image with NextStep, one continuous token after another; flow matching samples each token. To "
        "make it faster, lower diffusion_steps for all tokens, or diffusion_steps_end for the later tokens (DiSA)."
    )
    aliases = ["nextstep", "flow matching", "continuous tokens", "text to image", "edit image", "disa", "inpaint"]
    more = {
        "preset": RECOMMENDS,
        "condition": (
            "Guidance moves the image away from a negative text. With Prompt (FastAR), the negative text is the text "
            "of *negative*. The authors use a list of faults, for example *lowres, bad anatomy, error, blurry*. For "
            "NextStep-1, the authors also add *masterpiece, film grained, best quality.* to the end of the prompt. "
            "With Image and Prompt, the negative text is always *Copy original image.*, and the setting *freedom* of "
            "Image and Prompt has no effect."
        ),
        "cfg": "At *cfg* 1, the model does not read the negative text.",
        "latent_image": (
            "After VAE Encode, the image must have the *width* and *height* that are set on this node. VAE Decode "
            "also slightly changes pixels outside the mask; Paste Inpainted Area restores these pixels."
        ),
        "mask": _SOFT_EDGE,
    }


class BitDanceSampler(_Sampler):
    sampler = "bitdance"
    preset = False
    description = (
        "Generates an image with BitDance, one block of tokens after another; diffusion samples all bits of a block "
        "together. To make it faster, lower diffusion_steps for all blocks, or diffusion_steps_end for the later "
        "blocks (DiSA)."
    )
    aliases = ["bitdance", "binary tokens", "block autoregressive", "text to image", "disa", "inpaint"]
    more = {
        "preset": RECOMMENDS,
        "condition": "FastAR refuses a negative prompt.",
        "latent_image": (
            "After VAE Encode, the image must have the *width* and *height* that are set on this node. VAE Decode "
            "also slightly changes pixels outside the mask; Paste Inpainted Area restores these pixels."
        ),
        "mask": _SOFT_EDGE,
    }
    more_of_outputs = {
        "latent": "Do not use VAE Decode (Tiled), which stops with an error for this latent.",
    }


def _node_of(entry: Entry) -> type[io.ComfyNode]:
    """A node for a sampler that a family adds. The first paragraph of the docstring of the sampler's function becomes
    the description of the node.
    """
    description = " ".join((entry.run.__doc__ or "").split("\n\n")[0].split())
    about = {
        "sampler": entry.name,
        "description": description,
        "aliases": [entry.name, entry.title],
        "preset": not entry.baseline,
    }
    return type(f"{entry.title}Sampler", (_Sampler,), about)


# Samplers with a class above.
_OWN = {node.sampler for node in _Sampler.__subclasses__()}
NODES: list[type[io.ComfyNode]] = [
    MARSampler,
    FastHybridSampler,
    LazyMARSampler,
    LazyMARCache,
    CSpDSampler,
    GtRSampler,
    LlamaGenSampler,
    PARSampler,
    ZipARSampler,
    MuLoSDSampler,
    BitDanceSampler,
    NextStepSampler,
    *(_node_of(entry) for family in registry.FAMILIES.values() for entry in family.samplers if entry.name not in _OWN),
]
