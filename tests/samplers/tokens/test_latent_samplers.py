"""MuLo-SD's trained up- and down-sampler: their rows, their place in the loop, and what they are refused for."""

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders.latent_samplers import expect_fitting, fits
from fastar_nodes.networks.latent_samplers import LatentSamplers, LatentSamplersConfig, RowCausal
from fastar_nodes.networks.ops import TORCH
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.mulosd import mulosd
from fastar_nodes.samplers.tokens.mulosd.drafting import LatentUpSampling
from fastar_nodes.samplers.tokens.mulosd.settings import MuLoSDSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from test_token_contract import LARGE, SMALL
from tiny_tokens import CODES, VQ, tiny_latent_samplers, tiny_vq
from tokens_reference import condition_of

SAMPLERS = tiny_latent_samplers()


def codes_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(CODES, shape, generator=torch.Generator().manual_seed(seed))


def test_the_convolution_is_one_of_five_rows_whose_lower_two_are_masked():
    torch.manual_seed(0)
    layer = RowCausal(3, 4, TORCH)
    whole = torch.zeros(4, 3, 5, 3)
    whole[:, :, :3] = layer.conv.weight

    x = torch.randn(2, 3, 6, 7)
    wanted = F.conv2d(x, whole, layer.conv.bias, padding=(2, 1))
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("ratio", [2, 3, 4])
def test_no_row_depends_on_a_row_below_it(ratio):
    net = tiny_latent_samplers(ratio).net
    small, large = codes_of(2, 5, 5), codes_of(2, 5 * ratio, 5 * ratio)
    up, down = net.up(small), net.down(large)
    assert up.shape == large.shape and down.shape == small.shape

    for rows in range(1, 5):
        assert torch.equal(net.up(small[:, :rows]), up[:, : rows * ratio])
        assert torch.equal(net.down(large[:, : rows * ratio]), down[:, :rows])


@pytest.mark.parametrize("name", ["up", "down"])
def test_rows_depend_on_those_above_and_beside_them(name):
    """Of every row, and of the cells at both sides, a change is seen below."""
    vectors = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    network = getattr(SAMPLERS.net, f"{name}_sampler")
    last = network(vectors)[..., -1, 1].sum()
    (seen,) = torch.autograd.grad(last, vectors)
    assert (seen.abs().amax((0, 1))[-3:, :3] > 0).all()


def test_a_file_states_the_shape():
    config = LatentSamplersConfig(3, 17, 6, up_width=10, up_small=1, up_large=3, down_width=4, down_small=2)
    state = LatentSamplers(config).state_dict()
    assert LatentSamplersConfig.from_state_dict(state) == config

    with pytest.raises(ValueError, match="80 cells|8 cells"):
        LatentSamplersConfig.from_state_dict({**state, "up_sampler.rise.weight": torch.zeros(80, 10, 1, 1)})


def test_they_fit_one_codebook_and_one_ratio():
    other = tiny_vq()
    other.net.quantize.embedding.weight.data[5] *= -1

    # Length and rounding of the vectors do not matter.
    equal = tiny_vq()
    equal.net.quantize.embedding.weight.data = (3 * equal.net.quantize.embedding.weight.data).half().float()

    assert fits(SAMPLERS, VQ, 2) and fits(SAMPLERS, equal, 2)
    assert not fits(SAMPLERS, VQ, 3) and not fits(SAMPLERS, other, 2) and not fits(SAMPLERS, tiny_vq(31), 2)

    expect_fitting(SAMPLERS, VQ, 2)
    with pytest.raises(UserError, match=r"^latent_samplers: .* by the factor 2, .* the factor 3"):
        expect_fitting(SAMPLERS, VQ, 3)
    with pytest.raises(UserError, match=r"^latent_samplers: .* codes of .* tiny vq; "):
        expect_fitting(SAMPLERS, other, 2)


@pytest.mark.parametrize(("room", "parts"), [(36, 5), (72, 3), (1 << 16, 1)])
def test_as_many_images_are_enlarged_at_once_as_fit(monkeypatch, room, parts):
    """An image of 6 x 6 cells, or one that is enlarged to it."""
    monkeypatch.setattr("fastar_nodes.samplers.tokens.mulosd.drafting._CELLS_AT_ONCE", room)
    calls = []

    def counted(network):
        return lambda codes: calls.append(len(codes)) or network(codes)

    sampling = LatentUpSampling(VQ, SAMPLERS)
    small, large = codes_of(5, 3, 3), codes_of(5, 6, 6)
    monkeypatch.setattr(SAMPLERS.net, "up", counted(SAMPLERS.net.up))
    monkeypatch.setattr(SAMPLERS.net, "down", counted(SAMPLERS.net.down))
    up, down = sampling.up(small, 2), sampling.down(large, 2)
    assert len(calls) == 2 * parts
    monkeypatch.undo()
    assert torch.equal(up, SAMPLERS.net.up(small)) and torch.equal(down, SAMPLERS.net.down(large))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_in_the_loop_a_draft_that_is_kept_is_the_enlarged_one(rows):
    """At tau 0 the image is what U_r makes of the draft, and the draft goes on from what D_r makes of that."""
    reduced = []

    class Watched(LatentUpSampling):
        def down(self, codes, factor):
            reduced.append((codes.clone(), super().down(codes, factor)))
            return reduced[-1][1]

    settings = MuLoSDSettings(tau=0.0, draft_rows=rows, draft_window=0, cfg=1.0, top_k=0, top_p=1.0)
    draws = TokenNoise(5, (0, 1, 2))
    run = mulosd(
        LARGE["class"],
        condition_of("class"),
        settings,
        draws,
        draft=SMALL["class", 3],
        up_sampler=Watched(VQ, SAMPLERS),
    )
    result = finish(run)
    assert result.report.acceptance == 1 and result.report.settings["up_sampler"] == "tiny latent samplers"

    ends = [2 * end for end in range(rows, 3, rows)] if rows else []
    assert [codes.shape[1] for codes, _ in reduced] == ends
    for codes, small in reduced:
        assert torch.equal(codes, result.latents[:, : codes.shape[1]])
        assert torch.equal(small, SAMPLERS.net.down(codes))
