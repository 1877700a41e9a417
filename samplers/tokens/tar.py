"""Tar's first stage: a language model generates the *semantic codes* of an image from a prompt.

In the second stage, these codes are the condition of a de-tokenizer, which generates the image (``llamagen.py``).

Source: Han et al. 2025, "Vision as a Dialect: Unifying Visual Understanding and Generation via Text-Aligned
Representations" (arXiv 2506.18898). FastAR computes logits only for the token ids of codes, so it generates exactly the
requested number of codes. The published program generates text instead, parses the codes from the text, and truncates
or pads the codes. The first stage has no guidance.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UserError
from ...networks.tar import TarModel
from ...networks.torch_state import in_own_state
from ...reports.record import Clock, Report
from ..conditioning import CodeCondition
from ..engine import Step, new_report
from ..settings import Settings, knob
from .canvas import TokenCanvas, blank_tokens
from .decode import decode_schedule
from .prepare import PreparedCondition, distinct, pad_entries
from .schedule import raster
from .settings import TokenSampling, entropy_temperature_knob, parallel_knob
from .token_noise import TokenNoise

# Choices of the setting "detail".
DETAILS = ("729", "169", "81")


# In each field: first the default and the tooltip, then the range.
# fmt: off
@dataclass(frozen=True)
class TarPromptSettings(Settings):
    """Settings of Tar's first stage: from a prompt to the semantic codes of an image."""

    detail: str = knob("729",
        "Number of semantic codes that describe the image; with fewer codes, Tar is faster and the description is "
        "vaguer. Usual: 729, the number with which Tar was trained most often.",
        choices=DETAILS,
        more="The usual Tar models write 81, 169 or 729 codes. If a model writes other numbers of codes, 729 stands "
            "for its largest number, 169 for its second largest, and 81 for its third largest.")
    temperature: float = knob(1.0,
        "Randomness of every code; lower is safer and less varied. Usual: 1; at 0, the model always takes the "
        "likeliest code.",
        low=0.0, high=2.0, step=0.01)
    top_p: float = knob(0.95,
        "Sample only from the likeliest codes whose probabilities add up to this number; lower is safer and less "
        "varied. Usual: 0.95; 1 allows all codes.",
        low=0.0, high=1.0, step=0.01)
    top_k: int = knob(1200,
        "Sample only from this many of the likeliest codes; fewer is safer and less varied. Usual: 1200; at 0, all "
        "codes are allowed, and at 1 the model always takes the likeliest code.",
        low=0, high=65536, step=1)
    repetition_penalty: float | None = knob(None,
        "Lowers the probability of codes that have already occurred; a higher value means fewer repetitions. Usual: "
        "the value that the model's file recommends; at 1, the penalty is off.",
        low=0.01, high=2.0, step=0.01, full_size_value=1.0, advanced=True)
    parallel: int = parallel_knob("codes that are guessed ahead", "32 on a GPU",
        more="In half precision, the codes at *parallel* 0 differ from the codes at *parallel* 1, but both are sampled "
            "from the same distribution. All values above 1 give the same codes as 1.",
        same="in fp32, the codes stay identical")
    entropy_temperature: float = entropy_temperature_knob("code")
# fmt: on


class TarPrompted(NamedTuple):
    """Result of :func:`tar_prompt`: n codes of each of B images, int64 [B, n]; the report; and a condition for a
    de-tokenizer. The condition holds the same codes.
    """

    codes: Tensor
    report: Report
    condition: CodeCondition


@in_own_state
def tar_prompt(
    model: TarModel, prompts: Sequence[str], settings: TarPromptSettings, noise: TokenNoise
) -> Generator[Step, None, TarPrompted]:
    """Generate the semantic codes of images, one image per prompt. The model reads identical prompts once, but samples
    different codes for each image.

    The sampler applies repetition penalty, temperature, top-k, top-p and ``entropy_temperature`` in this order.

    Args:
        model: the language model with its metadata.
        prompts: B texts as the user typed them; :meth:`TarModel.prompt` adds the template.
        settings: see :class:`TarPromptSettings`.
        noise: the noise of B images. Code i is sampled with the noise of cell i in the stream "code".

    Yields :class:`Step` as :func:`.decode_schedule` does; returns :class:`TarPrompted`.

    Raises:
        UserError: there is no prompt; a prompt is not valid; the model does not have the requested number of codes; the
            noise is for a different number of images; or the logits are not finite.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(text, str) for text in prompts):
        raise UserError("text: there is no prompt; give at least one prompt.")
    if len(noise) != len(prompts):
        raise UserError(
            f"text: it asks for {len(prompts)} images, but the noise is for {len(noise)}; make both numbers equal."
        )

    # 1. The token ids of each distinct prompt, in the template for the requested number of codes.
    device = model.device
    clock = Clock(device)
    scale = DETAILS.index(settings.detail)  # DETAILS and model.sides are in the same order, largest number first
    first_indices, prompt_of_image = distinct(prompts, device)
    texts = [torch.tensor(model.prompt(prompts[i], scale)) for i in first_indices]
    condition = PreparedCondition(*pad_entries(texts, device), prompt_of_image)

    # 2. The codes. In the language model, a code is a token whose id is in the range ``model.span``.
    penalty = settings.repetition_penalty
    if penalty is None:
        penalty = model.repetition_penalty
    settings = replace(settings, repetition_penalty=penalty)
    sampling = TokenSampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        entropy_temperature=settings.entropy_temperature,
    )
    side = model.sides[scale]
    report = new_report("tar-prompt", model, settings, noise)
    canvas = TokenCanvas(
        model,
        settings,
        noise,
        grid=(side, side),
        values=blank_tokens(len(noise), side, device),
        report=report,
        sampling=sampling,
        clock=clock,
    )
    # If there is only one code, the prefill predicts it, and no guesses are needed.
    parallel = settings.parallel if side > 1 else 0
    codes, report = yield from decode_schedule(
        canvas,
        condition,
        raster(side),
        parallel,
        span=model.span,
        stream="code",
        penalty=penalty,
    )

    # 3. The condition. Its codes are on the host, because the de-tokenizer may need the memory of the device. They must
    #    not share memory with the codes of the result. If the model is on the host too, cpu() does not copy the codes,
    #    so clone() copies them.
    codes = codes.flatten(1)
    return TarPrompted(codes, report, CodeCondition(tuple(codes.cpu().clone()), tuple(prompts), model.special.codes))
