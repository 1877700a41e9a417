"""Editing with given tokens: they stay, the others are drawn as before, in every sampler of one
model and in windows.
"""

from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.reports.record import GIVEN, Clock
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.canvas import TokenCanvas, blank_tokens, fixed_tokens_of
from fastar_nodes.samplers.tokens.sampling import DrawSetup, tokens_from_logits
from fastar_nodes.samplers.tokens.settings import TokenSampling
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from test_token_contract import start

LOW = torch.zeros(1, 8, 8)
LOW[:, 4:] = 1  # the lower half is drawn again
CASES = "llamagen", "llamagen, text", "window, text", "zipar", "window, zipar", "par, non-local"


def run(case, edit, images=range(3)):
    return finish(start(case, tuple(images), edit=edit))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cases("llamagen", "window, text", "zipar", "par, non-local")
def test_given_tokens_stay_and_the_rest_follows_them(case):
    plain = run(case, None).latents
    grid = plain.shape[1]
    other = (plain + 1) % 3
    again, report = run(case, Edit(other, LOW))
    assert torch.equal(again[:, : grid // 2], other[:, : grid // 2])
    assert not torch.equal(again[:, grid // 2 :], plain[:, grid // 2 :]), "the new tokens see the given ones"
    step, outcome = report.maps["step"], report.maps["outcome"]
    assert (step[:, : grid // 2] == -1).all() and (outcome[:, : grid // 2] == GIVEN).all(), (
        "marked as in an edit of MAR"
    )
    assert (step[:, grid // 2 :] >= 0).all() and (outcome[:, grid // 2 :] != GIVEN).all()
    own = run(case, Edit(plain, LOW))
    assert torch.equal(own.latents, plain)


@pytest.mark.parametrize(("serial", "windows"), [("llamagen, text", "window, text"), ("zipar", "window, zipar")])
def test_windows_are_exact_and_an_image_does_not_depend_on_its_batch(serial, windows):
    mask = torch.stack([LOW[0], LOW[0].T, LOW[0].flip(0)])
    codes = torch.arange(3 * 16).view(3, 4, 4) % 23
    edit = Edit(codes, mask)
    both = [run(case, edit).latents for case in (serial, windows)]
    assert torch.equal(*both)
    assert torch.equal(run(windows, edit.for_images([2], 3), [2]).latents[0], both[0][2])


def test_a_given_token_of_value_0_is_given_like_any_other():
    """It is read by later passes, and shown where a guess or the zero of an empty cell is stored."""
    given = torch.tensor([[0, 2, -1, -1, -1]])
    greedy = TokenSampling(temperature=0.0)
    device = torch.device("cpu")
    model = SimpleNamespace(net=Idle(), device=device)
    canvas = TokenCanvas(
        model,
        None,
        TokenNoise(1, (0,)),
        grid=(2, 2),
        values=blank_tokens(1, 2, device),
        report=None,
        regenerated=given[:, :4] < 0,
        sampling=greedy,
        fixed_tokens=given,
        clock=Clock(device),
    )
    assert canvas.decided.tolist() == [[True, True, False, False]]

    # Code 1 is the likeliest everywhere.
    logits = torch.tensor([0.0, 1.0, 0.0]).expand(1, 4, 3)
    cells = torch.arange(4)
    setup = DrawSetup(
        greedy, images=1, cell_noise=canvas.noise.stream("token", 3, device), fixed_tokens=canvas.fixed_tokens
    )
    assert tokens_from_logits(setup, logits, cells, None).tolist() == [[0, 2, 1, 1]]
    assert tokens_from_logits(setup, logits, cells[None], None).tolist() == [[0, 2, 1, 1]]

    canvas.values[:] = 1
    assert canvas.partial_latents(canvas.decided).tolist() == [[[0, 2], [0, 0]]]


class Idle:
    """A network that is not run."""

    def begin_run(self) -> None:
        """Nothing."""


def test_a_token_is_drawn_again_if_any_of_it_is_painted():
    mask = torch.zeros(1, 64, 64)
    mask[0, 16, 47] = 1
    given = fixed_tokens_of(Edit(torch.zeros(1, 4, 4, dtype=torch.int64), mask), 4, 2)
    assert given.shape == (2, 17) and (given == -1).nonzero().tolist() == [[0, 6], [0, 16], [1, 6], [1, 16]]


@pytest.mark.parametrize(
    ("codes", "mask", "field"),
    [
        (torch.zeros(1, 5, 5, dtype=torch.int64), LOW, "latent_image"),
        (torch.zeros(1, 4, 4, dtype=torch.int64), LOW[0], "mask"),
    ],
)
def test_edits_that_do_not_fit(codes, mask, field):
    with pytest.raises(UserError, match=f"^{field}: "):
        fixed_tokens_of(Edit(codes, mask), 4, 3)
