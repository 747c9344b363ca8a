"""Simulator of the PTX of Hopper kernels, which checks their results without a GPU.

It models a launch of clusters of blocks, one cluster after the other. Four warps form a group of
threads and run together; after a divergence, the threads with the lowest next instruction run. A
seed determines the speed of each group and the order of turns. It also determines the arrival of
copies by the tensor memory accelerator, separately for each block of a multicast. Barriers in
shared memory count arrivals, bytes and phases. Clusters and blocks synchronise. Shared memory is
swizzled as in tensor maps and matrix descriptors. Unset memory is NaN. An access outside of the
tensors in global memory is an error, and the writes of each byte are counted.

The instructions are those of HANDLERS and PLAIN. Any other one raises NotImplementedError.

These are not modelled:

- time and speed, and divergence of warps in a group;
- asynchronous operations except copies: a product is complete at once, so that fences, commits and
  waits of `wgmma` and memory fences have no effect;
- the number of registers, griddepcontrol, and truncation in sums of a tensor core.

A tensor map is not in the PTX; a test gives its box as a Box.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.kernels.played_memory import Array, Barrier, Block, Copy, Meeting, Memory

THREADS = 128  # threads of a group
LANES = np.arange(THREADS)
SHARED_FROM = 1024  # address at which a block's shared memory begins
OF_RANK = 24  # bits of a shared address; above them is the rank + 1 of another block, or 0
LINE = 128  # bytes of a swizzled row in shared memory
HANDLE = 1 << 40  # address of the first parameter
FASTEST = 9  # a group takes up to 2 ** 9 steps until others have a turn
TYPES: dict[str, type] = {
    "pred": np.bool_, "b16": np.uint16, "u16": np.uint16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
BITS: dict[int, type] = {1: np.bool_, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*?)\s*;$")
OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.\w+ \w+_param_\d+(?:\[(\d+)\])?")
SPINS = ("LAB_WAIT", "DONE")  # labels around try_wait, which waits by itself here
COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def quotient(a: Array, b: Array) -> Array:
    """Divide and round towards zero."""
    exact: Array = np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b))
    return exact.astype(a.dtype)


def fused(a: Array, b: Array, c: Array) -> Array:
    wide = np.float64 if a.dtype == np.float32 else a.dtype
    return (a.astype(wide) * b + c).astype(a.dtype)


# These are elementwise. All operands have the type that the name ends in.
PLAIN: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": fused, "fma": fused,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "min": np.fmin, "max": np.fmax, "neg": np.negative, "abs": np.abs, "div": quotient,
    "shl": np.left_shift, "shr": np.right_shift, "ex2": np.exp2, "rcp": np.reciprocal,
}  # fmt: skip
MODIFIERS = {"lo", "rn", "approx", "ftz"}  # modifiers of these instructions


class Instruction(NamedTuple):
    name: str
    operands: tuple[str, ...]
    guard: str | None  # predicate register
    negated: bool


class Program:
    """A kernel's instructions, the positions of its labels and the sizes of its parameters."""

    def __init__(self, text: str) -> None:
        head, _, body = text[text.index(".entry") :].partition("\n{")
        self.parameter_bytes = [int(size or 4) for size in PARAMETER.findall(head)]
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        body = re.sub(r"\w+_param_(\d+)", r"param_\1", re.sub("//.*", "", body))
        for line in map(str.strip, body.splitlines()):
            if line in ("", "{", "}") or line.startswith(".") or any(n in line for n in SPINS):
                continue
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.instructions)
                continue
            found = STATEMENT.match(line)
            assert found, line
            negated, guard, name, operands = found.groups()
            of = tuple(OPERAND.findall(operands))
            self.instructions.append(Instruction(name, of, guard, bool(negated)))


class Box(NamedTuple):
    """A tensor map: one or several matrices as rows of bytes, and the rows of one copy."""

    matrix: Array
    rows: int


@dataclass
class Launch:
    """A kernel, its grid (blocks of a cluster, clusters), its parameters and global memory."""

    program: Program
    cluster: int
    num_clusters: int
    num_threads: int  # threads of a block
    parameters: list[bytes | Box]
    memory: Memory


@dataclass
class Cluster:
    """Blocks that run at the same time."""

    launch: Launch
    nth: int
    blocks: list[Block]
    meeting: Meeting
    copies: list[Copy] = field(default_factory=list)


