"""NextStep as a family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...model_loaders.catalogue import hub
from ...model_loaders.files.wrappers import AUTO
from ...model_loaders.nextstep.loader import autoencoder_path, expect_latents, load_nextstep, load_nextstep_ae
from ...model_loaders.nextstep.sources import cropped
from ...networks.autoencoder import KLModel
from ...networks.llama import cache_bytes
from ...networks.nextstep import Marks, NextStep, NextStepModel, SourceReader, side_of
from ...networks.ops import unpacking_bytes
from ...samplers.chain import MODULATION_BUDGET
from ...samplers.conditioning import ImagePromptCondition
from ...samplers.editing import Edit
from ...samplers.nextstep.canvas import NextStepCondition, expect_device, expect_edit, negative_of
from ...samplers.nextstep.flow import EM, EM0
from ...samplers.nextstep.nextstep import check, nextstep
from ...samplers.nextstep.settings import CONSTANT, NextStepSettings
from ...samplers.noise import noise_bytes
from ..memory import HEAD, KV_CACHE, NOISE, POSITIONS, TRANSFORMER, weights_by_part
from . import Entry, Family, network_of, token_a_word

# The authors' settings, which their programs have for all models.
_SETTINGS: dict[str, Any] = {"cfg": 7.5, "cfg_img": 1.0, "cfg_schedule": CONSTANT, "time_shift": 1.0}
_NEXTSTEP_1: dict[str, Any] = {"diffusion_steps": 50, "solver": EM, "use_norm": True}
_NEXTSTEP_1_1: dict[str, Any] = {"diffusion_steps": 28, "solver": EM0, "use_norm": False}
_EDIT: dict[str, Any] = {**_NEXTSTEP_1, "cfg_img": 2.0, "time_shift": 3.2}
# Pixels along a side of a latent of the published autoencoder.
_STRIDE = 8

# For the memory estimate: bytes of a number, and buffers that live at once, rounded up, as for blocks of BitDance.
_FP32 = 4
_MLP = 3  # of the inner width of a row
_STREAM = 6  # of the model's width
_ATTENTION = 6  # of all heads
_FINAL_NORM = 2  # of the model's width, fp32
_BLOCK = 8  # of the head's width for a token in a call: the values of a residual block
_MODULATIONS = 3  # those in use, the ones before them, and what they are made of
_STATE = 8  # of the numbers of a token at a step, fp32, beside the head's output of every branch
_DRAFTED_STATE = 20


class _NextStep(Family):
    """Models that draw one continuous token after another."""

    kind = "continuous"
    unit = "tokens"
    socket = "FASTAR_NEXTSTEP"
    decoder = "nextstep-ae"
    load_decoder = staticmethod(load_nextstep_ae)
    condition_help = (
        "What to generate: one prompt per image. Connect Prompt (FastAR) or, for NextStep-1-Large-Edit, Image and "
        "Prompt."
    )
    mask_help = (
        "The area to regenerate; all other tokens stay unchanged. New tokens match the unchanged tokens above them "
        "and to their left, but possibly not the unchanged tokens below them or to their right."
    )

    def further_uses(self, name: str) -> str:
        return ", edits images" if name.endswith("edit") else ""

    # ---------------------------------------------------------------- decoder and images

    def decoder_inside(self, path: Path, device: torch.device, **about: Any) -> KLModel | None:
        inside = autoencoder_path(path)
        return None if inside is None else load_nextstep_ae(inside, AUTO, device, **about)

    def expect_decoder(self, decoder: KLModel, model: NextStepModel) -> None:
        expect_latents(decoder, model)

    def own_reader(self, model: NextStepModel, decoder: KLModel) -> SourceReader:
        return SourceReader(cast(Any, decoder.net), decoder.name, model.net.config.patch, model.usual_size[0])

    def prepared(self, image: Tensor, reader: SourceReader) -> Tensor:
        return cropped(image, reader.side)

    # ---------------------------------------------------------------- published models

    def published(self, model: NextStepModel) -> dict[str, Any]:
        if model.edits:
            return {**_SETTINGS, **_EDIT}
        return {**_SETTINGS, **(_NEXTSTEP_1 if model.is_first else _NEXTSTEP_1_1)}

    def outlined(self, entry: hub.Entry) -> NextStepModel:
        """The ids of marks do not matter here."""
        net: NextStep = network_of(entry)
        marks = Marks(area=0, begin=0, end=0, place=0)
        stride = _STRIDE * net.config.patch
        return NextStepModel(net, entry.id, stride, token_a_word, marks, side_of(entry.id))

    # ---------------------------------------------------------------- sizes

    def classes(self, model: NextStepModel) -> int:
        return 0

    def grid(self, model: NextStepModel, settings: Any = None) -> tuple[int, int]:
        if settings is None:
            return model.grid(None, None)
        return model.grid(settings.height, settings.width)

    def latents(self, model: NextStepModel, settings: Any = None) -> tuple[int, int]:
        height, width = self.grid(model, settings)
        patch = model.net.config.patch
        return height * patch, width * patch

    def sizes(self, model: NextStepModel, stride: int) -> tuple[tuple[int, int], ...]:
        return model.sizes

    def step_numbers(self, model: NextStepModel, settings: Any) -> int:
        height, width = self.grid(model, settings)
        return height * width * model.net.channels

    # ---------------------------------------------------------------- before and during a run

    def own_values(self, model: NextStepModel, settings: Any) -> dict[str, Any]:
        height, width = model.usual_size
        return {"width": width, "height": height}

    def short(self, settings: Any) -> Any:
        """Two diffusion steps of a token."""
        return replace(settings, diffusion_steps=2)

    def expect_device(self, model: NextStepModel, device: torch.device, settings: Any) -> None:
        expect_device(model, device)

    def expect_edit(self, model: NextStepModel, edit: Edit, settings: Any, images: int) -> None:
        expect_edit(model, edit, settings, images)

    def memory(
        self,
        model: NextStepModel,
        condition: Any,
        settings: NextStepSettings,
        edited: bool = False,
        **more: Any,
    ) -> dict[str, int]:
        """Upper bounds; the KV cache has room for the longest row in all branches."""
        net = model.net
        c = net.config
        height, width = model.grid(settings.height, settings.width)
        tokens = height * width
        images = len(condition)
        reads_image = isinstance(condition, ImagePromptCondition)
        branches = 1 + settings.uses_guidance + (settings.uses_guidance and reads_image and settings.cfg_img != 1)
        rows = images * branches
        prefix = _prefix(model, condition)
        size = next(net.parameters()).element_size()

        # Kept during the whole generation.
        out = weights_by_part(cast(Any, model))
        out[KV_CACHE] = cache_bytes(net, rows * (prefix + tokens))
        out[POSITIONS] = _FP32 * 2 * (prefix + tokens) * c.head_dim
        as_drawn_and_in_order = 2
        out[NOISE] = as_drawn_and_in_order * noise_bytes(images, settings.streams(), tokens * c.token)

        # A pass of the language model: the prompts, a token, or of an edit all tokens that it fixes.
        passed = rows * max(prefix, tokens if edited else 1)
        of_a_row = size * (_MLP * c.hidden + _STREAM * c.dim + _ATTENTION * c.heads * c.head_dim)
        out[TRANSFORMER] = passed * (of_a_row + _FP32 * _FINAL_NORM * c.dim)
        if edited:  # the mask of tokens that are fed together, as it is and for the queries of a group
            out[TRANSFORMER] += passed * size * (prefix + tokens) * (1 + c.heads // c.kv_heads)
        out[TRANSFORMER] += unpacking_bytes(model.parts["transformer"])

        # A token in the head: modulations of as many steps as MODULATION_BUDGET allows, a call, and the states of each
        # image.
        of_a_step = rows * net.head.modulation_numbers
        modulations = max(of_a_step, min(MODULATION_BUDGET, of_a_step * settings.diffusion_steps))
        states = images * min(settings.speculation_window, settings.diffusion_steps)
        of_a_state = branches + (_STATE if settings.speculation_window == 1 else _DRAFTED_STATE)
        out[HEAD] = size * (_MODULATIONS * modulations + _BLOCK * branches * states * c.head_width)
        out[HEAD] += _FP32 * of_a_state * states * c.token
        return out


def _prefix(model: NextStepModel, condition: NextStepCondition) -> int:
    """Rows before the first token, of the longest condition: with the marks and the digits of both sizes."""
    around = 16
    texts = {*condition.texts, negative_of(condition)}
    source = model.side**2 if isinstance(condition, ImagePromptCondition) else 0
    return max(len(model.prompt(text)) for text in texts) + source + around


FAMILY = _NextStep(
    name="nextstep",
    words="a NextStep",
    load_file=load_nextstep,
    files="nextstep",
    reads=("prompt", "image prompt"),
    reads_negatives=True,
    one_grid="because width and height set the grid of a NextStep",
    usual_samplers=("nextstep",),
    samplers=(Entry("nextstep", "NextStep", nextstep, check, NextStepSettings, ("nextstep",), baseline=True),),
)
