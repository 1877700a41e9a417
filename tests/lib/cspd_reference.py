"""CSpD's algorithm 1 the slow plain way, from the text of the paper (arXiv 2411.11925): one image, one token, one
diffusion step at a time, densities as products of Gaussians in float64.

With the samplers it shares the network's forward passes on full sequences and the random numbers. It stays forever; the
mode ``paper`` is compared with it.
"""

import math
from typing import NamedTuple

import torch
from fastar_nodes.samplers.mar.canvas import TokenIndex
from fastar_nodes.samplers.mar.cspd.rejection import RejectionNoise
from fastar_nodes.samplers.noise import row_keys
from mar_reference import cosine_tables, diffuse, full_z, kernel, schedule
from torch import Tensor

MOST_REDRAWS = 100
PREFILLED, ACCEPTED, REJECTED = 0, 1, 5  # what the report has for each


class Path(NamedTuple):
    """A token's way through the diffusion: means and stds of every step, float64 [S, channels], and where it ends."""

    means: Tensor
    stds: Tensor
    token: Tensor


def path(net, z: list[Tensor], scale: float, start: Tensor, noise: Tensor, times, temperature: float) -> Path:
    """x_{t-1} = mu + sigma eps at every step, the last one included; its sigma is that of the step before, of the
    variances between which the network chooses (Nichol & Dhariwal 2021).
    """
    c = net.config.channels
    table = cosine_tables(times)
    x = start
    means, stds = [], []
    for k, i in enumerate(reversed(range(len(table)))):
        t, beta, abar = table[i]
        out, *null = (net.head(x[None], torch.tensor([t]), row[None])[0] for row in z)
        eps = out[:c]
        if null:
            eps = null[0][:c] + scale * (eps - null[0][:c])
        x0 = (x - math.sqrt(1 - abar) * eps) / math.sqrt(abar)
        mean, std = kernel(table, i, x, x0, out[c:])
        if not i:
            _, above, abar_above = table[1]
            low = math.log(above * (1 - abar) / (1 - abar_above))
            std = torch.exp(0.5 * (low + (out[c:] + 1) / 2 * (math.log(beta) - low)))
        x = mean + temperature * std * noise[k]
        means.append(mean.double())
        stds.append((temperature * std).double())

    return Path(torch.stack(means), torch.stack(stds), x)


def density(x: Tensor, path: Path) -> float:
    """log of p(x_0 | x_1), a product over the channels."""
    mean, std = path.means[-1], path.stds[-1]
    return float((-0.5 * ((x.double() - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum())


def log_ratio(x: Tensor, p: Path, q: Path) -> float:
    """log of p(x) / q(x) by equations 4 and 5."""
    log_sigma = float((q.stds[:-1].log() - p.stds[:-1].log()).sum())
    return log_sigma + density(x, p) - density(x, q)


class Reference:
    """One image; ``counts`` are those of the report."""

    def __init__(self, target, draft, label: int, settings, noise, times):
        self.target, self.draft, self.settings, self.times = target, draft, settings, times
        self.label = label
        c = target.net.config
        self.plan = schedule(c.tokens, settings)
        self.reveal = noise.orders(c.tokens).flip(1)[0].tolist()
        self.start = noise.start_noise("full", c.tokens, c.channels)[0]
        self.steps = noise.step_noise("full", len(times), c.tokens, c.channels)[0]
        self.rejection_noise = RejectionNoise(row_keys(noise, "verify", c.tokens))
        self.tokens = torch.zeros(c.tokens, c.channels)
        self.outcome = torch.zeros(c.tokens, dtype=torch.uint8)
        self.counts = {"accepted": 0, "rejected": 0, "redraws": 0, "redraws_exhausted": 0}

    def z(self, model, tokens: Tensor, known: list[int]) -> list[Tensor]:
        net = model.net
        rows = [net.class_emb.weight[self.label]] + [net.fake_latent[0]] * (self.settings.cfg != 1)
        return [full_z(net, tokens, known, row) for row in rows]

    def path(self, model, z: list[Tensor], p: int, scale: float) -> Path:
        at = [row[p] for row in z]
        return path(model.net, at, scale, self.start[p], self.steps[:, p], self.times, self.settings.temperature)

    @torch.no_grad()
    def run(self) -> Tensor:
        """Latents [1, C, H, W]."""
        # Pre-filled tokens are the target's, by MAR itself.
        prefilled = int(self.settings.steps * self.settings.prefill_ratio) + 1
        for first, last, scale in self.plan[:prefilled]:
            z = self.z(self.target, self.tokens, self.reveal[:first])
            made = {}
            for p in self.reveal[first:last]:
                rows = [row[p] for row in z]
                noise = self.steps[:, p]
                made[p] = diffuse(
                    self.target.net, rows, scale, self.start[p], noise, self.times, self.settings.temperature
                )
            for p, token in made.items():
                self.tokens[p] = token

        at = prefilled
        while at < len(self.plan):
            at = self.algorithm_1(at)
        return self.target.to_latents(self.tokens[None])

    def algorithm_1(self, at: int) -> int:
        """From AR step ``at``; the AR step after the last decided one."""
        # 1. The draft model samples gamma guesses one after the other.
        guesses = self.tokens.clone()
        q: dict[int, Path] = {}
        segment = self.plan[at : at + self.settings.draft_length]
        for first, last, scale in segment:
            z = self.z(self.draft, guesses, self.reveal[:first])
            for p in self.reveal[first:last]:
                q[p] = self.path(self.draft, z, p, scale)
            for p in self.reveal[first:last]:
                guesses[p] = q[p].token

        # 2. The target judges them, each given the guesses before it, up to the first rejection.
        for first, last, scale in segment:
            z = self.z(self.target, guesses, self.reveal[:first])
            here = self.reveal[first:last]
            decided = [self.judge(p, q[p], self.path(self.target, z, p, scale)) for p in here]
            at += 1
            if not all(decided):
                return at

        # 3. If all were accepted, the next one is a sample of the target.
        if at < len(self.plan):
            first, last, scale = self.plan[at]
            z = self.z(self.target, self.tokens, self.reveal[:first])
            own = {p: self.path(self.target, z, p, scale).token for p in self.reveal[first:last]}
            for p, token in own.items():
                self.tokens[p] = token
        return at + 1

    def judge(self, position: int, q: Path, p: Path) -> bool:
        """Decide a token; whether its guess was accepted."""
        token = TokenIndex((torch.tensor([0]), torch.tensor([position])))
        if math.log(float(self.rejection_noise.acceptance(token))) < min(0.0, log_ratio(q.token, p, q)):
            self.tokens[position] = q.token
            self.outcome[position] = ACCEPTED
            self.counts["accepted"] += 1
            return True

        # Acceptance-rejection sampling: proposals of p, kept with probability max(0, Sigma p - q) / (Sigma p).
        self.outcome[position] = REJECTED
        self.counts["rejected"] += 1
        self.tokens[position] = p.token
        for number in range(MOST_REDRAWS):
            normal, uniform = self.rejection_noise.proposals(token, number, 1, len(q.token))
            proposal = (p.means[-1] + p.stds[-1] * normal[0, 0].double()).float()
            self.counts["redraws"] += 1
            if float(uniform) < max(0.0, 1 - math.exp(min(50.0, -log_ratio(proposal, p, q)))):
                self.tokens[position] = proposal
                return False

        self.counts["redraws_exhausted"] += 1
        return False
