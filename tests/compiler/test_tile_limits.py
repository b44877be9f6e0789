"""What compiler/arch.py says of architectures: instructions that compilers take, limits of those
that are not listed; errors name what would run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.compiler import arch as checked
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS, MATRICES, Arch, expect_fits, instruction, named, of
from tests.support import wants

slow = pytest.mark.slow


def products() -> Iterator[Any]:
    for arch in ARCHS.values():
        for rows, warps in ((64, 4), (32, 4), (64, 2)):
            quick = arch.name == "sm_90"
            yield pytest.param(arch, rows, warps, marks=[] if quick else [slow])


@wants.compiler
@pytest.mark.parametrize(("arch", "rows", "warps"), [*products()])
def test_instruction_is_as_predicted(arch: Arch, rows: int, warps: int) -> None:
    tensors = {"x_ptr": "*bf16", "y_ptr": "*bf16", "o_ptr": "*fp32"}
    constants = {"M": rows, "N": 64}
    job = Job(
        "tests.support.planted_bugs:narrow_kernel", tensors, constants, {}, warps, 2, {}, arch.name
    )
    made = {x for x in MATRICES if job.compile().instructions[x]}
    wanted = instruction(arch, rows, warps)
    assert made == (set() if wanted is None else {wanted})


def test_every_row_is_its_own_device() -> None:
    for row in ARCHS.values():
        assert of(row.capability, hip=row.name == "gfx942") is row
        assert row.wgmma == (row.instruction == "wgmma")


def test_unlisted_device_limits() -> None:
    assert of((8, 7)).shared == ARCHS["sm_80"].shared
    assert of((12, 1)).name == "sm_121"
    later = of((13, 0))
    assert (later.name, later.wgmma, later.shared) == ("sm_130", False, ARCHS["sm_86"].shared)
    assert of((6, 0)).shared == ARCHS["sm_75"].shared


def test_errors_name_the_way_out() -> None:
    assert checked.closest_legal(0, lambda x: x, lambda x: "never", {}) is None
    with pytest.raises(ValueError, match=r"arch: want one of sm_70, .* gfx942, got 'sm_91'"):
        named("sm_91")
    with pytest.raises(
        ValueError,
        match="scan of 128 x 128: needs 120000 bytes of shared memory, sm_86 has 101376; it runs"
        " on sm_80, sm_90, sm_100",
    ):
        expect_fits("scan of 128 x 128", 120000, ARCHS["sm_86"])
    with pytest.raises(ValueError, match=r"3 stages: .* 2 stages need 80000"):
        expect_fits("3 stages", 120000, ARCHS["sm_86"], nearest="2 stages need 80000")
    with pytest.raises(ValueError, match="no architecture has as much"):
        expect_fits("scan", 786432, ARCHS["sm_90"])
    expect_fits("scan", 65536, ARCHS["gfx942"])


def test_units_are_in_the_table_alone() -> None:
    """Code that needs a GPU's number of multiprocessors asks the table, or the device."""
    root = Path(checked.__file__).parents[1]
    units = 114, 132, 264, 528
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in units
    }
    assert found == {"compiler/arch.py"}