class Waits(Exception):
    """Raised if a group must wait before an instruction, which has had no effect yet."""


class Group:
    """128 threads, in four warps. Registers are arrays with an element for each thread."""

    def __init__(self, cluster: Cluster, rank: int, nth: int) -> None:
        self.cluster, self.launch, self.rank, self.nth = cluster, cluster.launch, rank, nth
        self.block = cluster.blocks[rank]
        self.at = np.zeros(THREADS, int)  # each thread's next instruction, or -1
        self.joined = np.full(THREADS, -1)  # round of a meeting at which each thread waits
        self.waits_for = "nothing"
        known = {
            "%laneid": LANES % 32,
            "%tid.x": LANES + THREADS * nth,
            "%ctaid.x": np.full(THREADS, rank),
            "%ctaid.y": np.full(THREADS, cluster.nth),
            "%nctaid.y": np.full(THREADS, self.launch.num_clusters),
            "__dynamic_shmem__0": np.full(THREADS, SHARED_FROM),
        }
        self.registers = {name: values.astype(np.uint32) for name, values in known.items()}
        for n in range(len(self.launch.parameters)):
            self.registers[f"param_{n}"] = np.full(THREADS, HANDLE + n, np.uint64)

    @property
    def is_done(self) -> bool:
        return bool((self.at < 0).all())

    def run(self, most: int) -> bool:
        """Run up to `most` steps and return True if at least one could be done."""
        for n in range(most):
            if self.is_done:
                return n > 0
            try:
                self.step()
            except Waits as waits:
                self.waits_for = str(waits)
                return n > 0
        return True

    def step(self) -> None:
        """Execute the lowest next instruction, for all threads that are at it."""
        at = int(self.at[self.at >= 0].min())
        instruction = self.launch.program.instructions[at]
        lanes = here = self.at == at
        if instruction.guard:
            lanes = here & (self.read(instruction.guard, "pred") ^ instruction.negated)
        if instruction.name.startswith("bra"):
            after = self.launch.program.labels[instruction.operands[0]]
        elif instruction.name == "ret":
            after = -1
        else:
            after = at + 1
            if lanes.any():
                handler_of(instruction.name)(self, instruction, lanes)
        self.at[here] = at + 1
        self.at[lanes] = after

    def read(self, operand: str, kind: str) -> Array:
        found = self.registers.get(operand)
        return constant(operand, kind) if found is None else found.view(TYPES[kind])

    def write(self, operand: str, values: Array, lanes: Array) -> None:
        if operand == "_":
            return
        values = values.view(BITS[values.itemsize])
        before = self.registers.get(operand)
        if before is None:
            before = np.full(THREADS, -1).astype(values.dtype)
        self.registers[operand] = np.where(lanes, values, before)

    def address(self, operand: str, kind: str) -> Array:
        """Return the addresses `[register + bytes]` as signed integers."""
        register, _, more = operand.strip("[]").partition("+")
        return self.read(register, kind).astype(np.int64) + int(more or 0)

    def barrier(self, address: int) -> Barrier:
        """Return a barrier of this block, or of the block whose address `mapa` returned."""
        rank = address >> OF_RANK
        block = self.cluster.blocks[rank - 1] if rank else self.block
        return block.barriers[address & ((1 << OF_RANK) - 1)]


@cache
def constant(text: str, kind: str) -> Array:
    whole = int(text[2:], 16) if text.startswith("0f") else int(text)
    bits = BITS[np.dtype(TYPES[kind]).itemsize]
    mask = (1 << 8 * np.dtype(bits).itemsize) - 1
    return np.full(THREADS, whole & mask, bits).view(TYPES[kind])


