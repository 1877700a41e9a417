"""FastAR: fast autoregressive image generation, for ComfyUI and for scripts.

ComfyUI calls :func:`comfy_entrypoint`. The public API for scripts is every sampler of the registry with its settings class, and the
names below. Modules are imported when a name is first used.
"""

WEB_DIRECTORY = "./web"

# Modules and their public names, besides the registry's.
_MODULES = {
    "model_loaders.mar": "load_mar",
    "model_loaders.llamagen": "load_llamagen",
    "model_loaders.janus": "load_janus load_janus_vq",
    "model_loaders.tar": "load_tar load_ta_tok load_detokenizer",
    "model_loaders.autoencoders": "load_kl load_vq",
    "model_loaders.text": "load_text_encoder",
    "model_loaders.hub": "resolve",
    "samplers.driver": "finish",
    "samplers.tokens.upsampling": "UpSampling",
    "samplers.tokens.tar": "tar_prompt",
    "samplers.tokens.settings": "TarPromptSettings",
    "samplers.tokens.draws": "PairedDraws",
    "samplers.mar.settings": "CacheSettings",
    "samplers.mar.lazymar": "LazyTransformer",
    "samplers.editing": "Edit",
    "samplers.noise": "PairedNoise",
    "samplers.conditioning": "Condition PromptCondition TextCondition CodeCondition FeatureCondition resolve_labels",
    "samplers.registry": "SAMPLERS",
    "errors": "UserError",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}


async def comfy_entrypoint():
    """The extension with all nodes; called by ComfyUI's loader."""
    from .nodes import make_extension

    return make_extension()


def _registered():
    """Settings classes of the registry, and sampler functions; combinations are called by ``SAMPLERS[name].run``."""
    from .samplers.registry import SAMPLERS

    functions = {entry.run for entry in SAMPLERS.values() if "+" not in entry.name}
    return {public.__name__: public for public in (*functions, *(entry.settings for entry in SAMPLERS.values()))}


def __getattr__(name):
    if not __package__:  # imported by pytest as a module of its own, in a folder whose name is no identifier
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    unknown = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Loaders and the import system probe for private names and constants.
    if name not in _PUBLIC and (name.startswith("_") or name.isupper()):
        raise unknown

    from .errors import missing_packages

    if name != "UserError" and (missing := missing_packages()):
        raise ImportError(missing, name=name)

    if name in _PUBLIC:
        from importlib import import_module

        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    elif name in (found := _registered()):
        value = found[name]
    else:
        raise unknown
    globals()[name] = value
    return value


def __dir__():
    from .errors import missing_packages

    return sorted({*globals(), *_PUBLIC, *(() if missing_packages() else _registered())})
