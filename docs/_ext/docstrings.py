"""Turns this package's docstrings into reStructuredText.

A docstring here is plain text: a summary, the recurrence indented by four spaces, and sections
"Args:", "Returns:", "Raises:", "Cost:", "Source:". Names such as q_t and a*b mean themselves, so
every character that reStructuredText would interpret is escaped.
"""

import re
import textwrap
from typing import Any

SECTION = re.compile(r"^(Args|Returns|Raises|Cost|Source|State|Example|Args of forward):(.*)$")
ITEM = re.compile(r"^([\w*]+(?:(?:, | or )[\w*]+)*): ?(.*)$")
# errors that share a line: "ValueError: shapes do not fit. TypeError: dtypes."
ERRORS = re.compile(r"(?<=\.) (?=\w+Error: )")
TITLES = {"Args": "Arguments", "Args of forward": "Arguments of forward"}


def escape(text: str) -> str:
    """Text as it stands; what is between backticks is code, addresses stay addresses."""
    parts = re.split(r"(`+[^`]+`+|https?://\S+)", text)
    return "".join(
        f"``{part.strip('`')}``"
        if part.startswith("`")
        else part
        if part.startswith("http")
        else re.sub(r"([\\*_|`<>])", r"\\\1", part)
        for part in parts
    )


def paragraphs(lines: list[str]) -> list[str]:
    """Escaped paragraphs; lines indented below the first one are a literal block."""
    text = textwrap.dedent("\n".join(lines)).strip("\n").split("\n")
    out: list[str] = []
    literal = False
    for line in text:
        indented = line.startswith("    ")
        if indented and not literal:
            out += ["", ".. code-block:: text", ""]
        elif literal and line and not indented:
            out.append("")
        literal = indented or (literal and not line)
        out.append(line if literal else escape(line))
    return out


def items(lines: list[str]) -> list[str]:
    """The arguments of a section as a list, or its text where it has none."""
    body = textwrap.dedent("\n".join(lines)).strip("\n").split("\n")
    if not ITEM.match(body[0]):
        # entries such as "input_ids [B, T], or inputs_embeds.", continued by indented lines
        if not any(x.startswith("    ") for x in body):
            return paragraphs(body)
        entries = re.split(r"\n(?! )", "\n".join(body))
        return [*(f"* {escape(' '.join(x.split()))}" for x in entries if x.strip()), ""]
    found: list[list[str]] = []
    for line in body:
        match = ITEM.match(line)
        if match:
            found.append([f"**{escape(match[1])}**: {match[2]}"])
        elif found:
            found[-1].append(line)
    out: list[str] = []
    for first, *rest in found:
        name, _, text = first.partition("**: ")
        joined = " ".join([text, *(x.strip() for x in rest)])
        own, *others = ERRORS.split(joined)
        out.append(f"* {name}**: {escape(own)}".rstrip())
        out += [f"* **{x.partition(': ')[0]}**: {escape(x.partition(': ')[2])}" for x in others]
    return [*out, ""]


def convert(lines: list[str]) -> list[str]:
    """A whole docstring."""
    out: list[str] = []
    block: list[str] = []
    title, first = "", ""

    def close() -> None:
        nonlocal block
        if title:
            out.extend(["", f":{TITLES.get(title, title)}:"])
            if title in ("Cost", "Source", "State") or first:
                rest = " ".join(x.strip() for x in block)
                out.extend([f"    {escape(f'{first} {rest}'.strip())}", ""])
            else:
                out.extend(f"    {x}" if x else "" for x in items(block))
        else:
            out.extend(paragraphs(block))
        block = []

    for line in lines:
        match = SECTION.match(line)
        if match:
            close()
            title, first = match[1], match[2].strip()
        elif title and line and not line.startswith(" ") and (not block or not block[-1]):
            close()
            title, first, block = "", "", [line]
        else:
            block.append(line)
    close()
    return out


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    module = getattr(obj, "__module__", None) or name
    if str(module).startswith("slipstream"):
        lines[:] = convert(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
