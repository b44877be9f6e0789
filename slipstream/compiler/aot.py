"""Compiles a Triton or Gluon kernel for any GPU on a machine that has none.

Triton's compiler wants neither torch nor a driver. It makes what the JIT makes, and leaves it in
Triton's cache where the JIT finds it, if it is told what the JIT finds out by itself: which
pointers and integers are divisible by 16, which arguments are None.
"""

import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.compiler.known_bugs import version

# What an instruction is called here, and what the assembler calls it. With a boundary before it
# where longer words end in it alone: one that begins with letters is found much sooner.
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma.sync": r"mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp.async": r"cp\.async\.c[ag]\b",
    "fma": r"\bfma\.rn\.f32\b|\bv_(?:pk_)?fma",
    "mfma": r"v_mfma",
    "atomic": r"\b(?:atom|red)\.global|\bglobal_atomic",
}
# What kernels are written and verified for. Triton 3.9 warns where a launch does not say it, and
# 3.10 fuses no product with a sum then.
FUSION = {"enable_fp_fusion": True}
# Triton 3.9 lets ptxas 13.4.59 allocate registers at level 2, where it spills more than at its own.
REGISTERS = {"ptx_options": "--regAllocOptLevel=4"}
# of the JIT's options, those that a kernel's author sets
_OPTIONS = {
    "num_ctas": 1,
    "maxnreg": None,
    "launch_pdl": False,
    "launch_cooperative_grid": False,
    "sched4reg": False,
    **FUSION,
}
# all that Triton makes of a kernel for which tensor memory (sm_100) does not do
_TRAP = re.compile(r"^// %bb\.0:.*\n(?:\s*\.loc.*\n)?\s*trap;", re.M)
_DOT = r"\btt\.dot\b|\bttng\.warp_group_dot\b|\bttng\.tc_gen5_mma\b"
_DOT_ROWS = r"\btt\.dot\b.*-> tensor<(?:\d+x)*(\d+)x\d+x[a-z]"


@dataclass(frozen=True)
class Compiled:
    """shared: bytes a program. registers and stack (spills, in bytes): of a thread.

    instructions: how often each of INSTRUCTIONS is there. dots: products before that, of which
    Triton's have at most dot_rows rows. hash: of the entry in Triton's cache.
    """

    shared: int
    registers: int
    stack: int
    instructions: Mapping[str, int]
    dots: int
    dot_rows: int
    seconds: float
    hash: str
    asm: Mapping[str, Any] = field(repr=False)

    @property
    def text(self) -> str:
        """PTX, or AMD's assembly."""
        return self.asm["ptx"] if "ptx" in self.asm else self.asm["amdgcn"]

    @property
    def ptx(self) -> str:
        return self.asm["ptx"]


@dataclass(frozen=True)
class Job:
    """One compilation, by the names of compile_kernel; picklable, and the same in any process."""

    kernel: str
    tensors: Mapping[str, str]
    constants: Mapping[str, Any]
    scalars: Mapping[str, str]
    warps: int
    stages: int
    options: Mapping[str, Any]
    arch: str

    @property
    def name(self) -> str:
        return self.kernel.rpartition(":")[2]

    @property
    def key(self) -> str:
        """A key that is equal for equal compilations."""
        fields = (self.tensors, self.constants, self.scalars, self.options)
        return repr(
            [self.kernel, self.arch, self.warps, self.stages, *(sorted(x.items()) for x in fields)]
        )

    def compile(self) -> Compiled:
        return compile_kernel(
            self.kernel,
            self.tensors,
            self.constants,
            self.scalars,
            self.arch,
            self.warps,
            self.stages,
            self.options,
        )


