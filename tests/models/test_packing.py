"""Sequences packed into rows, however a caller says so: each gives what it gives alone."""

import pytest
import torch
from torch import Tensor

from slipstream.models import MIXERS, SlipstreamForCausalLM, packing
from slipstream.models.cache import CACHE
from tests.support.language_models import small_model

VOCAB = 31
LENGTHS = ((4, 1, 3), (2, 6))  # of the sequences in each of two rows
HYBRID = ["gated_deltanet", "rwkv7", "attention"]
# eight layers at a time: float32 loses more digits in sixteen
EVERY = [list(MIXERS)[i : i + 8] for i in range(0, len(MIXERS), 8)]


def model(mixers: list[str]) -> SlipstreamForCausalLM:
    m = small_model(mixers, vocab_size=VOCAB, initializer_range=0.3)
    with torch.no_grad():
        for p in m.model.layers.parameters():
            if p.dim() > 1:
                p.add_(torch.randn_like(p), alpha=0.2)
    return m.eval()


def row_of(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randint(VOCAB, (1, n)) for n in lengths]


def assert_same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def positions(lengths: tuple[int, ...], start: int = 0) -> Tensor:
    return torch.cat([torch.arange(n) + start for n in lengths])[None]


@torch.no_grad()
@pytest.mark.parametrize(
    "mixers", [HYBRID, *(pytest.param(part, marks=pytest.mark.slow) for part in EVERY)]
)
@pytest.mark.parametrize("start", [0, 5])
def test_packed_rows_equal_separate_sequences(mixers: list[str], start: int) -> None:
    m, rows = model(mixers), [row_of(lengths) for lengths in LENGTHS]
    ids = torch.cat([torch.cat(row, 1) for row in rows])
    at = torch.cat([positions(lengths, start) for lengths in LENGTHS])
    want = torch.cat([torch.cat([m(x).logits for x in row], 1) for row in rows])
    assert_same(m(ids, position_ids=at).logits, want)
    numbers = torch.tensor([[0] * 4 + [1] + [2] * 3, [0] * 2 + [1] * 6])
    assert_same(m(ids, seq_idx=numbers).logits, want)
    for given in ({"seq_idx": numbers[:1]}, {"position_ids": at[:1]}):  # one row for all
        each = {name: x.expand(2, -1) for name, x in given.items()}
        assert_same(m(ids, **given).logits, m(ids, **each).logits)
    whole = m(ids).logits
    assert not torch.allclose(whole, want, atol=1e-2)


@torch.no_grad()
def test_packing_boundaries_from_positions() -> None:
    m = model(HYBRID)
    first, second = row_of((3, 4))
    ids = torch.cat([first, second], 1)
    want = torch.cat([m(first).logits, m(second).logits], 1)
    # falls to a number above 0, jumps forward, stays
    for at in ([5, 6, 7, 2, 3, 4, 5], [0, 1, 2, 9, 10, 11, 12], [0, 1, 2, 2, 3, 4, 5]):
        assert_same(m(ids, position_ids=torch.tensor([at])).logits, want)
    whole = m(ids).logits
    assert_same(m(ids, position_ids=torch.arange(7)[None] + 4).logits, whole)
    assert_same(m(ids, position_ids=torch.arange(7)[None].expand(3, 1, -1)).logits, whole)


@torch.no_grad()
def test_positions_are_honoured_in_padded_rows() -> None:
    m, (a, b, c) = model(HYBRID), row_of((3, 2, 4))
    pad = torch.zeros(1, 1, dtype=torch.long)
    ids = torch.cat([torch.cat([pad, a, b], 1), torch.cat([pad, pad, c], 1)])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    at = torch.tensor([[1, 0, 1, 2, 0, 1], [1, 1, 0, 1, 2, 3]])
    logits = m(ids, attention_mask=mask, position_ids=at).logits
    assert_same(logits[0, 1:], torch.cat([m(a).logits, m(b).logits], 1)[0])
    assert_same(logits[1, 2:], m(c).logits[0])
    # a hole in the mask is no border, whether positions count it or not
    ids, mask = torch.cat([a[:, :2], pad, a[:, 2:]], 1), torch.tensor([[1, 1, 0, 1]])
    for at in ([0, 1, 2, 3], [0, 1, 1, 2]):
        at = torch.tensor([at])
        real = at[:, [0, 1, 3]]
        want = m(a, cu_seqlens=torch.tensor([0, 3]), position_ids=real).logits
        logits = m(ids, attention_mask=mask, position_ids=at).logits
        assert_same(logits[:, [0, 1, 3]], want)


