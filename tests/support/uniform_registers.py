"""Uniform registers that a kernel computes with before it has written to them. ptxas 12.8.93 may
compute where a product's operands are in shared memory before what that depends on (narrow-dot of
compiler/known_bugs.py): the first products read what ran before left there."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_LABEL = re.compile(r"(\.L_\w+):")
_CODE = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_PREDICATE = re.compile(r"!?U?P(\d|T)$")
_UNIFORM = re.compile(r"UR(\d+)$")
_REGISTER = re.compile(r"R(\d+)")
_ANY_UNIFORM = re.compile(r"\bUR(\d+)(\.64)?")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_LEAVES = ("EXIT", "RET", "JMP", "BRX")
_JUMPS = ("BRA", "WARPSYNC", "CALL")
# what has a uniform register first that it writes to, besides U...
_WRITES = ("R2UR", "S2UR", "VOTEU", "REDUX", "CREDUX")
_STORES = ("UTMA", "UCGABAR", "UBLK", "USETMAXREG")
_COPIES = ("MOV", "UMOV", "IMAD.U32", "R2UR")


class _Instruction(NamedTuple):
    """writes, reads: uniform registers, result, copied: other registers, a bit for each."""

    text: str
    writes: int
    reads: int
    result: int
    copied: int
    copies: bool
    following: tuple[int, ...]


def _bits(begin: int, end: int) -> int:
    return (1 << end) - (1 << begin)


def _width(name: str) -> int:
    """Registers that an instruction writes to."""
    return 4 if ".128" in name else 2 if re.search(r"\.64(\.|$)|\.WIDE", name) else 1


def _operands(name: str, text: str) -> tuple[int, int, int]:
    """Uniform registers written and read, and the other registers written."""
    operands = [x.strip() for x in re.split(r",(?![^\[]*\])", text)]
    while operands and _PREDICATE.match(operands[0]):
        del operands[0]
    writes = reads = result = 0
    uniform = name.startswith(_WRITES) or (name[0] == "U" and not name.startswith(_STORES))
    if uniform and operands and (first := _UNIFORM.match(operands[0])):
        writes = _bits(int(first[1]), int(first[1]) + _width(name))
        del operands[0]
    elif operands and (first := _REGISTER.match(operands[0])) and not name.startswith("ST"):
        result = _bits(int(first[1]), int(first[1]) + _width(name))
    for operand in operands:
        if place := _DESCRIPTOR.search(operand):
            # both operands', or of one in registers the other's alone
            begin = int(place[1]) + 2 * any(_REGISTER.match(x) for x in operands[1:2])
            reads |= _bits(begin, int(place[1]) + 4)
            continue
        for number, wide in _ANY_UNIFORM.findall(operand):
            reads |= _bits(int(number), int(number) + (2 if wide else 1))
    return writes, reads, result


def _instructions(sass: str) -> Iterator[_Instruction]:
    labels: dict[str, int] = {}
    code: list[tuple[str, str, str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _CODE.search(line):
            code.append((found[1] or "", found[2], found[3]))
    for i, (predicate, name, text) in enumerate(code):
        following = {i + 1} if i + 1 < len(code) else set()
        target = _TARGET.search(text)
        if target and target[1] in labels and name.startswith(_JUMPS):
            if name == "BRA" and not predicate and not re.search(r"\bU?P\d", text):
                following = set()
            following.add(labels[target[1]])
        elif name.startswith(_LEAVES) and not predicate:
            following = set()
        writes, reads, result = _operands(name, text)
        source = _REGISTER.match(text.split(",")[-1].strip()) if name.startswith("R2UR") else None
        yield _Instruction(
            f"{predicate} {name} {text}".strip(),
            writes,
            reads,
            result,
            1 << int(source[1]) if source else 0,
            name.startswith(_COPIES),
            tuple(following),
        )


def unwritten(sass: str) -> list[str]:
    """Instructions that compute with a uniform register that nothing has written on some way to
    them. What is copied from one, and back, counts as it does."""
    code = list(_instructions(sass))
    if not code:
        return []
    states = {0: (0, 0)}  # uniform registers written; others that hold what was not
    waiting = [0]
    while waiting:
        i = waiting.pop()
        written, unset = states[i]
        x = code[i]
        missing = x.copies and (x.reads & ~written or x.copied & unset)
        written = written & ~x.writes if missing else written | x.writes
        unset = unset | x.result if missing else unset & ~x.result
        for j in x.following:
            before = states.get(j)
            states[j] = (before[0] & written, before[1] | unset) if before else (written, unset)
            if states[j] != before:
                waiting.append(j)
    reached = ((code[i], states[i][0]) for i in sorted(states))
    return [x.text for x, written in reached if not x.copies and x.reads & ~written]