def compile_kernel(
    kernel: Any,
    tensors: Mapping[str, str],
    constants: Mapping[str, Any],
    scalars: Mapping[str, str] | None = None,
    target: str = "sm_90",
    warps: int = 4,
    stages: int = 3,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compiles `kernel` as a call with these arguments would.

    Args:
        kernel: what @triton.jit or @gluon.jit returned, or "module:name" of it.
        tensors: by parameter, "*bf16", "*fp32", "*i32" ...: a pointer divisible by 16 (torch's
            are; "*bf16:1" is one that is not), or a descriptor, "tensordesc<bf16[64, 64]>".
        constants: by constexpr parameter; also None for any other. A constexpr that is not named
            takes its default, a parameter `*_ptr` that is not named is None.
        scalars: by parameter, "i32", "i64", "fp32", or "i32:16" for an integer that the JIT may
            specialise and that is divisible by 16. Unnamed ones are i32, "scale*" and "eps" fp32.
        target: "sm_90", "gfx942" ...
        options: of the compiler, besides num_warps and num_stages.

    Raises:
        ValueError: an argument is no parameter of the kernel, or a constexpr has no value.
        RuntimeError: it wants more tensor memory than there is.
        Whatever Triton raises: the kernel does not compile there.
    """
    import triton

    fn = load(kernel) if isinstance(kernel, str) else kernel
    gpu = gpu_target(target)
    source = _source(fn, tensors, constants, scalars or {}, gpu)
    start = time.perf_counter()
    compiled: Any = triton.compile(
        source,
        target=gpu,
        options={
            "num_warps": warps,
            "num_stages": stages,
            **common_options(gpu),
            **(options or {}),
        },
    )
    seconds = time.perf_counter() - start
    asm = {name: compiled.asm[name] for name in compiled.asm}
    registers, stack = _resources(asm)
    text = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    if _TRAP.search(text):
        raise RuntimeError(f"{source.name}: out of tensor memory")
    products = str(asm.get("ttir") or asm.get("ttgir", ""))
    return Compiled(
        shared=compiled.metadata.shared,
        registers=registers,
        stack=stack,
        instructions={name: len(re.findall(x, text)) for name, x in INSTRUCTIONS.items()},
        dots=len(re.findall(_DOT, products)),
        dot_rows=max(map(int, re.findall(_DOT_ROWS, products)), default=0),
        seconds=seconds,
        hash=compiled.hash,
        asm=asm,
    )


def job_of(module: str, name: str, compile: dict, arch: str) -> Job:
    """The job that Triton's JIT is about to do, from what it tells its cache hook."""
    attributes = compile["configs"][0]
    tensors, scalars, constants = {}, {}, {}
    for i, (parameter, kind) in enumerate(compile["signature"].items()):
        if kind == "constexpr":
            constants[parameter] = compile["constants"][i,]
        elif kind.startswith("*"):
            tensors[parameter] = kind if attributes.get((i,)) else f"{kind}:1"
        elif kind.startswith("tensordesc"):
            tensors[parameter] = kind
        else:
            scalars[parameter] = f"{kind}:16" if attributes.get((i,)) else kind
    options = json.loads(compile["specialization_data"])["options"]
    set_options = {k: options[k] for k, v in _OPTIONS.items() if options.get(k, v) != v}
    return Job(
        kernel=f"{module}:{name}",
        tensors=tensors,
        constants=constants,
        scalars=scalars,
        warps=compile["num_warps"],
        stages=compile["num_stages"],
        options=set_options,
        arch=arch,
    )


def source_of(job: Job) -> Any:
    """The source that Triton compiles for a job, and hashes to find it again."""
    fn, gpu = load(job.kernel), gpu_target(job.arch)
    return _source(fn, job.tensors, job.constants, job.scalars, gpu)


def cached(job: Job) -> bool:
    """Whether Triton's cache has the job; False too where Triton's insides are not as in 3.6."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager
    except ImportError:
        return False
    source, backend = source_of(job), make_backend(gpu_target(job.arch))
    options = backend.parse_options(options_of(job))
    variables = get_cache_invalidating_env_vars()
    key = get_cache_key(source, backend, options, env_vars=variables)
    name = hashlib.sha256(key.encode()).hexdigest()
    file = f"{source.name[:150]}.json"
    return file in (get_cache_manager(name).get_group(file) or {})


def load(path: str) -> Any:
    """The kernel at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def gpu_target(arch: str) -> Any:
    """Triton's target for "sm_90", "gfx942" ..."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


def common_options(gpu: Any) -> dict[str, Any]:
    """The options of every compilation for Triton's target, besides a kernel's own."""
    by_level = (gpu.backend, gpu.arch) == ("cuda", 90) and "PTXAS_OPTIONS" not in os.environ
    return FUSION | REGISTERS if by_level and _release() >= (3, 9) else FUSION


def options_of(job: Job) -> dict[str, Any]:
    """All options that a job's compilation is given."""
    common = common_options(gpu_target(job.arch))
    return common | {"num_warps": job.warps, "num_stages": job.stages, **job.options}


def _release() -> tuple[int, ...]:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def _source(
    fn: Any,
    tensors: Mapping[str, str],
    constants: Mapping[str, Any],
    scalars: Mapping[str, str],
    gpu: Any,
) -> Any:
    import triton
    from triton.compiler.compiler import make_backend

    if not hasattr(fn, "params"):
        raise ValueError(
            f"kernel: want what @triton.jit returns, got {type(fn).__name__}"
            " (under TRITON_INTERPRET=1 nothing is compiled)"
        )
    name = fn.__name__
    unknown = {*tensors, *constants, *scalars} - {p.name for p in fn.params}
    if unknown:
        raise ValueError(f"{name}: has no parameter {', '.join(sorted(unknown))}")
    attribute = make_backend(gpu).parse_attr
    # D: divisible by 16, S: a tensor under 2 GB, which only AMD's backend asks
    aligned = "D" if gpu.backend == "cuda" else "DS"
    # the attributes of a constant: none from 3.7 on, before that the JIT takes a string for them
    of_constants = version(triton.__version__)[:2] >= (3, 7)
    signature, values, attributes = {}, {}, {}
    for i, param in enumerate(fn.params):
        if param.is_constexpr or param.name in constants or _absent(param.name, tensors):
            signature[param.name], values[i,] = "constexpr", _value(name, param, constants)
            if of_constants or isinstance(values[i,], str):
                attributes[i,] = attribute("" if of_constants else values[i,])
            continue
        if param.name in tensors:
            type_name, divisible = tensors[param.name], tensors[param.name].startswith("*")
        else:
            type_name, divisible = scalars.get(param.name, _default_scalar(param.name)), False
        kind, _, alignment = type_name.partition(":")
        signature[param.name] = kind
        if alignment == "16" or (divisible and not alignment):
            attributes[i,] = attribute(aligned if kind.startswith("*") else "D")
    if getattr(fn, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    return Source(fn, signature, constexprs=values, attrs=attributes)


def _absent(name: str, tensors: Mapping[str, str]) -> bool:
    return name.endswith("_ptr") and name not in tensors


def _value(kernel: str, param: Any, constants: Mapping[str, Any]) -> Any:
    if param.name in constants:
        return constants[param.name]
    if not param.is_constexpr:
        return None
    if param.default is inspect.Parameter.empty:
        raise ValueError(f"{kernel}: constexpr {param.name} has neither value nor default")
    return param.default


def _default_scalar(name: str) -> str:
    return "fp32" if name.startswith("scale") or name == "eps" else "i32"


def _resources(asm: Mapping[str, Any]) -> tuple[int, int]:
    """Registers and bytes of stack (spills) a thread."""
    if "cubin" not in asm:
        text = asm["amdgcn"]
        matches = [
            re.search(rf"\.{key}:\s*(\d+)", text)
            for key in ("vgpr_count", "private_segment_fixed_size")
        ]
        registers, stack = (int(x[1]) if x else 0 for x in matches)
        return registers, stack
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        run = [str(tool), "-res-usage", file.name]
        out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert match, out
    return int(match[1]), int(match[2])
