"""linear_log_probs where chunks, ignored rows and impossible classes matter."""

import pytest
import torch

from slipstream.common import linear_rows
from slipstream.ops import linear_log_probs


def test_log_probs_in_chunks_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(2, 13, 6).double(), torch.randn(11, 6).double()
    target = torch.randint(0, 11, (2, 13))
    target[0, 3] = -100
    found = []
    for most in (1 << 20, 40):
        monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", most)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_prob, entropy = linear_log_probs(*leaves, target, return_entropy=True)
        loss = (log_prob.sin() + 0.1 * entropy.square()).sum()
        found.append([log_prob, entropy, *torch.autograd.grad(loss, leaves)])
    assert len(linear_rows.row_chunks(hidden.flatten(0, 1), 11)) == 9
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0][0, 3] == found[0][1][0, 3] == 0 and not found[0][2][0, 3].any()


def test_log_probs_alone_are_those_beside_entropies() -> None:
    hidden, weight, bias = torch.randn(7, 6), torch.randn(11, 6), torch.randn(11)
    target = torch.randint(0, 11, (7,))
    both, _ = linear_log_probs(hidden, weight, target, bias, temperature=2.0, return_entropy=True)
    alone = linear_log_probs(hidden, weight, target, bias, temperature=2.0)
    torch.testing.assert_close(alone, both)
    want = ((hidden @ weight.t() + bias) / 2).log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(both, want)


def test_log_probs_of_classes_that_cannot_be() -> None:
    hidden, weight = torch.randn(5, 6, requires_grad=True), torch.randn(4, 6)
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    target = torch.tensor([0, 2, 3, 0, 2])
    log_prob, entropy = linear_log_probs(hidden, weight, target, bias, return_entropy=True)
    p = (hidden @ weight.t())[:, [0, 2, 3]].log_softmax(-1)
    want = p.gather(1, torch.tensor([0, 1, 2, 0, 1])[:, None])[:, 0], -(p.exp() * p).sum(-1)
    torch.testing.assert_close(entropy, want[1])
    # the gradient that comes in may be any number
    for factor in (0.1, 1.0, 30.0):
        found, wanted = (
            torch.autograd.grad((a + factor * b).sum(), hidden, retain_graph=True)[0]
            for a, b in ((log_prob, entropy), want)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
