"""Compilations in a child: the parent outlives an abort, a kill and a hang of the compiler."""

import pytest

from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)


def test_worker_outlives_its_compiler() -> None:
    from slipstream.core.aot import Job
    from slipstream.core.worker import Worker

    def job(what: str) -> Job:
        kernel = "tests.core.planted:planted_kernel"
        return Job(kernel, {"x_ptr": "*i32"}, {"WHAT": what}, {}, 1, 1, {}, "sm_80")

    worker = Worker()
    try:
        assert worker.compile(job("nothing")).status == "ok"
        first = worker.about
        assert set(first) == {"triton", "ptxas_sm_90", "ptxas_sm_100"}
        refused = worker.compile(job("raise"))
        assert refused.status == "refused" and "Unsupported rounding mode" in refused.reason
        aborted = worker.compile(job("abort"))
        assert aborted.status == "crash" and "SIGABRT" in aborted.reason
        killed = worker.compile(job("kill"))
        assert killed.status == "crash" and "SIGKILL" in killed.reason
        worker.start()
        hung = worker.compile(job("hang"), timeout=1.0)
        assert hung.status == "hang" and "1 s" in hung.reason
        assert worker.compile(job("nothing")).status == "ok"
    finally:
        worker.close()
