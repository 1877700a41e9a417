"""FastHybrid's first experiment: what the diffusion head makes of all undecided tokens at once."""

import pytest
import torch
from fastar_nodes.lab.experiments.probe import probe
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from mar_reference import diffuse, full_z, schedule
from PIL import Image
from tiny_models import tiny_mar

pytestmark = pytest.mark.slow

TIMESTEPS = (0, 200, 400, 599, 799, 950)


@pytest.mark.parametrize("after", [2, 0, 4])
def test_undecided_tokens_are_decoded_at_once(after):
    """Token by token: those that plain MAR has decided, and all others by diffusion, of one look at them."""
    model = tiny_mar()
    net, c = model.net, model.net.config
    settings, noise = MARSettings(steps=6, diffusion_steps=6, cfg=2.0), PairedNoise(5, (0, 3))
    (found,), whole = probe(model, from_ids((1, 4)), settings, noise, [after])
    plain = finish(mar(model, from_ids((1, 4)), settings, noise)).latents
    torch.testing.assert_close(whole.latents, plain, rtol=1e-4, atol=1e-4)  # the image beside it

    start, steps = noise.first("full", c.tokens, c.channels), noise.steps("full", 6, c.tokens, c.channels)
    plan, tokens, similarity = schedule(c.tokens, settings), model.to_tokens(plain), []
    for b, reveal in enumerate(noise.orders(c.tokens).flip(1).tolist()):
        final, known = tokens[b].clone(), reveal[: plan[after][0]]
        rows = [net.class_emb.weight[(1, 4)[b]], net.fake_latent[0]]
        with torch.no_grad():
            z = [full_z(net, final, known, row) for row in rows]
            for first, last, scale in plan[after:]:
                own = full_z(net, final, reveal[:first], rows[0])
                for p in reveal[first:last]:
                    of_both = [row[p] for row in z]
                    tokens[b, p] = diffuse(net, of_both, scale, start[b, p], steps[b, :, p], TIMESTEPS, 1.0)
                    if first > plan[after][0]:
                        similarity.append(float(torch.cosine_similarity(z[0][p], own[p], dim=0)))

    wanted = model.to_latents(tokens)
    torch.testing.assert_close(found.latents, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    assert not torch.allclose(wanted, plain, atol=1e-2), "drawn from other conditions, images differ"
    assert found.decided == plan[after][0] / c.tokens
    assert sorted(found.similarity.tolist()) == pytest.approx(sorted(similarity), abs=1e-5)


def rows_of(answer):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in answer.out.splitlines() if line[0] == "|"]


def test_the_command_draws_the_probe_beside_mar(lab, tiny_demo, tmp_path):
    answer = lab("probe --device cpu --label 1,2 --set steps=6 --set diffusion_steps=5 --at 3,1,3 --out probe.png")
    assert answer.code == 0, answer.err
    head, _, *rows = rows_of(answer)
    assert [row[0] for row in rows] == ["1 of 6", "3 of 6"] and len(head) == 5
    assert all(float(cell) for row in rows for cell in row[1:])
    assert Image.open(tmp_path / "probe.png").width > 3 * 320, "three cells"


@pytest.mark.parametrize(("steps", "after"), [(6, ["1 of 6", "3 of 6"]), (2, ["0 of 2"])])
def test_the_usual_steps(lab, tiny_demo, steps, after):
    answer = lab(f"probe --device cpu --set steps={steps} --set diffusion_steps=3")
    assert answer.code == 0 and [row[0] for row in rows_of(answer)[2:]] == after


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--at 5 --set steps=6", "at: 5 is outside 0 to 4"),
        ("--at x", "at: 'x' is not a whole number"),
        ("--set steps=1", "steps: one AR step decides all tokens"),
        ("--out probe.txt", "out: "),
        ("--model demo-llamagen-low", "mar"),
    ],
)
def test_what_cannot_be_probed_is_refused(lab, sentence, tiny_demo, line, says):
    assert says in sentence(lab(f"probe --device cpu {line}"))
