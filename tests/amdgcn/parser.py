"""Assembly text -> instructions, labels and the kernel's descriptor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .faults import Unsupported

_COMMENT = re.compile(r"(;|//).*")
_LABEL = re.compile(r"^([\w.$]+):")
_INSTRUCTION = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\s*(.*)$")
_DESCRIPTOR = re.compile(r"^\s+\.amdhsa_(\w+)\s+(\S+)")
_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)$")
_ARGUMENT = re.compile(
    r"\.offset:\s+(\d+)\s*\n\s*\.size:\s+(\d+)\s*\n\s*\.value_kind:\s*(\w+)", re.MULTILINE
)
# name:[...], name:fun(...), or a word; an operand never contains a blank outside of brackets
_MODIFIER = re.compile(r"\w+:\[[^\]]*\]|\w+:\w+\([^)]*\)|\S+\([^)]*\)|\S+")


@dataclass(frozen=True)
class Instruction:
    """One line of assembly. `modifiers` maps a bare flag to the empty string."""

    line: int
    text: str
    mnemonic: str  # without the encoding suffix
    encoding: str  # "", "e32", "e64", "dpp" or "sdwa"
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    arch: str

    def __str__(self) -> str:
        return f"'{self.text}' (line {self.line})"

    def refuse(self, why: str) -> Unsupported:
        return Unsupported(f"{self}: {why}")

    def accept(self, *modifiers: str) -> None:
        """Raise for a modifier that the caller does not handle."""
        for name in self.modifiers:
            if name not in modifiers:
                raise self.refuse(f"modifier {name} is not handled here")

    def number(self, modifier: str, default: int = 0) -> int:
        text = self.modifiers.get(modifier)
        return default if text is None else int(text, 0)

    def bits(self, modifier: str, count: int, default: int) -> list[int]:
        """op_sel:[0,1] and the like."""
        text = self.modifiers.get(modifier)
        if text is None:
            return [default] * count
        found = [int(x) for x in text.strip("[]").split(",")]
        return found + [default] * (count - len(found))


@dataclass(frozen=True)
class Argument:
    """One entry of the kernel argument segment."""

    offset: int
    size: int
    kind: str


@dataclass
class Source:
    """A kernel's parsed text."""

    arch: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # -> index of an instruction
    descriptor: dict[str, int] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    kernarg_size: int = 0
    lds: int = 0  # static; Triton passes its LDS at launch
    scratch: int = 0


def _split(rest: str) -> tuple[list[str], dict[str, str]]:
    """Operands are separated by commas, modifiers follow the last one after blanks."""
    operands: list[str] = []
    current, depth = "", 0
    for char in rest:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += char
    modifiers: dict[str, str] = {}
    words = _MODIFIER.findall(current)
    if words and (":" not in words[0] or re.match(r"-?\|?[vsa]\[|ttmp\[|hwreg", words[0])):
        operands.append(words.pop(0))
    for word in words:
        name, _, value = word.partition(":")
        if name in modifiers:
            raise Unsupported(f"modifier {name} twice in '{rest}'")
        modifiers[name] = value
    return operands, modifiers


def parse_instruction(line: int, mnemonic: str, rest: str, arch: str) -> Instruction:
    encoding = _ENCODING.search(mnemonic)
    text = f"{mnemonic} {rest}".strip()
    base = _ENCODING.sub("", mnemonic)
    # The operands of s_waitcnt are no registers; waiting is not modelled.
    operands, modifiers = _split("" if base == "s_waitcnt" else rest)
    return Instruction(
        line, text, base, encoding[1] if encoding else "", tuple(operands), modifiers, arch
    )


def parse(text: str) -> Source:
    """Parse the text of one kernel; with more than one `.amdhsa_kernel` it is refused."""
    target = re.search(r'\.amdgcn_target\s+"[^"]*-(gfx\w+)', text)
    source = Source(arch=target[1] if target else "")
    if len(re.findall(r"\.amdhsa_kernel\b", text)) > 1:
        raise Unsupported("more than one kernel in one text")
    for number, raw in enumerate(text.split("\n"), 1):
        line = _COMMENT.sub("", raw).rstrip()
        if descriptor := _DESCRIPTOR.match(line):
            if re.fullmatch(r"\d+|0x[0-9a-f]+", descriptor[2]):
                source.descriptor[descriptor[1]] = int(descriptor[2], 0)
        elif label := _LABEL.match(line):
            source.labels[label[1]] = len(source.instructions)
        elif (code := _INSTRUCTION.match(line)) and not line.lstrip().startswith("."):
            source.instructions.append(
                parse_instruction(number, code[1], code[2].strip(), source.arch)
            )
        elif line.strip() and not re.match(r"^\s*[.\-\w\"]", line):
            raise Unsupported(f"line {number}: '{raw}' is no assembly that is known here")
    metadata = text[text.find("amdhsa.kernels:") :] if "amdhsa.kernels:" in text else ""
    source.arguments = [Argument(int(a), int(b), c) for a, b, c in _ARGUMENT.findall(metadata)]
    source.kernarg_size = _number(metadata, "kernarg_segment_size")
    source.lds = _number(metadata, "group_segment_fixed_size")
    source.scratch = _number(metadata, "private_segment_fixed_size")
    return source


def _number(metadata: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", metadata)
    return int(found[1]) if found else 0
