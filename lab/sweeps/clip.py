"""CLIP score: how well images fit the prompts that they were drawn from.

Source: Hessel et al. 2021 (arXiv 2104.08718), as torchmetrics and the papers' tables give it: 100 times the cosine of
CLIP's embeddings of an image and of its prompt, and 0 if that is negative. transformers is no dependency of the pack,
and nothing is downloaded.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...errors import UserError, first_line

# The model of torchmetrics' CLIPScore.
CLIP = "openai/clip-vit-large-patch14"
_BATCH = 50


class Clip:
    """A CLIP model: a folder, or a name in the Hugging Face cache.

    Raises:
        UserError: transformers is not installed, or the model is not on this machine.
    """

    def __init__(self, name: str, device: torch.device):
        try:
            package: Any = importlib.import_module("transformers")
        except Exception as e:  # its dependencies fail in several ways
            raise UserError(
                f"measures: clip needs the package transformers ({first_line(e)}); install it with: pip install "
                "transformers."
            ) from None

        here: dict[str, Any] = {"local_files_only": True}
        try:
            self._model = package.CLIPModel.from_pretrained(name, use_safetensors=True, **here).eval().to(device)
            self._tokenizer = package.CLIPTokenizerFast.from_pretrained(name, **here)
            self._processor = package.CLIPImageProcessor.from_pretrained(name, **here)
        except Exception as e:  # a damaged folder can raise any exception
            raise UserError(
                f"clip: {name} is not on this machine or cannot be read ({first_line(e)}); run `hf download {CLIP}`, "
                "or give the folder of a CLIP model."
            ) from None
        self.name = name
        self._device = device

    @torch.no_grad()
    def scores(self, pictures: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """The score of every image, float64 [N]. Prompts that are too long for CLIP are cut.

        Args:
            pictures: uint8 [N, H, W, 3].
            prompts: text [N].
        """
        found = []
        for at in range(0, len(pictures), _BATCH):
            texts = prompts[at : at + _BATCH].tolist()
            words = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self._device)
            pixels = self._processor(list(pictures[at : at + _BATCH]), return_tensors="pt")["pixel_values"]

            out = self._model(**words, pixel_values=pixels.to(self._device))
            cosine = F.cosine_similarity(out.image_embeds, out.text_embeds)
            found.append(100 * cosine.clamp(min=0).double().cpu().numpy())

        return np.concatenate(found)
