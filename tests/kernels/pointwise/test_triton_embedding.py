"""The embedding's kernel and the one that only looks at ids: under the interpreter and compiled."""

import pytest
import torch

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime import token_ids as guard
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.token_ids import raise_pending
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("ids", ["*i64", "*i32"])
@pytest.mark.sample(which=lambda arch, ids: ids == "*i64" or arch == "sm_90")
def test_embedding_compiles(arch: str, ids: str) -> None:
    got = compile_kernel(
        "slipstream.kernels.elementwise.triton.embedding:embedding_kernel",
        {"ids_ptr": ids, "weight_ptr": "*bf16", "y_ptr": "*bf16", "records_ptr": "*i64"},
        {"D": 4096, "BR": 2, "BD": 1024}, scalars={"weight_stride": "i32:16"}, target=arch,
    )  # fmt: skip
    assert got.stack == 0


SCANS = ["ids", "ids but for one", "ids counted", "indices", "some indices", "offsets"]


@pytest.mark.parametrize("kind", SCANS)
def test_scans_compile(kind: str) -> None:
    some = {"lengths_ptr": "*i32", "rows_ptr": "*i64"} if "some" in kind else {}
    count = {"inverse_count_ptr": "*fp32"} if "counted" in kind else {}
    got = compile_kernel(
        "slipstream.runtime.token_ids_kernel:scan_ids_kernel",
        {"ids_ptr": "*i32" if "ind" in kind else "*i64", "slots_ptr": "*i64", **some, **count},
        {"KIND": kind.split()[-1 if "some" in kind else 0],
            "HAS_IGNORED": "one" in kind or bool(count), "B": 4096 if count else 1024},
        warps=8 if count else 4,
    )  # fmt: skip
    assert got.stack == 0


def message() -> str:
    try:
        raise_pending()
    except ValueError as error:
        return str(error)
    return ""


@interpreted
def test_triton_embedding_reads_rows_and_finds_wrong_ids() -> None:
    from slipstream.kernels.elementwise.triton import embedding
    from slipstream.runtime import token_ids_kernel

    for modules in (token_ids_kernel, embedding):
        modules.SLOTS = 4  # several blocks a program
    token_ids_kernel.BLOCK = 8
    for shape, D in [((2, 30), 5), ((7,), 12), ((1, 700), 1500), ((0, 3), 4), ((2, 2, 3), 16)]:
        for dtype in (torch.int32, torch.int64):
            ids, weight = torch.randint(0, 9, shape, dtype=dtype), torch.randn(9, D)
            with torch.inference_mode():
                assert torch.equal(embedding.gather(ids, weight), weight[ids.long()])
            for table in (weight, torch.randn(D, 9).T, torch.randn(9, 2 * D)[:, :D]):
                y = embedding.gather(ids, table)
                assert torch.equal(y, table[ids.long()]), (shape, D)
            if ids.numel():
                token_ids_kernel.scan("target", ids, 9, None)
            assert message() == ""
    ids, weight = torch.randint(0, 9, (3, 300)), torch.randn(9, 5)
    for wrong in (9, -1, 27, 1 << 40, -(1 << 62)):
        ids[0, 299], ids[1, 17], ids[2, 5] = 3, wrong, 1 << 33
        y = embedding.gather(ids, weight)
        assert torch.equal(y, weight[ids.clamp(0, 8)])
        want = f"input_ids: id {wrong} at position (1, 17) is outside the vocabulary of 9"
        assert message() == want, message()
        assert message() == ""
        token_ids_kernel.scan("target", ids.flatten(), 9, wrong)
        last = 2 * 300 + 5
        assert message() == f"target: id {1 << 33} at position ({last},) is outside the " + (
            "vocabulary of 9"
        )
    token_ids_kernel.scan("target", torch.tensor([0, -100, 8, -100]), 9, -100)
    assert message() == "" and not guard._watches[0].slots.any()