def parts_of(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def only(lanes: Array) -> int:
    """Return the single active thread."""
    assert lanes.sum() == 1, "one thread is to do this, not several"
    return int(lanes.argmax())


def plain(group: Group, of: Instruction, lanes: Array) -> None:
    name, *modifiers, kind = of.name.split(".")
    if not {*modifiers} <= MODIFIERS:
        raise NotImplementedError(of.name)
    kinds = [kind] * (len(of.operands) - 1)
    found = [group.read(*each) for each in zip(of.operands[1:], kinds, strict=True)]
    if name in ("shl", "shr"):
        found[1] = group.read(of.operands[2], "u32").astype(found[0].dtype)
    group.write(of.operands[0], PLAIN[name](*found).astype(TYPES[kind]), lanes)


def multiply_wide(group: Group, of: Instruction, lanes: Array) -> None:
    a, b = (group.read(each, of.name[-3:]).astype(np.int64) for each in of.operands[1:])
    assert of.name == "mul.wide.s32"
    group.write(of.operands[0], a * b, lanes)


def compare(group: Group, of: Instruction, lanes: Array) -> None:
    _, how, kind = of.name.split(".")
    a, b = (group.read(each, kind) for each in of.operands[1:])
    group.write(of.operands[0], COMPARE[how](a, b), lanes)


def select(group: Group, of: Instruction, lanes: Array) -> None:
    kind = of.name.split(".")[1]
    a, b = (group.read(each, kind) for each in of.operands[1:3])
    group.write(of.operands[0], np.where(group.read(of.operands[3], "pred"), a, b), lanes)


def move(group: Group, of: Instruction, lanes: Array) -> None:
    """Copy a register, or pack or unpack its two halves."""
    to, from_ = of.operands
    kind = of.name.split(".")[1]
    half = {"b32": "b16", "b64": "b32"}.get(kind, "")
    if from_.startswith("{"):
        halves = np.stack([group.read(part, half) for part in parts_of(from_)], 1)
        group.write(to, halves.view(TYPES[kind])[:, 0], lanes)
    elif to.startswith("{"):
        whole = group.read(from_, kind).reshape(-1, 1).view(TYPES[half])
        for n, part in enumerate(parts_of(to)):
            group.write(part, whole[:, n].copy(), lanes)
    else:
        group.write(to, group.read(from_, kind), lanes)


def convert(group: Group, of: Instruction, lanes: Array) -> None:
    if of.name in ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.bf16x2.f32"):
        high, low = (torch.from_numpy(group.read(n, "f32").copy()) for n in of.operands[1:])
        pair = torch.stack([low, high], 1)
        if "e4m3" in of.name:
            eights = pair.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            found = eights.numpy().view(np.uint16)
        else:
            found = pair.bfloat16().view(torch.int16).numpy().view(np.uint32)
        group.write(of.operands[0], found[:, 0], lanes)
        return
    _, to, from_ = of.name.split(".")
    assert to[0] in "us" and from_[0] in "us", of.name
    group.write(of.operands[0], group.read(of.operands[1], from_).astype(TYPES[to]), lanes)


def same_address(group: Group, of: Instruction, lanes: Array) -> None:
    group.write(of.operands[0], group.read(of.operands[1], "u64"), lanes)


def load_parameter(group: Group, of: Instruction, lanes: Array) -> None:
    kind, (name, _, more) = of.name.split(".")[-1], of.operands[1].strip("[]").partition("+")
    given = group.launch.parameters[int(name.removeprefix("param_"))]
    assert isinstance(given, bytes), "a tensor map is read as numbers"
    for n, to in enumerate(parts_of(of.operands[0])):
        values = np.frombuffer(given, TYPES[kind], 1, int(more or 0) + n * int(kind[1:]) // 8)
        group.write(to, values.repeat(THREADS), lanes)


def load_global(group: Group, of: Instruction, lanes: Array) -> None:
    assert of.name.endswith(".b32"), of.name
    words, to = np.zeros((THREADS, 4), np.uint32), parts_of(of.operands[0])
    address = group.address(of.operands[1], "u64")[lanes]
    words[lanes, : len(to)] = group.launch.memory.load(address, len(to))
    for n, register in enumerate(to):
        group.write(register, words[:, n].copy(), lanes)


def store_global(group: Group, of: Instruction, lanes: Array) -> None:
    assert of.name.endswith(".b32"), of.name
    words = np.stack([group.read(part, "b32") for part in parts_of(of.operands[1])], 1)
    group.launch.memory.store(group.address(of.operands[0], "u64")[lanes], words[lanes])


def shuffle(group: Group, of: Instruction, lanes: Array) -> None:
    warps = lanes.reshape(-1, 32)
    assert (warps.any(1) == warps.all(1)).all(), "some threads of a warp do not shuffle"
    assert of.operands[3:] == ("31", "-1"), of
    with_ = int(of.operands[2])
    from_ = LANES ^ with_ if ".bfly." in of.name else LANES // 32 * 32 + with_
    group.write(of.operands[0], group.read(of.operands[1], "b32")[from_], lanes)


def elect(group: Group, of: Instruction, lanes: Array) -> None:
    """Elect the first active thread of each warp."""
    warps = lanes.reshape(-1, 32)
    first = warps & (warps.cumsum(1) == 1)
    group.write(of.operands[0].partition("|")[2], first.reshape(-1), lanes)


def nothing(group: Group, of: Instruction, lanes: Array) -> None:
    """Do nothing, for an instruction whose effect is not modelled."""


def name_block(group: Group, of: Instruction, lanes: Array) -> None:
    """Map an address to another block of the cluster."""
    address, rank = (group.read(each, "u32") for each in of.operands[1:])
    group.write(of.operands[0], address | (rank + np.uint32(1) << np.uint32(OF_RANK)), lanes)


def begin_barrier(group: Group, of: Instruction, lanes: Array) -> None:
    nth = only(lanes)
    address = int(group.address(of.operands[0], "u32")[nth])
    group.block.barriers[address] = Barrier(int(group.read(of.operands[1], "u32")[nth]))


def arrive(group: Group, of: Instruction, lanes: Array) -> None:
    address = group.address(of.operands[1], "u32")
    counts = group.read((*of.operands, "1")[2], "u32")
    for nth in lanes.nonzero()[0]:
        group.barrier(int(address[nth])).count(int(counts[nth]), 0)


def arrive_and_expect(group: Group, of: Instruction, lanes: Array) -> None:
    nth = only(lanes)
    num_bytes = int(group.read(of.operands[2], "u32")[nth])
    group.barrier(int(group.address(of.operands[1], "u32")[nth])).count(1, num_bytes)


def wait(group: Group, of: Instruction, lanes: Array) -> None:
    (address,) = {*group.address(of.operands[1], "u32")[lanes].tolist()}
    (parity,) = {*group.read(of.operands[2], "u32")[lanes].tolist()}
    if group.block.barriers[address].parity == parity:
        raise Waits(f"{group.block.named(address)} (parity {parity})")


def meet(group: Group, of: Instruction, lanes: Array) -> None:
    """Synchronise the threads of a block or a cluster. `bar.sync` is an arrival and a wait."""
    is_block = of.name == "bar.sync"
    meeting = group.block.meeting if is_block else group.cluster.meeting
    new = lanes & (group.joined < 0)
    if ".wait" not in of.name:
        group.joined[new] = meeting.round
        meeting.arrive(int(new.sum()))
    if is_block or ".wait" in of.name:
        assert (group.joined[lanes] >= 0).all(), "threads wait for a meeting and never arrived"
        if (group.joined[lanes] == meeting.round).any():
            raise Waits(f"the {'block' if is_block else 'cluster'} to meet: {meeting}")
        group.joined[lanes] = -1


def swizzled(address: Array) -> Array:
    """Return the swizzled address. The place of 16 bytes in a row depends on the row modulo 8."""
    return address ^ ((address >> 7 & 7) << 4)


def copy(group: Group, of: Instruction, lanes: Array) -> None:
    nth, (to, from_, barrier, *more) = only(lanes), of.operands
    handle, _, where = from_.strip("[]").partition(", ")
    box = group.launch.parameters[int(group.read(handle, "u64")[nth]) - HANDLE]
    assert isinstance(box, Box), "numbers are read as a tensor map"
    column, row, *matrix = (int(group.read(n, "s32")[nth]) for n in parts_of(where))
    matrices = box.matrix[matrix[0]] if matrix else box.matrix
    content = np.zeros((box.rows, LINE), np.uint8)  # elements outside of the matrix are zero
    assert row >= 0 and column >= 0
    inside = matrices[row : row + box.rows, column : column + LINE]
    content[: inside.shape[0], : inside.shape[1]] = inside
    first = int(group.address(to, "u32")[nth])
    assert first % (8 * LINE) == 0, "a box does not begin with eight lines"
    at = swizzled(first + np.arange(content.size).reshape(content.shape))
    mask = 1 << group.rank
    if ".multicast" in of.name:
        mask = int(group.read(more[0], "u16")[nth])
    arrives = int(group.address(barrier, "u32")[nth])
    for rank, block in enumerate(group.cluster.blocks):
        if mask >> rank & 1:
            group.cluster.copies.append(Copy(block, at, content, arrives))


def matrix_of(group: Group, descriptor: Array, rows: int) -> Array:
    """Return rows of 32 e4m3 numbers from shared memory."""
    (of,) = {*descriptor.tolist()}
    assert of >> 62 == 1 and of >> 32 & 0x3FFF == 64, "not swizzled by 128 bytes, eight rows each"
    at = ((of & 0x3FFF) << 4) + LINE * np.arange(rows)[:, None] + np.arange(32)
    return E4M3[group.block.content[swizzled(at)]]


def multiply(group: Group, of: Instruction, lanes: Array) -> None:
    assert lanes.all() and of.operands[4:] == ("1", "1"), of.operands
    assert ".m64n" in of.name and of.name.endswith("k32.f32.e4m3.e4m3"), of.name
    registers, is_added = parts_of(of.operands[0]), group.read(of.operands[3], "pred")
    a, b = (group.read(each, "u64") for each in of.operands[1:3])
    product = matrix_of(group, a, 64) @ matrix_of(group, b, 2 * len(registers)).T
    n = np.arange(len(registers))[:, None]
    row, column = LANES // 32 * 16 + LANES % 32 // 4 + n // 2 % 2 * 8, n // 4 * 8 + n % 2
    found = product[row, column + LANES % 4 * 2]
    for register, values in zip(registers, found, strict=True):
        if is_added.all():
            values = values + group.read(register, "f32")
        group.write(register, values.astype(np.float32), lanes)


Handler = Callable[[Group, Instruction, Any], None]
HANDLERS: dict[str, Handler] = {  # by prefixes of names
    **dict.fromkeys(PLAIN, plain),
    "mul.wide": multiply_wide, "setp": compare, "selp": select, "mov": move, "cvt": convert,
    "cvta": same_address, "ld.param": load_parameter, "ld.global": load_global,
    "st.global": store_global, "elect.sync": elect, "mapa": name_block,
    **dict.fromkeys(("shfl.sync.idx", "shfl.sync.bfly"), shuffle),
    **dict.fromkeys(("bar.sync", "barrier.cluster.arrive", "barrier.cluster.wait"), meet),
    "mbarrier.init": begin_barrier, "mbarrier.try_wait.parity": wait,
    "mbarrier.arrive": arrive, "mbarrier.arrive.expect_tx": arrive_and_expect,
    "cp.async.bulk.tensor": copy, "wgmma.mma_async": multiply,
    **dict.fromkeys(("prefetch", "griddepcontrol", "setmaxnreg", "fence"), nothing),
    **dict.fromkeys(("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"), nothing),
}  # fmt: skip


@cache
def handler_of(name: str) -> Handler:
    words = name.split(".")
    for count in range(len(words), 0, -1):
        found = HANDLERS.get(".".join(words[:count]))
        if found:
            return found
    raise NotImplementedError(name)


def play(launch: Launch, seed: int) -> None:
    """Run all blocks to their end. The error of a deadlock names the threads that wait."""
    given = [len(n) if isinstance(n, bytes) else 128 for n in launch.parameters]
    assert given == launch.program.parameter_bytes, "the parameters are not the kernel's"
    random = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        for nth in range(launch.num_clusters):
            play_cluster(launch, nth, random)


def play_cluster(launch: Launch, nth: int, random: np.random.Generator) -> None:
    blocks = [Block(launch.num_threads) for _ in range(launch.cluster)]
    cluster = Cluster(launch, nth, blocks, Meeting(launch.cluster * launch.num_threads))
    nths = range(launch.num_threads // THREADS)
    groups = [Group(cluster, rank, n) for rank in range(launch.cluster) for n in nths]
    most = 2 ** random.integers(1, FASTEST + 1, len(groups))
    share = 0.5 ** random.integers(0, FASTEST)  # fraction of copies that arrive in each turn
    while not all(group.is_done for group in groups):
        order = random.permutation(len(groups))
        moved = [groups[n].run(int(random.integers(1, most[n] + 1))) for n in order]
        waiting = [
            f"group {group.nth} of block {group.rank} waits for {group.waits_for}"
            for group in groups
            if not group.is_done
        ]
        assert any(moved) or cluster.copies, "; ".join(waiting)
        for _ in range(random.binomial(len(cluster.copies), share)):
            cluster.copies.pop(random.integers(len(cluster.copies))).arrive()
    assert not cluster.copies, "a kernel ends before its copies"
