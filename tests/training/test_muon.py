import copy

import torch
from torch import nn

from slipstream.training.muon import Muon, orthogonal


def test_orthogonal_has_singular_values_near_one() -> None:
    for shape in ((3, 16, 40), (2, 40, 16), (1, 24, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(*shape)))
        assert values.max() < 1.3
        assert values.median() > 0.6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.LayerNorm(8))


def optimizer(m: nn.Module, **options) -> Muon:
    matrices = [p for p in m.parameters() if p.dim() == 2]
    others = [p for p in m.parameters() if p.dim() < 2]
    return Muon(matrices, others, lr=1e-2, matrix_lr=0.02, weight_decay=0.1, **options)


def train(m: nn.Module, opt: Muon, steps: range) -> None:
    for i in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        opt.zero_grad()
        (m(x) - x.flip(-1)).square().mean().backward()
        opt.step()


def test_muon_gives_the_others_adamw_steps() -> None:
    ours, theirs = net(), net()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optimizer(ours).step()
    torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0).step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) == (p.dim() < 2)


def test_muon_learns() -> None:
    m, x = net(), torch.randn(64, 8)
    before = (m(x) - x.flip(-1)).square().mean()
    train(m, optimizer(m), range(60))
    assert (m(x) - x.flip(-1)).square().mean() < 0.5 * before


def test_muon_continues_from_its_state() -> None:
    whole = net()
    train(whole, optimizer(whole), range(6))
    half = net()
    first = optimizer(half)
    train(half, first, range(3))
    second = optimizer(half)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(half, second, range(3, 6))
    for p, q in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(p, q)
