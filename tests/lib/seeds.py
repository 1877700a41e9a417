"""Small valid files of every kind that a loader reads, as starting points of mutations."""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import block_models
import hybrid_files
import janus_files
import janus_images
import nextstep_models
import tar_files
import torch
from fastar_nodes.model_loaders.autoencoders.latent_samplers import load_latent_samplers
from fastar_nodes.model_loaders.autoencoders.loader import load_kl, load_vq
from fastar_nodes.model_loaders.bitdance.loader import load_binary, load_bitdance
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.janus.loader import load_janus, load_janus_vision, load_janus_vq
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.llamagen.text import load_text_encoder
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.nextstep.loader import load_nextstep, load_nextstep_ae
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from fastar_nodes.networks.binary import BinaryAutoencoder, BinaryConfig
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.mar import MAR, MARConfig
from qwen_reference import tiny_qwen
from safetensors.torch import save_file
from tiny_tokens import tiny_latent_samplers

PROMPT = "A red boat, caf\u00e9 \U0001f319"


@dataclass(frozen=True)
class Seed:
    """A valid file or folder, and what loads it.

    Attributes:
        path: the file or folder.
        load: loads a path of this kind and uses it as far as untrusted content matters.
    """

    path: Path
    load: Callable[[Path], object]


def weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {k: torch.randn(t.shape, generator=g) * 0.1 for k, t in net.state_dict().items()}


def build(folder: Path) -> list[Seed]:
    """Write every kind of file into ``folder``."""
    out = []

    def add(name: str, load: Callable[[Path], object], state: dict, /, **metadata: str) -> None:
        save_file(state, folder / f"{name}.safetensors", metadata=metadata)
        torch.save({"model": state, "epoch": 3, "args": argparse.Namespace(lr=1e-4)}, folder / f"{name}.pt")
        out.extend(Seed(folder / f"{name}.{suffix}", load) for suffix in ("safetensors", "pt"))

    mar = MARConfig(16, 1, 2, 2, buffer=2, tokens=4, channels=4, classes=3, head_depth=1, head_width=8)
    add("mar", lambda p: load_mar(p, heads=None if p.suffix == ".safetensors" else 2), weights(MAR(mar)), heads="2")
    kl = KLConfig(ch=32, ch_mult=(1, 2), blocks=1, z_channels=4, encoder_attention=frozenset({1}), groups=32)
    add("kl", load_kl, weights(KLAutoencoder(kl)))
    gpt = LlamaConfig(dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=24, condition="class", condition_size=10)
    add("gpt", lambda p: load_llamagen(p, grid=4, heads=2), weights(Llama(gpt)), grid="4", heads="2", name="tiny")
    vq = VQConfig(ch=32, ch_mult=(1, 2), blocks=1, z_channels=8, codes=24, code_channels=4, groups=32)
    add("vq", load_vq, weights(VQAutoencoder(vq)), groups="32")
    add("latent_samplers", load_latent_samplers, weights(tiny_latent_samplers().net))
    block = block_models.tiny_bitdance().net.state_dict()
    add("bitdance", lambda p: load_bitdance(p, heads=2), block, heads="2", name="tiny")
    binary = BinaryConfig(widths=(32, 32), blocks=1, z_channels=6)
    add("binary", load_binary, weights(BinaryAutoencoder(binary)))
    add("dtok", lambda p: load_detokenizer(p, grid=4, heads=2), tar_files.detokenizer_state(), heads="2", grid="4")
    ta_tok = replace(tar_files.TA_TOK, width=192, input_size=15)  # head counts as in the official sizes
    add("ta_tok", load_ta_tok, tar_files.tiny_ta_tok(ta_tok).state_dict(), encoder_heads="3")

    single = folder / "single"
    single.mkdir()
    settings = json.dumps({**tar_files.CONFIG, **tar_files.IDS})
    about = {"config": settings, "tokenizer": json.dumps(tar_files.words())}
    save_file(tiny_qwen().state_dict(), single / "tar.safetensors", metadata=about)
    out.append(Seed(single / "tar.safetensors", use_tar))
    out.append(Seed(tar_files.language_model(folder / "words"), use_tar))
    merged = tar_files.language_model(folder / "merges", {**tar_files.CONFIG, **tar_files.IDS})
    (merged / "tokenizer.json").unlink()
    write_merges(merged)
    out.append(Seed(merged, use_tar))
    out.append(Seed(write_t5(folder / "t5"), use_t5))
    out.extend(Seed(path, use_hybrid) for path in write_hybrids(folder))
    out.append(Seed(janus_files.one_file(folder / "janus.safetensors"), use_janus))
    out.append(Seed(janus_files.in_transformers_layout(folder / "janus"), use_janus))
    out.append(Seed(Path(shutil.copytree(janus_images.FOLDER / "model", folder / "editor")), use_reader))
    out.append(Seed(Path(shutil.copytree(block_models.FOLDER / "native", folder / "block")), use_bitdance))
    out.extend(write_nextsteps(folder))
    return out