@torch.no_grad()
def test_offsets_leave_padding_out() -> None:
    m, (a, b) = model(HYBRID), row_of((3, 2))
    ids = torch.cat([a, b, torch.zeros(1, 2, dtype=torch.long)], 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    offsets = torch.tensor([0, 3, 7])
    out = m(ids, attention_mask=mask, cu_seqlens=offsets, labels=ids)
    assert_same(out.logits[:, :5], torch.cat([m(a).logits, m(b).logits], 1))
    losses = m(a, labels=a).loss * 2 + m(b, labels=b).loss
    torch.testing.assert_close(out.loss, losses / 3)


@torch.no_grad()
def test_states_of_packed_rows_go_on() -> None:
    """One sequence after another, as rows of the next call."""
    m, rows = model(HYBRID), [row_of(lengths) for lengths in LENGTHS]
    ids = torch.cat([torch.cat(row, 1) for row in rows])
    at = torch.cat([positions(lengths) for lengths in LENGTHS])
    cache = m(ids, position_ids=at, use_cache=True)[CACHE]
    more = torch.randint(VOCAB, (5, 1))
    got = m(more, past_key_values=cache).logits
    for x, one, logits in zip([x for row in rows for x in row], more, got, strict=True):
        assert_same(logits[0], m(torch.cat([x, one[None]], 1)).logits[0, -1])


@torch.no_grad()
def test_positions_reach_rotary_layers() -> None:
    """Beside offsets they are nothing but positions, which may leave gaps."""
    m, ids = model(["attention", "mla"]), torch.randint(VOCAB, (1, 6))
    gaps, offsets = torch.tensor([[0, 1, 2, 40, 41, 42]]), torch.tensor([0, 6])
    plain = m(ids, cu_seqlens=offsets).logits
    assert not torch.allclose(
        m(ids, cu_seqlens=offsets, position_ids=gaps).logits, plain, atol=1e-3
    )
    moved = torch.arange(6)[None] + 11
    assert_same(m(ids, cu_seqlens=offsets, position_ids=moved).logits, plain)
    # the second half of a call in two
    cache = m(ids[:, :3], position_ids=gaps[:, :3], use_cache=True)[CACHE]
    halves = m(ids[:, 3:], position_ids=gaps[:, 3:], past_key_values=cache).logits
    assert_same(halves, m(ids, cu_seqlens=offsets, position_ids=gaps).logits[:, 3:])


@torch.no_grad()
def test_loss_does_not_cross_borders() -> None:
    m, rows = model(HYBRID), [row_of(lengths) for lengths in LENGTHS]
    ids = torch.cat([torch.cat(row, 1) for row in rows])
    at = torch.cat([positions(lengths) for lengths in LENGTHS])
    sequences = [x for row in rows for x in row if x.shape[1] > 1]
    targets = sum(x.shape[1] - 1 for x in sequences)
    want = sum(m(x, labels=x, num_items_in_batch=targets).loss for x in sequences)
    torch.testing.assert_close(m(ids, labels=ids, position_ids=at).loss, want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": [0, 2, 6], "cu_seq_lens_q": [0, 3, 6]}, r"cu_seq_lens_q.*\[0, 2, 6\]"),
        ({"cu_seq_lens_q": [0, 2, 6], "cu_seq_lens_k": [0, 6]}, "cu_seq_lens_k"),
        ({"cu_seq_lens_q": [0, 2, 6], "seq_idx": [[0, 0, 0, 1, 1, 1]]}, "seq_idx"),
        ({"seq_idx": [[0, 0, 1]]}, r"seq_idx: want shape .*, got \(1, 3\)"),
        ({"position_ids": [[0, 1, 2]]}, r"position_ids: want shape \(1, 6\).*got \(1, 3\)"),
        ({"position_ids": [[range(6)], [range(6)], [range(1, 7)]]}, r"position_ids.*\(3, 1, 6\)"),
    ],
)
def test_contradictions_are_refused(arguments: dict, message: str) -> None:
    given = {name: torch.tensor([*map(_lists, x)]) for name, x in arguments.items()}
    for run in (model(HYBRID), model(HYBRID).model):
        with pytest.raises(ValueError, match=message):
            run(torch.zeros(1, 6, dtype=torch.long), **given)


def _lists(x: object) -> object:
    return [_lists(y) for y in x] if isinstance(x, list | range) else x


def test_offsets_that_agree_may_be_given_twice() -> None:
    m, ids = model(HYBRID), torch.randint(VOCAB, (1, 6))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    numbers = torch.tensor([[0, 0, 1, 1, 1, 1]])
    out = m(
        ids,
        cu_seqlens=offsets.long(),
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=torch.tensor([0, 2, 2, 6]),  # an empty sequence holds no token
        seq_idx=numbers,
        max_length_q=4,
        max_length_k=4,
        position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]),
    )
    assert_same(out.logits, m(ids, seq_idx=numbers).logits)


def test_new_sequences_beside_a_cache_are_refused() -> None:
    m, ids = model(HYBRID), torch.randint(VOCAB, (1, 4))
    cache = m(ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"position_ids.*cache"):
        m(ids, past_key_values=cache, position_ids=torch.tensor([[4, 5, 0, 1]]))


def test_offsets_of_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cu_seqlens: want a batch of one"):
        model(HYBRID)(torch.zeros(2, 3, dtype=torch.long), cu_seqlens=torch.tensor([0, 6]))


def test_packed_call_is_forgotten_at_its_first_column() -> None:
    absent = packing.Absent()
    absent.add(3, 5, torch.tensor([4]))
    absent.crop(3)
    assert absent.after(2) is None
