"""The command against, with checkouts written for the tests."""

import sys
import textwrap
from pathlib import Path

import pytest
from fastar_nodes.lab.experiments import references
from fastar_nodes.lab.work import sizes
from fastar_nodes.model_loaders.catalogue import official
from fastar_nodes.networks.mar import MARConfig

pytestmark = pytest.mark.slow

# A checkout in LlamaGen's layout whose network is ours; the cache is not used.
GPT_MODULE = """
from dataclasses import dataclass
from torch import nn
from fastar_nodes.lab.work.sizes import official_gpt
from fastar_nodes.networks.llama import Llama

@dataclass
class ModelArgs:
    dim: int
    n_layer: int
    n_head: int
    vocab_size: int
    num_classes: int
    block_size: int

class Transformer(Llama):
    def __init__(self, args):
        super().__init__(official_gpt("tiny"))
"""
GENERATE_MODULE = """
import torch

def generate(model, labels, count, cfg_scale, sample_logits):
    assert not sample_logits
    labels = labels.cuda()  # without effect
    tokens = torch.zeros(len(labels), 0, dtype=torch.int64)
    side = int(count**0.5)
    for i in range(count):
        halves = []
        for condition in (labels, torch.full_like(labels, model.config.condition_size)):
            x = torch.cat([model.prefix(condition), model.tok_embeddings(tokens)], 1)
            halves.append(model(x, torch.arange(-1, i), model.positions(side, 1))[:, -1])
        cond, null = halves
        tokens = torch.cat([tokens, (null + cfg_scale * (cond - null)).argmax(-1, keepdim=True)], 1)
    return tokens
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Gives the folder of a checkout; LlamaGen-B is tiny."""
    monkeypatch.setitem(sizes.TOKEN_SIZES, "tiny", (16, 1, 2, 4))
    monkeypatch.setitem(sizes.TOKEN_SIZES, "LlamaGen-B", (16, 1, 2, 4))
    folder = tmp_path / "autoregressive" / "models"
    folder.mkdir(parents=True)
    (folder / "gpt.py").write_text(textwrap.dedent(GPT_MODULE), encoding="utf-8")
    (folder / "generate.py").write_text(textwrap.dedent(GENERATE_MODULE), encoding="utf-8")
    return tmp_path


def test_a_reference_is_timed_and_compared(lab, checkout, tmp_path):
    before, path = set(sys.modules), list(sys.path)
    done = lab("against", checkout, "--batch", "1,2", "--repeats", "2")
    assert done.code == 0, done
    *_, first, second = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.strip().splitlines())
    assert (first[0], second[0]) == tuple(f"LlamaGen-B, 4 x 4, batch {n}" for n in (1, 2)) and first[9] == second[
        9
    ] == "yes"
    low, high = map(float, first[4].split("-"))
    assert 0 < low <= float(first[3]) <= high and int(first[7].replace(",", "")) > 16
    local = {n for n in set(sys.modules) - before if n.split(".")[0] == "autoregressive"}
    assert not local and sys.path == path, "the checkout's modules are forgotten"


def test_results_that_differ_are_no_comparison(lab, sentence, checkout):
    file = checkout / "autoregressive" / "models" / "generate.py"
    file.write_text(file.read_text(encoding="utf-8").replace("return tokens", "return tokens + 1"), encoding="utf-8")
    message = sentence(lab("against", checkout, "--repeats", "1"))
    assert "differ" in message and "LlamaGen-B" in message


def test_a_checkout_that_cannot_be_used_is_named(lab, sentence, checkout, tmp_path):
    assert "not a checkout of MAR" in sentence(lab("against", tmp_path / "nowhere"))
    assert "no size MAR-B" in sentence(lab("against", checkout, "--random", "MAR-B"))
    for malformed in ("cfg", "cfg=", "=4", ""):
        assert f"set: {malformed!r} is not of the form" in sentence(lab("against", checkout, "--set", malformed))
    assert "window: no such setting" in sentence(lab("against", checkout, "--set", "window=3"))
    (checkout / "autoregressive" / "models" / "gpt.py").write_text("import no_such_module", encoding="utf-8")
    assert "no_such_module" in sentence(lab("against", checkout))


def test_checkouts_are_recognised(tmp_path):
    zipar = "LlamaGen-ZipAR/autoregressive/models/generate_zipar.py"
    files = {"mar": "models/mar.py", "lazymar": "models/mar_cache.py", "zipar": zipar, "tar": "tok/ar_dtok/ar_model.py"}
    files["cspd"] = "spec_decode/spec_decode_runner.py"
    for name, path in files.items():
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / path).touch()
        inside = "LlamaGen-ZipAR" if name == "zipar" else ""
        assert references.identify(tmp_path / name) == (name, tmp_path / name / inside)