def write_nextsteps(folder: Path) -> list[Seed]:
    """A tiny NextStep and its autoencoder, as the authors' folder and each in one file with all in its metadata."""
    model = Path(shutil.copytree(nextstep_models.FOLDER / "model", folder / "next"))
    about = {name: (model / f"{name}.json").read_text() for name in ("config", "tokenizer")}
    state = load_nextstep(model, "fp32").net.state_dict()
    save_file(state, folder / "nextstep.safetensors", metadata=about)

    latents = load_nextstep_ae(model / "vae", "fp32").net.state_dict()
    about = {"config": (model / "vae" / "config.json").read_text()}
    save_file(latents, folder / "latents.safetensors", metadata=about)
    return [
        Seed(folder / "nextstep.safetensors", use_nextstep),
        Seed(model, use_nextstep),
        Seed(folder / "latents.safetensors", load_nextstep_ae),
        Seed(model / "vae" / "checkpoint.pt", load_nextstep_ae),
    ]


def use_nextstep(path: Path) -> object:
    """Load a NextStep, and encode a prompt."""
    return load_nextstep(path).prompt(PROMPT)


def use_bitdance(path: Path) -> object:
    """Load a text model, and encode a prompt."""
    return load_bitdance(path).prompt(PROMPT)


def use_janus(path: Path) -> object:
    """Load a Janus with its decoder, and encode a prompt."""
    load_janus_vq(path)
    return load_janus(path).prompt(PROMPT)


def use_reader(path: Path) -> object:
    """Load what reads images for a Janus, and encode an image prompt."""
    load_janus_vision(path, janus_images.tiny_reader().vq)
    return load_janus(path).image_prompt(PROMPT)


def write_merges(folder: Path) -> None:
    """A byte-pair tokenizer in Qwen's three files, with ids below the 40 rows of the tiny language model."""
    signs = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    signs += [chr(256 + i) for i in range(256 - len(signs))]
    (folder / "vocab.json").write_text(json.dumps({sign: i % 14 for i, sign in enumerate(signs)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "added_tokens.json").write_text(json.dumps(tar_files.ADDED))


def write_hybrids(folder: Path) -> list[Path]:
    """A tiny hybrid in one file with everything in its metadata, and as a folder of two shards."""
    state, parts = hybrid_files.weights(), folder / "hybrid"
    save_file(state, folder / "hybrid.safetensors", metadata={**hybrid_files.METADATA, "grid": "4", "max_beta": "0.2"})
    parts.mkdir()
    (parts / "config.json").write_text(json.dumps(hybrid_files.CONFIG))
    (parts / "tokenizer.json").write_text(json.dumps(hybrid_files.TOKENIZER))
    names = sorted(state)
    for i, part in enumerate((names[:40], names[40:]), 1):
        save_file({name: state[name] for name in part}, parts / f"model-0000{i}-of-00002.safetensors")
    return [folder / "hybrid.safetensors", parts]


def write_t5(folder: Path) -> Path:
    """A tiny T5 encoder with a tokenizer of six words."""
    import tokenizers
    import transformers

    folder.mkdir()
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=120, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=3, feed_forward_proj="gated-gelu"
    )
    state = transformers.T5EncoderModel(config).state_dict()
    kept = {k: v.contiguous() for k, v in state.items() if not k.endswith("embed_tokens.weight")}
    save_file(kept, folder / "model.safetensors")
    words = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "\u2581red", "\u2581boat", "\u2581cat", "\u2581small"]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=2))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


def use_tar(path: Path) -> None:
    model = load_tar(path)
    model.prompt(PROMPT, 0)


def use_hybrid(path: Path) -> None:
    model = load_hybrid(path)
    model.prompt(PROMPT)


def use_t5(path: Path) -> None:
    load_text_encoder(path).encode([PROMPT])
