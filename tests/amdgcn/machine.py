"""Execute a program: workgroups one after another, their waves in turn between barriers.

Known gaps: it was never compared with hardware. Missing waits (s_waitcnt) and hazards, caches and
memory ordering, concurrency between workgroups, denormal modes and timing are not modelled: loads
complete at once and a workgroup runs to its end before the next one starts. README.md has the
whole list.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import crosslane, exchange, fp8, lds_ops, memory_ops, mfma, packed, salu, valu, valu_special
from .faults import Fault, Unsupported
from .lds import Lds
from .memory import Memory
from .operands import Layout
from .parser import Instruction, Source, parse
from .wave import EXEC, LANE, LANES, M32, VCC, Wave

Run = Callable[[Wave], None]
DECODERS: dict[str, Callable[[Instruction, Layout], Run]] = {
    **salu.DECODERS,
    **valu.DECODERS,
    **valu_special.DECODERS,
    **packed.DECODERS,
    **fp8.DECODERS,
    **crosslane.DECODERS,
    **memory_ops.DECODERS,
    **lds_ops.DECODERS,
    **exchange.DECODERS,
    **mfma.DECODERS,
}
_CONDITIONS: dict[str, Callable[[Wave], object]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: not w.q[VCC >> 1],
    "s_cbranch_vccnz": lambda w: w.q[VCC >> 1],
    "s_cbranch_execz": lambda w: not w.q[EXEC >> 1],
    "s_cbranch_execnz": lambda w: w.q[EXEC >> 1],
}
CONTROL = (*_CONDITIONS, "s_barrier", "s_endpgm")
_END, _BARRIER = -1, -2


@dataclass
class Block:
    """Instructions without a branch between them, and what comes after."""

    start: int
    instructions: list[Instruction]
    runs: list[Run]
    lines: list[Instruction]  # of the runs: those that do something
    after: Callable[[Wave], int]  # the next block, or _END or _BARRIER
    length: int  # with the branch
    executed: int = 0


@dataclass
class Program:
    """A decoded kernel, reusable for any number of launches."""

    source: Source
    layout: Layout
    blocks: list[Block] = field(default_factory=list)
    _waves: list[Wave] = field(default_factory=list)

    def waves(self, count: int) -> list[Wave]:
        """Waves are kept: their thousands of views take longer to make than a short kernel runs."""
        layout = self.layout
        for i in range(len(self._waves), count):
            self._waves.append(Wave(i, layout.vgprs, layout.agprs, layout.constants.bits))
        return self._waves[:count]


def decode(text: str) -> Program:
    """Parse and decode the whole text: whatever is not implemented raises here, executed or not."""
    source = parse(text)
    if source.scratch:
        raise Unsupported(f"the kernel spills: {source.scratch} bytes of scratch a lane")
    total = source.descriptor.get("next_free_vgpr", 512)
    vgprs = min(source.descriptor.get("accum_offset", 256), total)
    layout = Layout(max(vgprs, 1), max(total - vgprs, 0))
    program = Program(source, layout)
    code = source.instructions
    starts = {0, *source.labels.values()}
    starts |= {i + 1 for i, ins in enumerate(code) if ins.mnemonic in CONTROL}
    ordered = sorted(s for s in starts if s < len(code))
    number = {start: k for k, start in enumerate(ordered)}
    for k, start in enumerate(ordered):
        end = ordered[k + 1] if k + 1 < len(ordered) else len(code)
        part = code[start:end]
        last = part[-1] if part[-1].mnemonic in CONTROL else None
        body = part[:-1] if last else part
        decoded = [(decode_instruction(ins, layout), ins) for ins in body]
        acting = [(run, ins) for run, ins in decoded if ins.mnemonic not in salu.IGNORED]
        after = _after(last, k + 1, source, number)
        program.blocks.append(
            Block(start, part, [r for r, _ in acting], [i for _, i in acting], after, len(part))
        )
    return program


def decode_instruction(ins: Instruction, layout: Layout) -> Run:
    decoder = DECODERS.get(ins.mnemonic)
    if decoder is None:
        raise ins.refuse("unknown instruction")
    try:
        return decoder(ins, layout)
    except Unsupported as error:
        message = str(error)
        raise error if str(ins) in message else ins.refuse(message) from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ins.refuse(f"operands are not as expected ({error!r})") from error


def _after(
    last: Instruction | None, following: int, source: Source, number: dict[int, int]
) -> Callable[[Wave], int]:
    if last is None:
        return lambda w: following
    if last.mnemonic == "s_endpgm":
        return lambda w: _END
    if last.mnemonic == "s_barrier":

        def barrier(w: Wave) -> int:
            w.block = following
            return _BARRIER

        return barrier
    label = last.operands[0]
    if label not in source.labels or source.labels[label] not in number:
        raise last.refuse("unknown label")
    target = number[source.labels[label]]
    condition = _CONDITIONS[last.mnemonic]
    return lambda w: target if condition(w) else following


class Machine:
    """Runs workgroups of one program over one memory."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        lds_size: int,
        waves: int,
        random: np.random.Generator | None = None,
        limit: int = 50_000_000,
    ) -> None:
        self.program, self.memory, self.random, self.limit = program, memory, random, limit
        self.lds = Lds(lds_size + program.source.lds)
        self.waves = program.waves(waves)
        self.lds.track = memory.track = waves > 1
        self.executed = 0
        self._user: list[tuple[int, int]] = []  # scalar register, value
        self._axes: list[tuple[int, int]] = []  # scalar register, axis of the place

    def launch(
        self, grid: tuple[int, int, int], threads: int, kernarg: int, dispatch: int = 0
    ) -> None:
        """Run every workgroup, in random order if there is a generator."""
        self._find_registers(kernarg, dispatch)
        groups = np.arange(grid[0] * grid[1] * grid[2])
        if self.random is not None:
            groups = self.random.permutation(groups)
        with np.errstate(all="ignore"):
            for group in groups.tolist():
                x, rest = group % grid[0], group // grid[0]
                self._workgroup((x, rest % grid[1], rest // grid[1]), threads)

    def _workgroup(self, place: tuple[int, int, int], threads: int) -> None:
        self.lds.reset()
        for w in self.waves:
            first = w.index * LANES
            w.reset(self, min(LANES, threads - first))
            self._start_registers(w, place)
            w.vectors[0] = LANE + first  # y and z, in higher bits, are 0
        live = list(self.waves)
        while live:
            order = live
            if self.random is not None and len(live) > 1:
                order = [live[i] for i in self.random.permutation(len(live))]
            for w in order:
                self._run(w)
            self.lds.log.close()
            self.memory.log.close()
            waiting = [w for w in live if not w.done]
            if waiting and len(waiting) < len(live):
                ended = sorted(w.index for w in live if w.done)
                raise Fault(
                    f"barrier divergence in workgroup {place}: waves {ended} ended while "
                    f"{sorted(w.index for w in waiting)} wait at a barrier"
                )
            live = waiting

    def _start_registers(self, w: Wave, place: tuple[int, int, int]) -> None:
        """User registers, then the workgroup's place, as the kernel descriptor asks for."""
        for at, value in self._user:
            w.s[at] = value
        for at, axis in self._axes:
            w.s[at] = place[axis]

    def _find_registers(self, kernarg: int, dispatch: int) -> None:
        """What the registers of every wave start with, and where its workgroup's place goes."""
        descriptor = self.program.source.descriptor
        self._user, self._axes = [], []
        at = 0
        for name, size, pointer in (
            ("private_segment_buffer", 4, None),
            ("dispatch_ptr", 2, dispatch),
            ("queue_ptr", 2, None),
            ("kernarg_segment_ptr", 2, kernarg),
            ("dispatch_id", 2, None),
            ("flat_scratch_init", 2, None),
            ("private_segment_size", 1, None),
        ):
            if descriptor.get(f"user_sgpr_{name}"):
                if pointer:
                    self._user += [(at, pointer & M32), (at + 1, pointer >> 32)]
                at += size
        # Preloaded arguments follow; code that has them also loads them itself, at its entry.
        at = descriptor.get("user_sgpr_count", at)
        for axis, name in enumerate("xyz"):
            if descriptor.get(f"system_sgpr_workgroup_id_{name}", int(name == "x")):
                self._axes.append((at, axis))
                at += 1

    def _run(self, w: Wave) -> None:
        """Run one wave to its next barrier or to its end."""
        blocks = self.program.blocks
        index, count = w.block, self.executed
        runs = iter(blocks[index].runs)
        block = blocks[index]
        try:
            while True:
                block = blocks[index]
                runs = iter(block.runs)
                for run in runs:
                    run(w)
                block.executed += 1
                count += block.length
                index = block.after(w)
                if index < 0:
                    break
                if count > self.limit:
                    raise Fault(f"more than {self.limit} instructions")
        except (Fault, IndexError, ValueError) as error:
            # The iterator knows how far it got.
            done = len(block.runs) - operator.length_hint(runs)
            ins = block.lines[done - 1] if done else block.instructions[0]
            if str(ins) in str(error) and isinstance(error, Fault):
                raise
            raise type(error)(f"{error} [wave {w.index} at {ins}]") from error
        finally:
            self.executed = count
        w.done = index == _END
