"""FastAR: fast autoregressive image generation, for ComfyUI and for scripts.

Nothing is imported until it is asked for: ComfyUI calls :func:`comfy_entrypoint`, a script takes the names below.
"""

WEB_DIRECTORY = "./web"

# Public name to the module that holds it.
_PUBLIC = {
    "load_mar": "model_loaders.mar",
    "load_kl": "model_loaders.autoencoders",
    "load_llamagen": "model_loaders.llamagen",
    "load_vq": "model_loaders.autoencoders",
    "load_tar": "model_loaders.tar",
    "load_ta_tok": "model_loaders.tar",
    "load_detokenizer": "model_loaders.tar",
    "load_text_encoder": "model_loaders.text",
    "resolve": "model_loaders.hub",
    "mar": "samplers.mar.mar",
    "finish": "samplers.driver",
    "fasthybrid": "samplers.mar.fasthybrid",
    "llamagen": "samplers.tokens.llamagen",
    "par": "samplers.tokens.par",
    "zipar": "samplers.tokens.zipar",
    "mulosd": "samplers.tokens.mulosd",
    "up_sampling": "samplers.tokens.upsampling",
    "tar_prompt": "samplers.tokens.tar",
    "finish_prompt": "samplers.tokens.tar",
    "MARSettings": "samplers.mar.settings",
    "FastHybridSettings": "samplers.mar.settings",
    "LlamaGenSettings": "samplers.tokens.settings",
    "PARSettings": "samplers.tokens.settings",
    "ZipARSettings": "samplers.tokens.settings",
    "MuLoSDSettings": "samplers.tokens.settings",
    "TarPromptSettings": "samplers.tokens.settings",
    "PairedNoise": "samplers.noise",
    "PairedDraws": "samplers.tokens.draws",
    "Condition": "samplers.conditioning",
    "TextCondition": "samplers.conditioning",
    "CodeCondition": "samplers.conditioning",
    "resolve_labels": "samplers.labels",
    "UserError": "errors",
}


async def comfy_entrypoint():
    """What ComfyUI's loader awaits: the extension with every node."""
    from .nodes import make_extension

    return make_extension()


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_PUBLIC])
