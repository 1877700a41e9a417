"""The types of the public API: mypy checks this file in ``make check``; it is not run.

mypy is told to refuse any expression of the type Any here, which a name would have that type checkers do not find.
"""

import fastar_nodes
from fastar_nodes import Pipeline, Report, UserError
from fastar_nodes.samplers.engine import Sampled
from PIL import Image
from torch import Tensor
from typing_extensions import assert_type

pipe = fastar_nodes.load("demo")
assert_type(pipe, Pipeline)
images, report = pipe("cat", sampler="fasthybrid", preset="balanced", seed=7, threshold=0.9)
assert_type(images, list[Image.Image])
assert_type(report, Report)
assert_type(report.seconds, float)
assert_type(pipe.samplers, list[str])

model = fastar_nodes.load_mar(fastar_nodes.resolve("demo", "mar"))
assert_type(model, fastar_nodes.MARModel)
cats = fastar_nodes.resolve_labels("cat, cat", model.label_set)
assert_type(cats, fastar_nodes.Condition)
settings = fastar_nodes.FastHybridSettings(steps=32)
noise = fastar_nodes.PairedNoise(7, range(2))
result = fastar_nodes.finish(fastar_nodes.fasthybrid(model, cats, settings, noise))
assert_type(result, Sampled)
assert_type(result.latents, Tensor)
for step in fastar_nodes.mar(model, cats, fastar_nodes.MARSettings(), noise):
    assert_type(step.latents, Tensor)
pixels = fastar_nodes.load_kl(fastar_nodes.resolve("demo-kl", "kl")).decode(result.latents)
assert_type(pixels, Tensor)

tokens = fastar_nodes.load_llamagen("x")
assert_type(tokens, fastar_nodes.TokenModel)
draws = fastar_nodes.TokenNoise(7, range(2))
codes = fastar_nodes.finish(fastar_nodes.zipar(tokens, cats, fastar_nodes.ZipARSettings(), draws)).latents
assert_type(codes, Tensor)
assert_type(fastar_nodes.load_vq("x").decode(codes), Tensor)
assert_type(str(UserError("x")), str)
assert_type(len(fastar_nodes.presets.NAMES), int)
