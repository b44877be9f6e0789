"""What tests/support/sass.py finds in the code of kernels."""

from tests.support.sass import arrives_early, overwritten


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
