"""The embedding and its guard."""

import pytest
import torch

from slipstream.ops.embedding import embedding


@pytest.mark.parametrize("bad", [-1, 32000, 50300])
def test_embedding_rejects_an_id_outside_the_vocabulary(bad: int) -> None:
    ids = torch.zeros(2, 20, dtype=torch.int64)
    ids[0, 17] = bad
    word = rf"input_ids: id {bad} at position \(0, 17\) is outside the vocabulary of 32000"
    with pytest.raises(ValueError, match=word):
        embedding(ids, torch.zeros(32000, 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_embedding_rejects_wrong_ids() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(embedding, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(5, 3)
    assert torch.equal(compiled(torch.tensor([4]), weight), weight[4:])
    with pytest.raises(ValueError, match="id 5 at position"):
        compiled(torch.tensor([5]), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embedding_gradient_adds_in_float32(dtype: torch.dtype) -> None:
    """A token that a batch has many times: 16 bits hold no running sum of that many ones."""
    weight = torch.zeros(4, 3, dtype=dtype, requires_grad=True)
    embedding(torch.tensor([2] * 5000 + [1]), weight).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == dtype
    assert torch.equal(weight.grad[:, 0], torch.tensor([0, 1, 5000, 0]).to(dtype))
