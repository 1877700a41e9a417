"""Questions about images, which a Janus answers in words."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.v0_0_2 import io

from ..memory import enough_memory
from ..model_loaders.janus.loader import load_janus_head
from ..model_loaders.janus.squares import squared
from ..networks.janus import JanusModel, WordHead
from ..networks.torch_state import in_own_state
from ..runs.answers import AnswerSettings, Words, answer, answer_bytes, expect_reader
from ..runs.images import to_bytes
from ..runs.loading import dtype_name
from ..samplers.settings import settings_from
from ..samplers.tokens.token_noise import TokenNoise
from . import host
from .host.loaded import Loaded, ModelCache
from .preview import Bar, drive
from .readers import READING, placed_reader
from .running import expect_loaded
from .schema import SEED, TOKEN_MODEL, checked_seed, expect_image, expect_text, output, schema, seed_widget, widgets

_QUESTION = "Describe this image in one sentence."


@dataclass(frozen=True, eq=False)
class _Head:
    """The output layer for words, as :class:`.ModelCache` holds it."""

    net: WordHead


_head = ModelCache(host.devices.get_compute_device, host.devices.get_offload_device)

_SEED = "Controls the randomness of the answers. The seed matters only if temperature is above 0."


class AskAboutImage(io.ComfyNode):
    more = {
        "model": "The possible models are Janus-Pro-1B, Janus-Pro-7B, Janus-Pro-R1-7B, Janus 1.3B and Janus-4o-7B. The "
        "file must hold all weights of the model.",
        "image": "FastAR scales an image so that its longer side has 384 pixels, and pads it with grey to a square.",
    }
    more_of_outputs = {
        "answer": (
            "If there are several answers, the node that you connect to this output runs once for each answer. For "
            "example, the subgraph *Describe and Draw (Janus)* connects this output to *text* of Prompt (FastAR)."
        ),
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        image = io.Image.Input(
            "image", tooltip="Images of any size. The model answers the question about each image separately."
        )
        question = io.String.Input(
            "question",
            default=_QUESTION,
            optional=True,
            multiline=True,
            placeholder="what to tell about the image",
            tooltip="A question or a task in plain words; it is the same for all images.",
        )

        return schema(
            node_id="FastARAskAboutImage",
            display_name="Ask about Image",
            category="FastAR/condition",
            description="Answers a question about an image in words, or describes the image, with a Janus. The answer "
            "can be the prompt of another node.",
            search_aliases=["caption", "describe", "interrogate", "image to text", "vision", "vqa", "janus"],
            sockets=[TOKEN_MODEL.Input("model", tooltip="A Janus model, from Load Janus."), image],
            widgets=[question, seed_widget(tooltip=_SEED, more=""), *widgets(AnswerSettings)],
            outputs=[output(io.String, "answer", "One answer for each image.", is_output_list=True)],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @in_own_state
    def execute(
        cls, model: Any, image: Any, question: Any = _QUESTION, seed: Any = SEED, **values: Any
    ) -> io.NodeOutput:
        # 1. Check.
        settings = settings_from(AnswerSettings, values)
        loaded = expect_loaded(model, "model")
        janus: JanusModel = loaded.model
        expect_reader(janus)
        pixels = to_bytes(expect_image(image, "image"))
        number = checked_seed(seed)
        ids = janus.question(expect_text(question, "question"))

        # 2. Read the images, with the tower alone on the device.
        with enough_memory(READING):
            reader = placed_reader(loaded)
            rows = [reader.look(squared(torch.from_numpy(one), reader.side, reader.least)) for one in pixels]

        # 3. Answer image by image; image i uses (seed, i).
        with enough_memory(READING):
            head = _placed_head(loaded, answer_bytes(janus, ids, settings.limit))
        answers: list[str] = []
        bar = Bar()
        for i, seen in enumerate(rows):
            noise = TokenNoise(number, [i])
            run = answer(janus, head.model.net, [seen], ids, settings.words, settings.limit, noise)
            with enough_memory(READING):
                bar.begin(i, len(rows))
                answers.append(drive(_shown(cls, run), bar=bar).text)

        return io.NodeOutput(answers, ui=host.text.output(answers))


def _placed_head(loaded: Loaded[Any], memory: float) -> Loaded[Any]:
    """The output layer for words of a Janus, on the device with the model."""
    model: JanusModel = loaded.model
    dtype = dtype_name(model.net.norm.weight.dtype)

    def load() -> Any:
        about = host.operations.suited(host.devices.get_compute_device())
        assert model.vision_file is not None, "expect_reader() has checked it"
        return _Head(load_janus_head(model.vision_file, dtype, host.devices.get_offload_device(), **about))

    head = _head.get((model.vision_file, dtype), load)
    host.memory.load_weights([*loaded.patchers, head.patcher], memory)
    return head


def _shown(node: Any, run: Generator[Words, None, Words]) -> Generator[Words, None, Words]:
    """The steps of an answer, whose words stand on the node as they come."""
    with closing(run):
        while True:
            try:
                words = next(run)
            except StopIteration as end:
                return end.value

            host.text.show(node, words.text[-host.text.LONGEST_LINE :])
            yield words


NODES: list[type[io.ComfyNode]] = [AskAboutImage]
