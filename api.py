"""The public names, each with its module. SAMPLERS holds the function (``run``) and the class of the settings
(``settings``) of every sampler and combination, also of those without names of their own here.

Type checkers and editors read this file. It is not run: ``__init__`` takes the names from these statements, and imports
a module when one of its names is first used.
"""

from .errors import UserError as UserError
from .model_loaders.autoencoders.loader import load_kl as load_kl
from .model_loaders.autoencoders.loader import load_vq as load_vq
from .model_loaders.bitdance.loader import load_binary as load_binary
from .model_loaders.bitdance.loader import load_bitdance as load_bitdance
from .model_loaders.hybrid.loader import load_hybrid as load_hybrid
from .model_loaders.janus.loader import load_janus as load_janus
from .model_loaders.janus.loader import load_janus_vq as load_janus_vq
from .model_loaders.llamagen.loader import load_llamagen as load_llamagen
from .model_loaders.llamagen.text import load_text_encoder as load_text_encoder
from .model_loaders.mar.loader import load_mar as load_mar
from .model_loaders.tar.loader import load_detokenizer as load_detokenizer
from .model_loaders.tar.loader import load_ta_tok as load_ta_tok
from .model_loaders.tar.loader import load_tar as load_tar
from .networks.autoencoder import KLModel as KLModel
from .networks.autoencoder import VQModel as VQModel
from .networks.binary import BinaryModel as BinaryModel
from .networks.bitdance import BlockModel as BlockModel
from .networks.llama import TokenModel as TokenModel
from .networks.mar import MARModel as MARModel
from .pipeline import Pipeline as Pipeline
from .pipeline import load as load
from .reports.record import Report as Report
from .runs import presets as presets
from .runs.labels import resolve_labels as resolve_labels
from .runs.loading import resolve as resolve
from .runs.registry import SAMPLERS as SAMPLERS
from .samplers.blocks.bitdance import bitdance as bitdance
from .samplers.blocks.settings import BlockSettings as BlockSettings
from .samplers.conditioning import ClassCondition as ClassCondition
from .samplers.conditioning import CodeCondition as CodeCondition
from .samplers.conditioning import Condition as Condition
from .samplers.conditioning import FeatureCondition as FeatureCondition
from .samplers.conditioning import PromptCondition as PromptCondition
from .samplers.conditioning import TextCondition as TextCondition
from .samplers.editing import Edit as Edit
from .samplers.engine import Sampled as Sampled
from .samplers.engine import Step as Step
from .samplers.engine import finish as finish
from .samplers.mar.cspd import cspd as cspd
from .samplers.mar.cspd.settings import CSpDSettings as CSpDSettings
from .samplers.mar.fasthybrid import fasthybrid as fasthybrid
from .samplers.mar.fasthybrid.settings import FastHybridSettings as FastHybridSettings
from .samplers.mar.gtr import gtr as gtr
from .samplers.mar.gtr.settings import GtRSettings as GtRSettings
from .samplers.mar.lazy import lazy_transformer as lazy_transformer
from .samplers.mar.lazy import lazymar as lazymar
from .samplers.mar.lazy.settings import CacheSettings as CacheSettings
from .samplers.mar.lazy.settings import LazyMARSettings as LazyMARSettings
from .samplers.mar.mar import mar as mar
from .samplers.mar.settings import MARSettings as MARSettings
from .samplers.noise import PairedNoise as PairedNoise
from .samplers.tokens.features import features_of as features_of
from .samplers.tokens.llamagen import llamagen as llamagen
from .samplers.tokens.mulosd import mulosd as mulosd
from .samplers.tokens.mulosd.drafting import LatentUpSampling as LatentUpSampling
from .samplers.tokens.mulosd.drafting import PixelUpSampling as PixelUpSampling
from .samplers.tokens.mulosd.drafting import UpSampling as UpSampling
from .samplers.tokens.mulosd.settings import MuLoSDSettings as MuLoSDSettings
from .samplers.tokens.par import PARSettings as PARSettings
from .samplers.tokens.par import par as par
from .samplers.tokens.settings import LlamaGenSettings as LlamaGenSettings
from .samplers.tokens.tar import TarPromptSettings as TarPromptSettings
from .samplers.tokens.tar import tar_prompt as tar_prompt
from .samplers.tokens.token_noise import TokenNoise as TokenNoise
from .samplers.tokens.zipar import ZipARSettings as ZipARSettings
from .samplers.tokens.zipar import zipar as zipar
