"""How ptxas treats registers that wgmma reads, what it keeps on the stack, and whether all threads
have met when one arrives at a barrier for them. ptxas (12.8.93, 13.0.88) may give an element of a
left operand in registers that is a constant its value only after the first product that reads it.
Which elements are wrong then depends on what the registers held, and now and then NaN comes out."""

import re
import subprocess
import tempfile
from pathlib import Path

_INSTRUCTION = re.compile(r"(?:@!?U?P\w+\s+)?(\S+)\s*(.*)")
_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")
_WRITTEN = re.compile(r"(?:P\w+, )?R(\d+)\b")
# what has a register first that it reads
_READS = ("ST", "BAR", "SYNCS", "R2UR", "UTMA", "BRA", "RED", "ATOM", "R2P", "WARP")
_LABEL, _JUMP = re.compile(r"(\.L_x_\d+):"), re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_CODE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);")
_TOUCHES = re.compile(r"\b(ld|st)\.(volatile\.)?shared|\b(ld|st)matrix|\bwgmma\.wait_group")
_MEETS = re.compile(r"\bbar(rier)?(\.warp)?\.sync")
_WIDTHS = {"M88.4": 4, ".128": 4, "M88.2": 2, ".64": 2, ".WIDE": 2}


def disassemble(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        run = [knobs.nvidia.nvdisasm.path, str(path)]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def arrives_early(ptx: str) -> list[tuple[str, str]]:
    """Arrivals, which are one thread's, and what others may yet do with shared memory: a barrier
    of the part's threads has to be in between."""
    found: list[tuple[str, str]] = []
    touched = ""
    for line in map(str.strip, ptx.splitlines()):
        if _MEETS.search(line):
            touched = ""
        elif _TOUCHES.search(line):
            touched = line
        elif "mbarrier.arrive" in line and touched:
            found.append((touched, line))
    return found


def overwritten(sass: str) -> list[tuple[str, str]]:
    """Products with a left operand in registers, and what writes to those before the next wait."""
    found: list[tuple[str, str]] = []
    reading: list[tuple[range, str]] = []
    for line in sass.splitlines():
        text = re.sub(r"/\*.*?\*/", "", line).strip(" ;\t")
        match = _INSTRUCTION.match(text)
        if match is None or text.startswith("."):
            reading = [] if text.startswith(".") else reading
            continue
        name, operands = match.groups()
        if name.startswith("HGMMA"):
            if left := _PRODUCT.match(operands):
                reading.append((range(int(left[1]), int(left[1]) + 4), text))
        elif name.startswith("WARPGROUP.DEPBAR"):
            reading = []
        elif not name.startswith(_READS) and (written := _WRITTEN.match(operands)):
            first = int(written[1])
            width = next((n for mark, n in _WIDTHS.items() if mark in name), 1)
            found += [
                (product, text)
                for registers, product in reading
                if first < registers.stop and registers.start < first + width
            ]
    return found


def most_spilled(text: str) -> int:
    """Words of the stack that a loop over tiles stores and loads, the most of any."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _CODE.search(line):
            code.append(instruction[1])
    # behind it are only the waits that take long, which jump back
    end = max(i for i, x in enumerate(code) if re.search("HGMMA|EX2|UTMA|EXIT|STG|STS", x))
    jumps = [(labels[to[1]], i) for i, x in enumerate(code) if (to := _JUMP.search(x))]
    loops = [x for x in jumps if x[0] < x[1] <= end and _count("HGMMA", code, x)]
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return max((_count(r"\b(STL|LDL)", code, x) for x in inner), default=0)


def _count(pattern: str, code: list[str], loop: tuple[int, int]) -> int:
    return sum(bool(re.search(pattern, x)) for x in code[loop[0] : loop[1] + 1])
