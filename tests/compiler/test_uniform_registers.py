"""What tests/support/uniform_registers.py and sass.py find in listings of machine code."""

from tests.support.sass import arrives_early, overwritten
from tests.support.uniform_registers import unwritten


def listing(*lines: str) -> str:
    return "\n".join(x if x.startswith(".L") else f"        /*0000*/  {x} ;" for x in lines)


SHIFT = "USHF.R.U32.HI UR32, URZ, 0x4, UR25"
NEXT = "UIADD3 UR18, UP0, UR32, 0x2, URZ"
PRODUCT = "HGMMA.64x64x16.F32.BF16 R88, R116, gdesc[UR16], R88, gsb0"
BASE = "ULEA UR25, UR4, URZ, 0x18"
BEGIN = ("ULDC UR4, c[0x0][0x258]", BASE)


def test_product_before_its_input_is_found() -> None:
    """As ptxas 12.8.93 ordered them in a kernel of ours."""
    high = "UMOV UR19, 0x80000020"
    assert unwritten(listing(*BEGIN, NEXT, SHIFT, high, PRODUCT, "EXIT")) == [NEXT]
    assert not unwritten(listing(*BEGIN, SHIFT, NEXT, high, PRODUCT, "EXIT"))
    assert unwritten(listing(*BEGIN, SHIFT, NEXT, PRODUCT, "EXIT")) == [PRODUCT]


def test_every_way_counts() -> None:
    jump = "@P0 BRA `(.L_x_1)"
    assert unwritten(listing(*BEGIN, jump, SHIFT, ".L_x_1:", NEXT, "EXIT")) == [NEXT]
    assert not unwritten(listing(*BEGIN, SHIFT, jump, NEXT, ".L_x_1:", "EXIT"))
    # from its second turn on a loop has what the first one wrote
    loop = (".L_x_2:", NEXT, SHIFT, "@P0 BRA `(.L_x_2)", "EXIT")
    assert unwritten(listing(*BEGIN, *loop)) == [NEXT]


def test_copies_are_what_was_copied() -> None:
    kept, back = "MOV R11, UR32", "R2UR UR32, R11"
    assert not unwritten(listing(*BEGIN, kept, SHIFT, back, "EXIT"))
    assert unwritten(listing(*BEGIN, kept, SHIFT, back, NEXT, "EXIT")) == [NEXT]
    assert not unwritten(listing(*BEGIN, SHIFT, kept, back, NEXT, "EXIT"))
    # both registers of a load of 64 bits are others then, not the second one alone
    loaded = "LDL.64 R10, [R1+0x30]"
    assert not unwritten(listing(*BEGIN, kept, loaded, back, NEXT, "EXIT"))


def test_early_arrivals_are_found() -> None:
    store, meet = "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};", "bar.sync 2, 128;"
    arrival = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6];"
    assert arrives_early("\n".join([meet, store, arrival])) == [(store, arrival)]
    assert not arrives_early("\n".join([store, meet, arrival]))


def test_overwritten_operands_are_found() -> None:
    product = "HGMMA.64x32x16.F32.BF16 R56, R32, gdesc[UR4].tnspB, RZ, !UPT ;"
    constant = "IMAD.MOV.U32 R33, RZ, RZ, 0x3f803f80 ;"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    assert len(overwritten("\n".join([product, constant, wait]))) == 1
    assert len(overwritten("\n".join([product, "LDS.128 R28, [R4] ;", wait]))) == 0
    assert not overwritten("\n".join([constant, product, wait, constant]))
    assert not overwritten("\n".join([product, "STS [R33], R32 ;", wait]))
