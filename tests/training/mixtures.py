"""Mixtures of experts whose routers would decide otherwise in every run, as atomic additions on a GPU can make them."""

import itertools

import torch
from torch import nn

WIDTH, EXPERTS, CHOSEN = 16, 4, 2
_runs = itertools.count()


@torch.library.custom_op("rotor_tests::unsteady", mutates_args=())
def unsteady(scores: torch.Tensor) -> torch.Tensor:
    """Other numbers in every run, whatever the random state."""
    generator = torch.Generator().manual_seed(next(_runs))
    return scores + torch.randn(scores.shape, generator=generator)


@unsteady.register_fake
def _(scores: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(scores)


def start_again() -> None:
    """Let the next run be the first again, for a twin."""
    global _runs
    _runs = itertools.count()


class Mixture(nn.Module):
    """Tokens go to the experts that `choose` picks by unsteady scores; the weights of the experts are steady."""

    def __init__(self, how: str = "topk") -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.wide = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.narrow = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        scores = self.gate(value)
        weight = scores.softmax(-1) * self.choose(unsteady(scores.detach()))
        made = torch.einsum("td,edh->teh", value, self.wide).relu()
        return value + torch.einsum("teh,ehd,te->td", made, self.narrow, weight)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """1 for the experts of each token, 0 for the others."""
        if self.how == "threshold":
            return (scores > 0).float()
        if self.how == "written":
            chosen = torch.zeros(scores.shape, dtype=torch.bool)
            chosen.copy_(scores)
            return (chosen & (scores > 0)).float()
        if self.how == "counted":
            return (torch.arange(EXPERTS) < int(scores[0].sum().abs()) % EXPERTS + 1).float().expand_as(scores)
        picks = {
            "topk": lambda: scores.topk(CHOSEN).indices,
            "sort": lambda: scores.sort(descending=True).indices[:, :CHOSEN],
            "argmax": lambda: scores.argmax(-1, keepdim=True),
            "max": lambda: scores.max(-1, keepdim=True).indices,
            "sampled": lambda: torch.multinomial(scores.softmax(-1), CHOSEN),
            "rounded": lambda: scores.abs().round().long().clamp(max=EXPERTS - 1),
            "shifted": lambda: scores.topk(CHOSEN).indices.add_(1).remainder_(EXPERTS),
        }
        return torch.zeros_like(scores).scatter(-1, picks[self.how](), 1.0)
