"""Calculate the time of a compiled GPU program from its optimized HLO.

`launches_of` returns each launch of a kernel in a program, with the bytes that the kernel moves and the
operations that it computes. The launches of a loop body are repeated for each trip of the loop; a loop
without a known number of trips counts as one trip. Of the branches of a conditional, only the branch with the
fewest launches counts. In sampling, this is the branch without top-p and top-k filters. `Rates.time_s`
returns the time of a launch:

    launch_s + max(bytes / bytes_per_s, operations * idle / flops_per_s, deep_product_s if deep)

`idle` is the factor by which idle multiprocessors extend the time of a matrix product (`_idle`). A product is
`deep` if it sums over at least DEEP inputs. The rates of `H200` were fitted to measurements (docs/devices.md,
"Measurements on a GPU").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Literal

ITEM_BITS = {"pred": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32}
ITEM_BITS |= {"f32": 32, "s64": 64, "u64": 64, "f64": 64}
WITHOUT_LAUNCH = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id"}
    | {"copy-done", "async-done", "fusion-done"}
)
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that update their first operand in place, and the index of the operand that contains the new
values."""
READS_A_PART = frozenset({"dynamic-slice", "gather", "slice"})
"""Operations that read only a part of their first operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch of a kernel."""

    name: str
    kind: Literal["product", "attention", "other"]
    num_bytes: float
    flops: float = 0.0
    deep: bool = False  # whether the launch is a product that sums over at least DEEP inputs
    idle: float = 1.0  # factor by which idle multiprocessors extend the time of `flops` (see `_idle`)


MULTIPROCESSORS = 132
DEEP = 1024
"""A product that sums over at least this number of inputs takes at least `Rates.deep_product_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of a GPU."""

    bytes_per_s: float  # rate of all kernels except attention
    attention_bytes_per_s: float
    product_flops_per_s: float
    attention_flops_per_s: float
    launch_s: float
    deep_product_s: float

    def time_s(self, launch: Launch) -> float:
        bytes_per_s, flops_per_s = self.bytes_per_s, self.product_flops_per_s
        if launch.kind == "attention":
            bytes_per_s, flops_per_s = self.attention_bytes_per_s, self.attention_flops_per_s
        least_s = self.deep_product_s if launch.deep else 0.0
        return self.launch_s + max(
            launch.num_bytes / bytes_per_s, launch.flops * launch.idle / flops_per_s, least_s
        )


H200 = Rates(
    bytes_per_s=3.3e12,
    attention_bytes_per_s=4.0e12,
    product_flops_per_s=700e12,
    attention_flops_per_s=390e12,
    launch_s=2.0e-6,
    deep_product_s=4.0e-6,
)
"""The rates of an H200. They were fitted to the kernel times of a decode step of 64 sequences, a decode step
of 256 sequences and a micro-batch. A profiler measured these times, with jax 0.11.2. `launch_s` is the time
of a kernel that does almost no work. It does not include the pause between two kernels, which was 0.1 to 0.3
us in a CUDA graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The numbers of positions that attention reads. The HLO does not contain these numbers."""

    cached: float = 0.0  # positions in KV pages, summed over the sequences of a decode batch
    stream: int = 0  # tokens of a training stream
    context: int = 0  # positions to which a token of a tile batch attends, on average