def test_janus_beside_transformers(lab, monkeypatch):
    """The package itself, with our very tensors; the prompts of a batch differ."""
    folder = Path(pytest.importorskip("transformers.models.janus").__file__).parents[3]
    monkeypatch.setitem(official.JANUS_SIZES, "Janus-Pro-1B", (32, 2, 2, 48))
    done = lab("against", folder, "--repeats", "1", "--batch", "1,2", "--set", "grid=3")
    assert done.code == 0 and done.out.count("| yes ") == 2, done
    assert "| Janus-Pro-1B, 3 x 3, batch 2 |" in done.out


# A checkout in MAR's layout whose network and sampler are ours:
# the test is of how both programs are called and compared.
MAR_MODULE = """
from dataclasses import replace
import torch
from fastar_nodes.lab.work.sizes import official
from fastar_nodes.networks.mar import MAR as Ours, MARModel
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings

class Noise:
    seed: None = None
    def __init__(self, orders, first, steps):
        self.orders, self.first = lambda tokens: orders, lambda stream, tokens, channels: first
        self.steps = lambda stream, count, tokens, channels: steps(count)
        self.images = len(orders)
    def __len__(self):
        return self.images

class MAR(Ours):
    def __init__(self, encoder_depth, decoder_depth, diffloss_d, num_sampling_steps, **_):
        depths = {"encoder_depth": encoder_depth, "decoder_depth": decoder_depth, "head_depth": diffloss_d}
        super().__init__(replace(official("MAR-B"), **depths))
        self.count = int(num_sampling_steps)

    def sample_orders(self, bsz):
        return torch.rand(bsz, self.config.tokens).argsort(1)

    def drawn(self, batch, steps):
        c = self.config
        return MARModel(self, "theirs"), Noise(
            self.sample_orders(batch), torch.randn(batch, c.tokens, c.channels, device="cuda").cuda(), steps
        )

    def sample_tokens(self, batch, steps, cfg, schedule, labels, temperature):
        c, s = self.config, MARSettings(steps, self.count, cfg, schedule, temperature, t_max=999)

        def normal(n):
            empty = torch.zeros(batch, c.tokens, c.channels)
            return torch.stack([torch.randn_like(empty) for _ in range(n)], 1)

        model, noise = self.drawn(batch, normal)
        return finish(mar(model, from_ids(labels.tolist()), s, noise)).latents * model.latent_scale
"""


def test_mar_is_called_and_compared(lab, sentence, tmp_path, monkeypatch):
    small = MARConfig(16, 2, 2, 2, 4, 16, 4, 1000, 2, 16)
    monkeypatch.setattr(sizes, "official", lambda size: small)
    file = tmp_path / "models" / "mar.py"
    file.parent.mkdir()
    file.write_text(MAR_MODULE, encoding="utf-8")
    asked = ["against", tmp_path, "--repeats", "1", "--set", "diffusion_steps=8", "--set", "steps=8"]
    done = lab(*asked)
    assert done.code == 0 and done.out.count("| yes ") == 1, done
    file.write_text(MAR_MODULE.replace("latents *", "latents * 1.1 *"), encoding="utf-8")
    assert "differ" in sentence(lab(*asked))


RUNNER_MODULE = """
class SpecDecodeRunner:
    def __init__(self, draft, target, inner_temperature, ratio):
        assert 2 * draft.config.head_depth == target.config.head_depth and (inner_temperature, ratio) == (42.0, 0.5)
        self.target = target

    def run(self, bsz, num_iter, num_draft, cfg_schedule, labels, temperature, cfg):
        return self.target.sample_tokens(bsz, num_iter, cfg, cfg_schedule, labels, temperature)
"""


def test_cspd_drafts_with_half_the_depth(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "official", lambda size: MARConfig(16, 2, 2, 2, 4, 16, 4, 1000, 2, 16))
    for name, text in (("models/mar", MAR_MODULE), ("spec_decode/spec_decode_runner", RUNNER_MODULE)):
        (tmp_path / f"{name}.py").parent.mkdir()
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    sets = (part for value in ("diffusion_steps=8", "steps=8", "prefill_ratio=0.5") for part in ("--set", value))
    done = lab("against", tmp_path, "--repeats", "1", *sets)
    assert done.code == 0 and "| CSpD, MAR-B, 8 x 8, batch 1 |" in done.out and "not compared" in done.out, done
