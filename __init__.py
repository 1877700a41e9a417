"""FastAR: fast autoregressive image generation, for ComfyUI and for scripts.

ComfyUI calls :func:`comfy_entrypoint`. Scripts call :func:`load`, which gives a pipeline, or the loaders and samplers
below one by one; see docs/python.md. A module is imported when one of its names is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .assembly import resolve as resolve
    from .errors import UserError as UserError
    from .model_loaders.autoencoders import load_kl as load_kl
    from .model_loaders.autoencoders import load_vq as load_vq
    from .model_loaders.bitdance import load_binary as load_binary
    from .model_loaders.bitdance import load_bitdance as load_bitdance
    from .model_loaders.hybrid import load_hybrid as load_hybrid
    from .model_loaders.janus import load_janus as load_janus
    from .model_loaders.janus import load_janus_vq as load_janus_vq
    from .model_loaders.llamagen import load_llamagen as load_llamagen
    from .model_loaders.mar import load_mar as load_mar
    from .model_loaders.networks.autoencoder import KLModel as KLModel
    from .model_loaders.networks.autoencoder import VQModel as VQModel
    from .model_loaders.networks.binary import BinaryModel as BinaryModel
    from .model_loaders.networks.bitdance import BlockModel as BlockModel
    from .model_loaders.networks.llama import TokenModel as TokenModel
    from .model_loaders.networks.mar import MARModel as MARModel
    from .model_loaders.tar import load_detokenizer as load_detokenizer
    from .model_loaders.tar import load_ta_tok as load_ta_tok
    from .model_loaders.tar import load_tar as load_tar
    from .model_loaders.text import load_text_encoder as load_text_encoder
    from .pipeline import Pipeline as Pipeline
    from .pipeline import load as load
    from .reports.record import Report as Report
    from .samplers import presets as presets
    from .samplers.blocks.loop import bitdance as bitdance
    from .samplers.blocks.settings import BlockSettings as BlockSettings
    from .samplers.conditioning import CodeCondition as CodeCondition
    from .samplers.conditioning import Condition as Condition
    from .samplers.conditioning import FeatureCondition as FeatureCondition
    from .samplers.conditioning import PromptCondition as PromptCondition
    from .samplers.conditioning import TextCondition as TextCondition
    from .samplers.conditioning import resolve_labels as resolve_labels
    from .samplers.driver import finish as finish
    from .samplers.editing import Edit as Edit
    from .samplers.mar.cspd import cspd as cspd
    from .samplers.mar.fasthybrid import fasthybrid as fasthybrid
    from .samplers.mar.lazymar import LazyTransformer as LazyTransformer
    from .samplers.mar.lazymar import lazymar as lazymar
    from .samplers.mar.mar import mar as mar
    from .samplers.mar.settings import CacheSettings as CacheSettings
    from .samplers.mar.settings import CSpDLazyMARSettings as CSpDLazyMARSettings
    from .samplers.mar.settings import CSpDSettings as CSpDSettings
    from .samplers.mar.settings import FastHybridLazyMARSettings as FastHybridLazyMARSettings
    from .samplers.mar.settings import FastHybridSettings as FastHybridSettings
    from .samplers.mar.settings import LazyMARSettings as LazyMARSettings
    from .samplers.mar.settings import MARSettings as MARSettings
    from .samplers.noise import PairedNoise as PairedNoise
    from .samplers.registry import SAMPLERS as SAMPLERS
    from .samplers.tokens.conditioning import features_of as features_of
    from .samplers.tokens.draws import PairedDraws as PairedDraws
    from .samplers.tokens.llamagen import llamagen as llamagen
    from .samplers.tokens.mulosd import mulosd as mulosd
    from .samplers.tokens.par import par as par
    from .samplers.tokens.settings import LlamaGenSettings as LlamaGenSettings
    from .samplers.tokens.settings import MuLoSDSettings as MuLoSDSettings
    from .samplers.tokens.settings import PARSettings as PARSettings
    from .samplers.tokens.settings import TarPromptSettings as TarPromptSettings
    from .samplers.tokens.settings import ZipARSettings as ZipARSettings
    from .samplers.tokens.tar import tar_prompt as tar_prompt
    from .samplers.tokens.upsampling import UpSampling as UpSampling
    from .samplers.tokens.zipar import zipar as zipar

WEB_DIRECTORY = "./web"

# The same names by module, for imports at run time. A test compares them with the imports above.
_MODULES = {
    "assembly": "resolve",
    "errors": "UserError",
    "model_loaders.autoencoders": "load_kl load_vq",
    "model_loaders.bitdance": "load_binary load_bitdance",
    "model_loaders.hybrid": "load_hybrid",
    "model_loaders.janus": "load_janus load_janus_vq",
    "model_loaders.llamagen": "load_llamagen",
    "model_loaders.mar": "load_mar",
    "model_loaders.networks.autoencoder": "KLModel VQModel",
    "model_loaders.networks.binary": "BinaryModel",
    "model_loaders.networks.bitdance": "BlockModel",
    "model_loaders.networks.llama": "TokenModel",
    "model_loaders.networks.mar": "MARModel",
    "model_loaders.tar": "load_detokenizer load_ta_tok load_tar",
    "model_loaders.text": "load_text_encoder",
    "pipeline": "Pipeline load",
    "reports.record": "Report",
    "samplers.blocks.loop": "bitdance",
    "samplers.blocks.settings": "BlockSettings",
    "samplers.conditioning": "CodeCondition Condition FeatureCondition PromptCondition TextCondition resolve_labels",
    "samplers.driver": "finish",
    "samplers.editing": "Edit",
    "samplers.mar.cspd": "cspd",
    "samplers.mar.fasthybrid": "fasthybrid",
    "samplers.mar.lazymar": "LazyTransformer lazymar",
    "samplers.mar.mar": "mar",
    "samplers.mar.settings": (
        "CacheSettings CSpDLazyMARSettings CSpDSettings FastHybridLazyMARSettings FastHybridSettings LazyMARSettings "
        "MARSettings"
    ),
    "samplers.noise": "PairedNoise",
    "samplers.registry": "SAMPLERS",
    "samplers.tokens.conditioning": "features_of",
    "samplers.tokens.draws": "PairedDraws",
    "samplers.tokens.llamagen": "llamagen",
    "samplers.tokens.mulosd": "mulosd",
    "samplers.tokens.par": "par",
    "samplers.tokens.settings": "LlamaGenSettings MuLoSDSettings PARSettings TarPromptSettings ZipARSettings",
    "samplers.tokens.tar": "tar_prompt",
    "samplers.tokens.upsampling": "UpSampling",
    "samplers.tokens.zipar": "zipar",
    "samplers": "presets",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}


async def comfy_entrypoint():
    """The extension with all nodes; called by ComfyUI's loader."""
    from .nodes import make_extension

    return make_extension()


if not TYPE_CHECKING:  # a type checker would take any name from it

    def __getattr__(name):
        """A public name, imported when it is first used."""
        if name not in _PUBLIC or not __package__:  # pytest imports this file as a module of its own in some folders
            raise AttributeError(_unknown(name))

        from importlib import import_module

        from .errors import missing_packages

        if name != "UserError":
            missing = missing_packages()
            if missing:
                raise ImportError(missing, name=name)

        module = _PUBLIC[name]
        try:
            value = getattr(import_module(f".{module}", __name__), name)
        except AttributeError:  # a module of the package
            value = import_module(f".{module}.{name}", __name__)

        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_PUBLIC})


def _unknown(name):
    """The message for a name that is not public, with the closest one that is."""
    message = f"module {__name__!r} has no attribute {name!r}"
    # Loaders and the import system probe for private names and constants.
    if name.startswith("_") or name.isupper():
        return message

    from difflib import get_close_matches

    close = get_close_matches(name, _PUBLIC, 1)
    return f"{message}. Did you mean: {close[0]!r}?" if close else message
