"""What compilers make of the kernels, on a GPU: ptxas releases, Triton releases, compute-sanitizer.

    python bench/compilers.py ptxas [PATH]              every operator by this ptxas, by default
                                                        Triton's own, against float64
    python bench/compilers.py compile DIR 3.8.0 3.9.0   the sm_90 kernels by these Triton releases;
                                                        anywhere, with pip
    python bench/compilers.py run DIR                   those cubins under the Triton that is here
    compute-sanitizer --tool memcheck python bench/compilers.py sanitize --only chunk_gla

ptxas: faults of ptxas (compiler/known_bugs.py) show in numbers alone. Forward and backward by each
back end as `slipstream doctor` checks them, in a process for each operator and dtype, since an
illegal access ends the process.

compile, run: a line each with the worst relative error of results and gradients at 300 tokens, the
greatest difference among 30 calls at 4096 (0 unless something races), milliseconds, what was
replaced.

sanitize: odd sizes, packed sequences and states, strong gates; every tensor has memory of its own,
so that an access beyond its end is seen. Heads of 128 take the kernels for sm_90. The sanitizer
slows kernels down a hundredfold: a few operators at a time. racecheck needs --num-cuda-barriers 64,
and of kernels whose warps have parts still reports what one part stores and another loads, since an
arrival speaks for one thread there; tests/gluon_emulator/race_detector.py checks those.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# sanitize: read when torch is imported
if "sanitize" in sys.argv:
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from harness import DEVICE, Provider, Report, error, in_turns, parser
from torch import Tensor

from slipstream.tools.catalog import Sample, Shape, chosen

FOLLOWED = (  # operators that multiply
    "chunk_kda", "chunk_rwkv7", "chunk_dplr_delta_rule", "chunk_gated_delta_rule", "chunk_comba",
    "chunk_gla", "chunk_simple_gla", "chunk_gsa", "attention", "flash_attn_with_kvcache", "matmul",
)  # fmt: skip
FP32 = Shape(T=150, K=100, V=60, dtype=torch.float32, grouped=True, packed=True, state=True)
CHECKED = {"bf16": Shape(T=150), "fp32": FP32}
REPLACED = ("chunk_gated_delta_rule", "chunk_kda", "attention", "matmul")
SIZES = {300: Shape(T=300, H=4), 4096: Shape(B=4, T=4096, H=16)}
ABOUT = "shared", "num_warps", "global_scratch_size", "profile_scratch_size"
SANITIZED = {
    "whole": Shape(B=1, T=130, state=True),
    "packed": Shape(B=2, T=70, packed=True, grouped=True, state=True),
    "long": Shape(B=1, T=2300, H=1),
    "narrow": Shape(B=1, T=130, K=64, V=64, state=True),
    "odd": Shape(B=2, T=70, K=60, V=64, packed=True, grouped=True, state=True),
}


def check_ptxas(name: str, dtype: str, report: Report) -> None:
    """In a process of its own: a row for each check."""
    from slipstream.compiler import toolchain
    from slipstream.tools.doctor_checks import examine_one

    path = os.environ.get(toolchain.VARIABLE, "")
    about = {"triton": toolchain.triton_version(), "ptxas": toolchain.ptxas_version(path)}
    impls = ["triton", "sm90"] if DEVICE.type == "cuda" else ["eager"]
    for sample in chosen([name]):
        for check in examine_one(sample, report.shape(CHECKED[dtype]), DEVICE, impls):
            cells = {"operator": check.operator, "impl": check.impl, "shape": str(check.shape)}
            cells |= {"output": f"{check.output:.1e}", "gradient": f"{check.gradient:.1e}"}
            verdict = "agrees" if check.ok else check.error or check.worst
            report.row("ptxas_gpu", {**about, **cells, "verdict": verdict})


def by_ptxas(path: str | None, report: Report) -> None:
    from slipstream.compiler import toolchain

    if path is None:
        own = toolchain._bundled()
        path = "" if own is None else str(own / "ptxas")
    env = {**os.environ, **({toolchain.VARIABLE: path} if path else {})}
    left = None if report.options.seconds == float("inf") else report.options.seconds
    # one after the other: their rows go to one file
    for name in FOLLOWED:
        for dtype in CHECKED:
            if not report.wants(f"{name} {dtype}"):
                continue
            command = [sys.executable, __file__, "child", "ptxas", name, dtype]
            command += ["--small"] * report.options.small + ["--dry"] * report.options.dry
            try:
                done = subprocess.run(command, env=env, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                print(f"{name} {dtype}: over {left:.0f} s")
                continue
            if done.returncode:
                report.failures.append(f"{name} {dtype}: ended with {done.returncode}")


def provider(sample: Sample, T: int, double: bool = False) -> Provider:
    torch.manual_seed(0)
    args = sample.inputs(SIZES[T], DEVICE)
    if double:
        args = {n: x.double() if x.is_floating_point() else x for n, x in args.items()}
    impl = "reference" if double else None
    return Provider(lambda **given: sample.fn(**given, **sample.options, impl=impl), args)


def parameters(ptx: str) -> list[str]:
    return re.findall(r"^\s*\.param (.*?) \w+_param_\d+", ptx, re.M)


def stem(folder: Path, key: str) -> Path:
    return folder / hashlib.sha256(key.encode()).hexdigest()


def compile_all(folder: Path, releases: Sequence[str]) -> None:
    from slipstream.compiler.compiler_state import cache_dir
    from slipstream.compiler.trace import trace
    from slipstream.compiler.triton_releases import install

    jobs = {}
    for sample in (chosen([x])[0] for x in REPLACED):
        for shape in SIZES.values():

            def call(device: torch.device, sample: Sample = sample, shape: Shape = shape) -> Any:
                return sample.call(sample.inputs(shape, device))

            jobs |= {x.key: x for x in trace(call, "sm_90") if "sm90" in x.kernel}
    folder.mkdir(exist_ok=True)
    (folder / "jobs.pkl").write_bytes(pickle.dumps(list(jobs.values())))
    for release in releases:
        env = {**os.environ, "PYTHONPATH": str(install(release, cache_dir() / "releases"))}
        command = [sys.executable, __file__, "child", "compile", str(folder), release]
        subprocess.run(command, env=env, check=True)


def compile_here(folder: Path, release: str) -> None:
    import triton

    from slipstream.compiler.aot import gpu_target, source_of

    assert triton.__version__ == release
    (folder / release).mkdir(exist_ok=True)
    for job in pickle.loads((folder / "jobs.pkl").read_bytes()):
        options = {"num_warps": job.warps, "num_stages": job.stages, **job.options}
        made: Any = triton.compile(source_of(job), target=gpu_target("sm_90"), options=options)
        about = {x: getattr(made.metadata, x) for x in ABOUT}
        file = stem(folder / release, job.key)
        file.with_suffix(".cubin").write_bytes(made.asm["cubin"])
        file.with_suffix(".json").write_text(json.dumps([about, parameters(made.asm["ptx"])]))
        print(release, job.name, about, flush=True)


def replacing(folder: Path) -> list[str]:
    """From here on Triton launches what is in the folder, where it has a kernel; their names."""
    from triton.compiler.compiler import CompiledKernel, make_backend

    from slipstream.compiler.aot import job_of
    from slipstream.compiler.triton_hooks import before_compiling

    keys: list[str] = []
    replaced: list[str] = []
    first = CompiledKernel.__init__

    def note(*, fn: Any, compile: Any, **_: Any) -> None:
        keys[:] = [job_of(fn.module, fn.name, compile, "sm_90").key]

    def made(kernel: Any, *args: Any) -> None:
        first(kernel, *args)
        file = stem(folder, keys[0])
        if not file.with_suffix(".json").exists():
            return
        about, wanted = json.loads(file.with_suffix(".json").read_text())
        mine = [kernel.metadata.num_warps, parameters(kernel.asm["ptx"])]
        assert mine == [about["num_warps"], wanted], kernel.name
        kernel.metadata = kernel.metadata._replace(**about)
        backend: Any = make_backend(kernel.metadata.target)
        kernel.packed_metadata = backend.pack_metadata(kernel.metadata)
        kernel.kernel = file.with_suffix(".cubin").read_bytes()
        replaced.append(kernel.name)

    before_compiling(note)
    setattr(CompiledKernel, "__init__", made)  # noqa: B010
    return replaced


def measure(folder: Path, name: str, release: str) -> None:
    replaced = replacing(folder / release) if release else []
    sample = chosen([name])[0]

    def results(given: Provider) -> list[Tensor]:
        out = given.outputs()
        return [out[0].detach(), *(x for x in given.back(out[0]) if x is not None)]

    given, want = provider(sample, 300), provider(sample, 300, True)
    got = results(given)
    assert given.dout is not None
    want.dout = given.dout.double()
    errors = [error(x, y) for x, y in zip(got, results(want), strict=True)]
    long, races = provider(sample, 4096), 0.0
    first = results(long)
    for _ in range(30):
        races = max(races, *(float((x - y).abs().max()) for x, y in zip(results(long), first)))
    ms = in_turns({"": long.gradients})[""]
    print(f"{release or 'here':6} {name:24} error {max(errors):.2e} races {races:.1e}", end=" ")
    print(f"{ms:.3f} ms", len(replaced), *sorted(set(replaced)), flush=True)


def run_all(folder: Path) -> None:
    for name in REPLACED:
        for release in ("", *sorted(x.name for x in folder.iterdir() if x.is_dir())):
            command = [sys.executable, __file__, "child", "run", str(folder), name, release]
            subprocess.run(command, check=False)


def sanitize(report: Report, impl: str | None, sizes: Sequence[str]) -> None:
    launched: Counter[str] = Counter()
    with contextlib.suppress(ImportError):
        from triton import knobs

        hook: Any = knobs.runtime.launch_enter_hook
        hook.add(lambda metadata: launched.update([metadata.get()["name"]]))
    for sample in (x for x in chosen(None) if report.wants(x.name)):
        for name in sizes:
            for gate in ("weak", "mixed") if ":gate" in sample.tensors else ("weak",):
                shape = replace(report.shape(SANITIZED[name]), gate=gate)
                args = sample.inputs(shape, DEVICE)
                given = Provider(lambda **x: sample.call(x, impl), args, sample.fixed)  # noqa: B023
                outs = [x for x in given.outputs() if x.requires_grad]
                if outs:
                    torch.autograd.backward(outs, [torch.randn_like(x) for x in outs])
        print(sample.name, "ran", flush=True)
    print("launched", ", ".join(sorted(launched)))


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("kind", choices=("ptxas", "compile", "run", "sanitize", "child"))
    options.add_argument("given", nargs="*", metavar="PATH, DIR or RELEASE")
    options.add_argument("--impl", help="of sanitize")
    options.add_argument("--sizes", nargs="+", default=list(SANITIZED), choices=SANITIZED)
    options = options.parse_args(argv)
    kind, given = options.kind, options.given
    report = Report(options, needs_gpu=kind in ("ptxas", "run", "sanitize"))
    if kind == "ptxas":
        by_ptxas(given[0] if given else None, report)
    elif kind == "compile":
        compile_all(Path(given[0]), given[1:])
    elif kind == "run":
        run_all(Path(given[0]))
    elif kind == "sanitize":
        sanitize(report, options.impl, options.sizes)
    elif given[0] == "ptxas":
        check_ptxas(given[1], given[2], report)
    elif given[0] == "compile":
        compile_here(Path(given[1]), given[2])
    else:
        measure(Path(given[1]), given[2], given[3])
    report.end()


if __name__ == "__main__":
    main()
