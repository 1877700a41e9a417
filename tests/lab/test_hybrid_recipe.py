"""The hybrid's recipe: what it starts from, its prompts, and its two losses."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.parity.hybrid import recorded_model
from fastar_nodes.lab.training import captions, hybrid_recipe, tar_recipes
from fastar_nodes.lab.training.initialise import initialise_mar
from fastar_nodes.lab.training.training import generator, seeded
from fastar_nodes.networks.hybrid import UNCONDITIONAL
from fastar_nodes.networks.mar import MAR, pick
from fastar_nodes.samplers.mar.tables import constants
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def small():
    shape = hybrid_recipe.config()
    return replace(shape, mar=replace(tiny.MAR, classes=0), llm=replace(tiny.language(), vocab=shape.llm.vocab))


@pytest.fixture(scope="module")
def parts() -> SimpleNamespace:
    """A random MAR and Tar of the hybrid's shapes, and the hybrid that starts from them."""
    net = seeded(0, lambda: initialise_mar(MAR(tiny.MAR))).eval()
    tar = tar_recipes.tar_model(tar_recipes.build_language(tiny.language()), tiny.TA_TOK.codes)
    return SimpleNamespace(mar=net, tar=tar, start=hybrid_recipe.joined(net, tar, small()))


def test_training_starts_at_the_unlabelled_mar_with_tars_words(parts) -> None:
    net, tar = parts.start, parts.tar
    tokens = torch.randn(2, 64, 8)
    known = torch.arange(10).expand(2, -1)
    model = hybrid_recipe.hybrid_model(net)
    ids = torch.tensor([model.prompt("a red cat"), model.prompt("a blue boat")])
    lengths = torch.full((2,), ids.shape[1])
    with torch.no_grad():
        z = hybrid_recipe.conditions(net, tokens, known, ids, lengths)
        plain = parts.mar.decode(parts.mar.encode(tokens, known, parts.mar.class_rows(None, 2)), known)
    assert torch.equal(z, plain)
    table, own = net.llm.tok_embeddings.weight, tar.net.tok_embeddings.weight
    for text in ("red", "sunset", "cat"):
        (here,), (there,) = model.tokenize(text), tar.tokenize(text)
        assert torch.equal(table[here], own[there])
    assert torch.equal(table[list(model.turn)], own[list(tar.special.chat)])
    assert torch.equal(net.llm.layers[1].feed_forward.w3.weight, tar.net.layers[1].feed_forward.w3.weight)


@pytest.mark.parametrize("family", ["harmon", "unipic"])
def test_the_form_for_training_equals_the_authors_decoder(root, family) -> None:
    """It reads the prompts in one sequence with the image."""
    folder = root / "tests" / "parity" / family
    recorded = load_file(folder / "hybrid_inside.safetensors")
    for tag, about in json.loads((folder / "hybrid_inside.json").read_text(encoding="utf-8")).items():
        net = recorded_model(folder, *about["image_shape"]).hybrid
        found = {name.split(".")[1]: tensor for name, tensor in recorded.items() if name.startswith(f"{tag}.")}
        known = (found["mask"] == 0).nonzero()[:, 1].view(len(found["mask"]), -1)
        tokens, places = found["tokens_f16"].float().repeat(2, 1, 1), known.repeat(2, 1)
        with torch.no_grad():
            z = hybrid_recipe.conditions(net, tokens, places, found["input_ids"], found["attention_mask"].sum(1))
        assert (z - found["z"]).abs().max() <= 1e-4, tag


def test_some_prompts_of_a_batch_are_the_unconditional_one(parts) -> None:
    model = hybrid_recipe.hybrid_model(parts.start)
    seed = hybrid_recipe.CAPTION_SEED
    prompts, lengths = captions.prompt_book(model.prompt, 30, (seed, seed + 1))
    blank = torch.tensor(model.instruction(UNCONDITIONAL))
    book = torch.arange(30.0)[:, None, None].expand(-1, 64, 2).half()
    tokens, ids, ends = hybrid_recipe.batch_of(book, prompts, lengths, blank, 400, generator(1, 0))
    null = [row[:end].tolist() == blank.tolist() for row, end in zip(ids, ends, strict=True)]
    assert 20 < sum(null) < 65
    rows = tokens[:, 0, 0].long()
    for i in range(400):
        mine = ids[i, : ends[i]].tolist()
        assert null[i] or mine in [prompts[rows[i], v, : lengths[rows[i], v]].tolist() for v in range(2)]


def test_the_loss_depends_on_the_prompt_and_reaches_every_weight(parts) -> None:
    net = hybrid_recipe.build(small())
    torch.nn.init.normal_(net.proj_out[2].weight, std=0.1)
    torch.nn.init.normal_(net.head.final_layer.linear.weight, std=0.1)
    for block in (*net.head.res_blocks, net.head.final_layer):
        torch.nn.init.normal_(block.adaLN_modulation[1].weight, std=0.1)
    model = hybrid_recipe.hybrid_model(net)
    tokens, full = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)), constants()

    def loss(*texts: str) -> torch.Tensor:
        ids = torch.tensor([model.prompt(text) for text in texts])
        return hybrid_recipe.hybrid_loss(net, tokens, ids, torch.tensor([ids.shape[1]] * 2), full, generator(3, 3))[0]

    first = loss("a red cat", "a blue boat")
    assert float(first.detach()) != float(loss("a blue boat", "a red cat").detach())
    first.backward()
    still = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not still, still


def test_the_first_stage_trains_the_prompts_alone(parts, monkeypatch) -> None:
    """Its error is zero for the encoder's output of the whole image; the MAR gets no gradient."""
    net = hybrid_recipe.build(small())
    net.mar.load_state_dict(parts.start.mar.state_dict())
    net.mar.requires_grad_(False)
    torch.nn.init.normal_(net.proj_out[2].weight, std=0.1)
    model = hybrid_recipe.hybrid_model(net)
    tokens = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([model.prompt("a red cat"), model.prompt("a blue boat")])

    def error() -> torch.Tensor:
        return hybrid_recipe.whole_loss(net, tokens, ids, torch.tensor([ids.shape[1]] * 2), generator(3, 5))[0]

    before = error()
    before.backward()
    assert all(p.grad is None for p in net.mar.parameters())
    assert float(net.llm.layers[0].attention.wq.weight.grad.abs().sum()) > 0

    def whole(net, encoded, known, *prompts):
        rows = net.mar.encode(tokens, torch.arange(64).expand(2, -1), net.mar.class_rows(None, 2))
        return torch.cat([rows[:, :2], pick(rows, known + 2)], 1)

    monkeypatch.setattr(hybrid_recipe, "fuse", whole)
    assert float(before.detach()) > 0.01 and float(error()) < 1e-12
