"""How a MAR model reads a condition: class labels, or the prompts of Harmon and UniPic."""

from __future__ import annotations

from typing import cast

from ...networks.hybrid import HybridModel
from ...networks.mar import ClassConditioning, Conditioning, MARModel
from ..conditioning import ClassCondition, ClassOrPrompt, PromptCondition


def read_condition(model: MARModel, condition: ClassOrPrompt, guided: bool) -> Conditioning:
    """Turn a condition into the form that the network reads. The condition must be of the kind that the model reads.

    ``guided``: whether a language model also reads the instruction of the null branch. A model of class labels reads no
    instruction, because the null class is a part of its network.

    Raises:
        UserError: the condition has no label or prompt, or has a label or prompt that the model cannot read.
    """
    if isinstance(condition, ClassCondition):
        ids = condition.class_ids(model.net.config.classes, model.label_set, model.device)
        return ClassConditioning(model.net, ids)

    condition.expect_prompt()
    return cast(HybridModel, model).conditioning(condition.texts, condition.unconditional, guided)


def prompt_tokens(model: HybridModel, condition: PromptCondition, guided: bool) -> int:
    """Number of prompt tokens in the KV cache of the model's language model. If ``guided`` is true, the number includes
    the tokens of the null branch's instruction. A prompt that several images share counts once.
    """
    null_tokens = len(model.instruction(condition.unconditional)) if guided else 0
    texts = dict.fromkeys(condition.texts)
    return null_tokens + sum(len(model.prompt(text)) for text in texts)