@dataclass(frozen=True, slots=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def num_bytes(self) -> float:
        return self.size * ITEM_BITS.get(self.dtype, 0) / 8


@dataclass(slots=True)
class Instruction:
    name: str
    shapes: list[Shape]  # shapes of the outputs
    opcode: str
    operands: list[tuple[str, int]]  # (name of the instruction, index of its output)
    attributes: str
    is_root: bool = False

    def called(self, attribute: str) -> str:
        found = re.search(rf"{attribute}=%?([\w.\-]+)", self.attributes)
        assert found is not None, f"{self.name} has no {attribute}"
        return found[1]


@dataclass(slots=True)
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def shape(self, operand: tuple[str, int]) -> Shape:
        shapes = self.instructions[operand[0]].shapes
        return shapes[operand[1]] if operand[1] < len(shapes) else Shape("token", (0,))

    def users(self, name: str) -> Iterator[tuple[Instruction, bool]]:
        """Yield each instruction that uses `name`, and whether `name` is its first operand. If a bitcast uses
        `name` and is not the root, the users of the bitcast are yielded instead of the bitcast."""
        for instruction in self.instructions.values():
            operands = [operand for operand, _ in instruction.operands]
            if name in operands:
                if instruction.opcode == "bitcast" and not instruction.is_root:
                    yield from self.users(instruction.name)
                else:
                    yield instruction, operands[0] == name


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of an HLO text by name, and the name of the entry computation."""
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header is not None:
            current = computations.setdefault(header[2], Computation())
            entry = header[2] if header[1] else entry
        elif instruction := parse_instruction(line):
            current.instructions[instruction.name] = instruction
    return computations, entry


def parse_instruction(line: str) -> Instruction | None:
    start = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if start is None:
        return None
    rest = line[start.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = [
        Shape(dtype, tuple(int(size) for size in dims.split(",") if size))
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", rest[:end])
    ]
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    assert opcode is not None, line
    opened = end + opcode.end() - 1
    closed = _closing(rest, opened)
    operands = [
        (name, int(index or 0)) for name, index in re.findall(r"%([\w.\-]+)(?:#(\d+))?", rest[opened:closed])
    ]
    return Instruction(start[2], shapes, opcode[1], operands, rest[closed + 1 :], start[1] is not None)


def _closing(text: str, opened: int) -> int:
    """Return the index of the parenthesis that closes the one at `opened`."""
    depth = 0
    for index in range(opened, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError("a parenthesis is not closed")


def launches_of(text: str, sequences: Sequences) -> list[Launch]:
    """Return the launches of a program in order. The launches of a loop body are repeated for each trip."""
    computations, entry = parse(text)
    return _Reader(computations, sequences).launches(entry)


@dataclass(frozen=True, slots=True)
class _Reader:
    computations: dict[str, Computation]
    sequences: Sequences

    def launches(self, name: str) -> list[Launch]:
        computation = self.computations[name]
        return [
            launch
            for instruction in computation.instructions.values()
            if instruction.opcode not in WITHOUT_LAUNCH
            for launch in self._launches(computation, instruction)
        ]

    def _launches(self, computation: Computation, instruction: Instruction) -> list[Launch]:
        match instruction.opcode:
            case "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                return self.launches(instruction.called("body")) * int(trips[1] if trips else 1)
            case "conditional":
                listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
                branches = re.findall(r"%([\w.\-]+)", listed[1]) if listed else []
                branches = branches or [
                    instruction.called(f"{value}_computation") for value in ("true", "false")
                ]
                return min((self.launches(branch) for branch in branches), key=len)
            case "call" | "async-start":
                attribute = "to_apply" if instruction.opcode == "call" else "calls"
                return self.launches(instruction.called(attribute))
            case "custom-call":
                return [self._custom_call(computation, instruction)]
            case "fusion" | "fusion-start":
                called = self.computations[instruction.called("calls")]
                calls = [inner for inner in called.instructions.values() if inner.opcode == "custom-call"]
                if calls:  # the operands of a call can be slices of the operands of the fusion
                    return [self._custom_call(called, inner) for inner in calls]
                return [_fusion(instruction, called)]
            case _:
                read = sum(computation.shape(operand).num_bytes for operand in instruction.operands)
                written = sum(shape.num_bytes for shape in instruction.shapes)
                if instruction.opcode == "copy-start":
                    written = read
                if instruction.opcode in READS_A_PART:
                    read = written
                elif instruction.opcode in IN_PLACE:
                    update = instruction.operands[IN_PLACE[instruction.opcode]]
                    read = written = computation.shape(update).num_bytes
                return [Launch(name=instruction.opcode, kind="other", num_bytes=read + written)]

    def _custom_call(self, computation: Computation, instruction: Instruction) -> Launch:
        operands = [computation.shape(operand) for operand in instruction.operands]
        outputs = instruction.shapes
        if "cublas" in instruction.attributes:
            contracted = re.search(r'lhs_contracting_dimensions":\["(\d+)"', instruction.attributes)
            depth = operands[0].dims[int(contracted[1])] if contracted else 1
            num_bytes = sum(shape.num_bytes for shape in operands) + outputs[0].num_bytes
            flops = 2.0 * outputs[0].size * depth
            return Launch(
                name=f"product {'x'.join(map(str, outputs[0].dims))} over {depth}",
                kind="product",
                num_bytes=num_bytes,
                flops=flops,
                idle=_idle(outputs[0].dims[-2:]),
                deep=depth >= DEEP,
            )
        found = re.search(r'op_name="[^"]*?(\w+)/pallas_call', instruction.attributes)
        name = found[1] if found else instruction.name
        num_bytes = sum(shape.num_bytes for shape in (*operands, *outputs))
        if name == "paged_attention":
            queries, values = operands[-3], operands[-1]
            cached = 2 * self.sequences.cached * values.dims[-3] * values.dims[-1]
            num_bytes = cached * ITEM_BITS[values.dtype] / 8 + queries.num_bytes
            num_bytes += sum(shape.num_bytes for shape in outputs)
            flops = 4 * self.sequences.cached * prod(queries.dims[1:])
            return Launch(name=name, kind="attention", num_bytes=num_bytes, flops=flops)
        if name == "prefill_attention":
            queries, values = operands[3], operands[-1]
            pages = 2 * self.sequences.context * values.dims[-1] * ITEM_BITS[values.dtype] / 8
            num_bytes = queries.dims[0] * queries.dims[1] * pages + 2 * queries.num_bytes
            flops = 4.0 * queries.size * self.sequences.context
            return Launch(name=name, kind="attention", num_bytes=num_bytes, flops=flops)
        if name.startswith("lora_"):  # the factors [slots, layers, ...] of one slot and of one layer are read
            arrays = [Shape(array.dtype, array.dims[-2:]) for array in operands]
            num_bytes = sum(shape.num_bytes for shape in (*arrays, *outputs))
        if name == "write_tokens":
            num_bytes = 2 * sum(shape.num_bytes for shape in operands[2:4])
        if name.startswith("tree_attention"):
            products = {"forward": 2, "query_gradient": 3, "key_gradient": 4}[name[len("tree_attention_") :]]
            heads = max(operands, key=lambda shape: shape.size)
            flops = products * self.sequences.stream * heads.size
            return Launch(name=name, kind="attention", num_bytes=num_bytes, flops=flops)
        return Launch(name=name, kind="other", num_bytes=num_bytes)


def _idle(dims: tuple[int, ...]) -> float:
    """Return `Launch.idle` of a product with outputs of this size on an H200.

    In each round, every multiprocessor computes one tile of 128 x 128 outputs, or of 64 x 128 outputs if
    there are at most 64 rows. In the last round, the multiprocessors without a tile are idle. If there are at
    most as many tiles as multiprocessors, several multiprocessors share the sums of a tile, and the factor
    is 1."""
    rows, columns = dims if len(dims) == 2 else (1, *dims)
    tiles = ceil(rows / (128 if rows > 64 else 64)) * ceil(columns / 128)
    return ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS / tiles if tiles > MULTIPROCESSORS else 1.0


def _fusion(instruction: Instruction, called: Computation) -> Launch:
    """Return the launch of a fusion. If the fusion reads only slices of a parameter, only the bytes of these
    slices count. If the fusion updates a parameter in place, only the bytes of the update count."""
    num_bytes = 0.0
    for inner in called.instructions.values():
        if inner.opcode == "parameter":
            num_bytes += _bytes_read(called, inner)
        if inner.is_root:
            names = [name for name, _ in inner.operands] if inner.opcode == "tuple" else [inner.name]
            num_bytes += sum(_bytes_written(called, called.instructions[name]) for name in names)
    return Launch(name=re.sub(r"[._]?\d+$", "", instruction.name), kind="other", num_bytes=num_bytes)


def _bytes_read(called: Computation, parameter: Instruction) -> float:
    total, whole = 0.0, parameter.shapes[0].num_bytes
    for user, is_first in called.users(parameter.name):
        if is_first and user.opcode in READS_A_PART:
            total += user.shapes[0].num_bytes
        elif not is_first or user.opcode not in IN_PLACE:
            return whole
    return min(total, whole)


def _bytes_written(called: Computation, output: Instruction) -> float:
    while output.opcode == "bitcast":
        output = called.instructions[output.operands[0][0]]
    if output.opcode in IN_PLACE:
        return called.shape(output.operands[IN_PLACE[output.opcode]]).num_bytes
    return sum(shape.num_bytes for shape in output.shapes)
