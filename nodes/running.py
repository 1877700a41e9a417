"""Runs any sampler of the registry on the values of model and condition sockets."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..assembly import is_demo
from ..errors import UserError
from ..model_loaders.networks.llama import TokenModel
from ..model_loaders.networks.mar import MARModel
from ..samplers import presets
from ..samplers.choice import Choice, choose
from ..samplers.registry import LLAMAGEN, MAR, SAMPLERS
from . import host
from .mar_samplers import expect_mar
from .mar_samplers import run_sampler as run_mar
from .schema import expect
from .token_samplers import expect_tokens, one_together, par_together, rows_together, run_mulosd
from .token_samplers import run_sampler as run_tokens

LOADERS = "Load MAR, Load Harmon / UniPic, Load LlamaGen / PAR or Load Tar De-tokenizer"
# Samplers that run here: all but the comparison that needs a codebook.
RUNNABLE = {name: entry for name, entry in SAMPLERS.items() if entry.needs_codes != "vq" and name != "tar"}
_TOGETHER = {"par": par_together, "zipar": rows_together}


def expect_any(value: Any, field: str) -> host.Loaded:
    """Check that a socket holds a MAR, or a token model with its decoder.

    Raises:
        UserError: anything else.
    """
    loaded = expect(value, host.Loaded, field, LOADERS)
    if isinstance(loaded.model, TokenModel):
        return expect_tokens(loaded, field)
    return expect_mar(loaded, field)


def suits(name: str, loaded: host.Loaded, draft: host.Loaded | None) -> bool:
    """Whether a sampler can run on a model."""
    entry = RUNNABLE.get(name)
    if entry is None or entry.needs_draft and draft is None:
        return False
    if isinstance(loaded.model, MARModel):
        return entry.family == MAR
    special = loaded.model.net.config.special > 0
    return entry.family != MAR and (name == "par") == special


def baseline_of(loaded: host.Loaded) -> str:
    """Name of the plain sampler of a model; of a PAR, the sampler that it was trained for."""
    if isinstance(loaded.model, MARModel):
        return MAR
    return "par" if loaded.model.net.config.special > 0 else LLAMAGEN


def settings_for(choice: Choice, loaded: host.Loaded) -> Any:
    """The settings of a choice on a model: its values, the preset's, the file's recommendations, the defaults."""
    width = loaded.model.net.config.dim if isinstance(loaded.model, MARModel) else 0
    return choice.settings(loaded.recommended, is_demo(loaded.model), width)


def check(choice: Choice, loaded: host.Loaded, draft: Any, field: str = "sampler") -> None:
    """Check that a sampler runs here, suits the model and has its draft model.

    Args:
        field: name of the input that chose the sampler, for messages.

    Raises:
        UserError: it does not.
    """
    entry = choice.entry
    if entry.name not in RUNNABLE:
        raise UserError(f"{field}: {entry.name} does not run here; choose one of {', '.join(RUNNABLE)}.")
    if isinstance(loaded.model, MARModel) != (entry.family == MAR):
        raise UserError(
            f"{field}: {entry.name} samples {entry.models}, and {loaded.model.name} is none; choose another."
        )
    if entry.needs_draft and draft is None:
        raise UserError(f"draft: {entry.name} needs a draft model; connect one of the same family.")


def run(choice: Choice, loaded: host.Loaded, condition: Any, seed: Any, draft: Any = None) -> io.NodeOutput:
    """Run a sampler with progress, preview and cancellation.

    Args:
        choice: sampler and settings.
        loaded: checked by :func:`expect_any`.
        condition: value of a condition socket.
        seed: value of a seed widget.
        draft: value of a model socket, for samplers with a draft model.

    Returns:
        The latent and the report, as sampler nodes return them.

    Raises:
        UserError: see :func:`check`; or the settings do not suit the model.
    """
    check(choice, loaded, draft)
    entry = choice.entry
    settings = settings_for(choice, loaded)
    if isinstance(loaded.model, MARModel):
        small = expect_mar(draft, "draft") if entry.needs_draft else None
        more: dict[str, Any] = {"draft": small.model} if small else {}
        inputs = {"condition": condition, "seed": seed}
        cached = "lazymar" in entry.name.split("+")
        return run_mar(entry.name, loaded, settings, inputs, [small] if small else [], cached, **more)
    if entry.needs_draft:
        return run_mulosd(loaded, draft, settings, condition, seed)
    return run_tokens(entry.name, loaded, settings, condition, seed, _TOGETHER.get(entry.name, one_together))


def plain_choice(loaded: host.Loaded) -> Choice:
    """The plain sampler of a model with the settings that its file recommends."""
    return choose(baseline_of(loaded), {})


def baseline_choice(choice: Choice, loaded: host.Loaded) -> Choice:
    """The plain sampler with the settings that it shares with a choice."""
    plain = SAMPLERS[baseline_of(loaded)]
    named = {k: v for k, v in choice.values.items() if k in plain.settings.__dataclass_fields__}
    return Choice(plain, presets.AS_SET, named)


def warm_up_choice(loaded: host.Loaded) -> Choice:
    """A short run of a model: one AR step of two diffusion steps, or for token models ZipAR's narrowest window."""
    name = baseline_of(loaded)
    if name == MAR:
        return choose(MAR, {"ar_steps": 1, "diffusion_steps": 2})
    return choose(name, {}) if name == "par" else choose("zipar", {"window": 1})
