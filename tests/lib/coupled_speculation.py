"""SCD (ICML 2026, arXiv 2510.24211) for one image of a class: speculative Jacobi decoding whose drafts are coupled.

It keeps the distribution of serial decoding, while *parallel* of the pack keeps the image. Here it counts passes beside
*parallel*. A pass runs the network without a cache over all tokens so far, which changes no count.
"""

import torch
from fastar_nodes.networks.llama import TokenModel
from fastar_nodes.samplers.tokens.sampling import tempered
from torch import Tensor


def distributions(model: TokenModel, label: int, tokens: Tensor, settings, first: int = 0) -> Tensor:
    """Sampling distributions fp32 [n + 1 - first, V] of the cells first .. n, given the tokens int64 [n]."""
    net = model.net
    classes = net.cls_embedding.embedding_table.weight[[label, net.config.condition_size]][:, None]
    x = torch.cat([classes, net.tok_embeddings.weight[tokens].expand(2, -1, -1)], 1)
    given, null = net(x, torch.arange(-1, len(tokens)), net.positions(model.grid, 1))[:, first:]
    return tempered(null + settings.cfg * (given - null), settings).softmax(-1)


@torch.no_grad()
def coupled_decoding(model: TokenModel, label: int, settings, window: int, seed: int) -> tuple[Tensor, int]:
    """Tokens int64 [N], and the number of passes."""
    rng = torch.Generator().manual_seed(seed)
    count, vocab = model.tokens, model.net.config.vocab

    # 1. Drafts at random, and one table of Gumbel noise a cell, which couples the drafts of one pass with the next.
    tokens = torch.randint(vocab, (count,), generator=rng)
    drafted_from = torch.full((count, vocab), 1 / vocab)
    gumbel = -torch.rand(count, vocab, generator=rng).log().neg().log()
    done = passes = 0

    while done < count:
        end = min(done + window, count)

        # 2. One pass gives the distributions of the window's cells, given the drafts before each.
        p = distributions(model, label, tokens[: end - 1], settings, done)
        passes += 1

        # 3. Verify the drafts in order: accept with min(1, p / q); the first rejected one is resampled from (p - q)+.
        start = done
        while done < end:
            cell, own, q = done, p[done - start], drafted_from[done]
            done += 1
            if torch.rand((), generator=rng) * q[tokens[cell]] >= own[tokens[cell]]:
                left = (own - q).clamp(min=0)
                tokens[cell] = torch.multinomial(left if left.sum() > 0 else own, 1, generator=rng)
                break

        # 4. The other cells of the window are drafted again, with their own noise.
        again = slice(done, end)
        tokens[again] = (p[done - start :].log() + gumbel[again]).argmax(-1)
        drafted_from[again] = p[done - start :]

    return tokens, passes
