"""Fetches the engines whose own files tests/engines loads, into .engines/: `make engines`.

Each release is its wheel's Python files below the folders of the table, without the compiled parts.
Some 700 MB are read and 25 MB are left.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1] / ".engines"
# a release, and the folders of its wheel of which files are wanted
ENGINES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("vllm==0.33.0", "vllm==0.26.0"),
        (
            "vllm/config/mamba.py",
            "vllm/model_executor/custom_op.py",
            "vllm/model_executor/layers/mamba/",
            "vllm/model_executor/models/bailing_moe_v3.py",
            "vllm/model_executor/models/plamo2.py",
            "vllm/model_executor/warmup/",
            "vllm/models/kimi_k3/nvidia/ops/third_party/kda/",
            "vllm/plugins/",
            "vllm/third_party/flash_linear_attention/",
            "vllm/v1/attention/",
        ),
    ),
    **dict.fromkeys(
        ("sglang==0.5.23", "sglang==0.5.16"),
        (
            "sglang/kernels/ops/attention/fla/",
            "sglang/kernels/ops/attention/linear/",
            "sglang/kernels/ops/mamba/triton_ops/",
            "sglang/srt/configs/linear_attn_model_registry.py",
            "sglang/srt/layers/attention/hybrid_linear_attn_backend.py",
            "sglang/srt/layers/attention/linear/",
            "sglang/srt/layers/attention/mamba/",
            "sglang/srt/mem_cache/memory_pool.py",
            "sglang/srt/plugins/",
        ),
    ),
    "torchtitan==0.3.0": ("torchtitan/",),
    "spmd_types==0.2.3": ("spmd_types/",),
    "axolotl==0.19.0": ("axolotl/model_support/", "axolotl/monkeypatch/models/"),
}
# of the engines with compiled parts, which are then left out
PLATFORM = "--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none"
PLATFORM += " --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 --platform any"


def fetch(release: str, wanted: tuple[str, ...]) -> None:
    target = ROOT / release.replace("==", "-")
    if target.exists():
        return
    ROOT.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT) as folder:
        options = ["--no-deps", "--only-binary", ":all:", *PLATFORM.split(), "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, release]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [x for x in archive.namelist() if x.endswith(".py") and x.startswith(wanted)]
            archive.extractall(Path(folder) / "files", names)
        # so that a folder that is there is whole
        (Path(folder) / "files").rename(target)


if __name__ == "__main__":
    for name, folders in ENGINES.items():
        fetch(name, folders)
