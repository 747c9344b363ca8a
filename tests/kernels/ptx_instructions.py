"""Instructions of the simulator in ptx.py: their effects on a group of threads.

The instructions are those of HANDLERS and PLAIN. Any other one raises NotImplementedError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tests.kernels.played_memory import Array, Barrier, Copy

if TYPE_CHECKING:
    from tests.kernels.ptx import Group

THREADS = 128  # threads of a group
LANES = np.arange(THREADS)
SHARED_FROM = 1024  # address at which a block's shared memory begins
OF_RANK = 24  # bits of a shared address; above them is the rank + 1 of another block, or 0
LINE = 128  # bytes of a swizzled row in shared memory
HANDLE = 1 << 40  # address of the first parameter
TYPES: dict[str, type] = {
    "pred": np.bool_, "b16": np.uint16, "u16": np.uint16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
BITS: dict[int, type] = {1: np.bool_, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def quotient(a: Array, b: Array) -> Array:
    """Divide, and round integers towards zero."""
    if a.dtype == np.float32:
        return np.divide(a, b)
    exact: Array = np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b))
    return exact.astype(a.dtype)


def reciprocal_root(a: Array) -> Array:
    return 1 / np.sqrt(a)


def fused(a: Array, b: Array, c: Array) -> Array:
    wide = np.float64 if a.dtype == np.float32 else a.dtype
    return (a.astype(wide) * b + c).astype(a.dtype)


# These are elementwise. All operands have the type that the name ends in.
PLAIN: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": fused, "fma": fused,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "min": np.fmin, "max": np.fmax, "neg": np.negative, "abs": np.abs, "div": quotient,
    "shl": np.left_shift, "shr": np.right_shift, "ex2": np.exp2, "rcp": np.reciprocal,
    "rsqrt": reciprocal_root,
}  # fmt: skip
MODIFIERS = {"lo", "rn", "approx", "ftz"}  # modifiers of these instructions


class Instruction(NamedTuple):
    name: str
    operands: tuple[str, ...]
    guard: str | None  # predicate register
    negated: bool


class Box(NamedTuple):
    """A tensor map: one or several matrices as rows of bytes, and the rows of one copy."""

    matrix: Array
    rows: int


class Waits(Exception):
    """Raised if a group must wait before an instruction, which has had no effect yet."""


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
    """Multiply and return all bits of the products."""
    kind = of.name[-3:]
    a, b = (group.read(each, kind).astype(np.int64) for each in of.operands[1:])
    wide = {"u16": np.uint32, "s16": np.int32, "u32": np.uint64, "s32": np.int64}[kind]
    group.write(of.operands[0], (a * b).astype(wide), lanes)


def compare(group: Group, of: Instruction, lanes: Array) -> None:
    _, how, kind = of.name.split(".")
    a, b = (group.read(each, kind) for each in of.operands[1:])
    group.write(of.operands[0], COMPARE[how](a, b), lanes)


def select(group: Group, of: Instruction, lanes: Array) -> None:
    kind = of.name.split(".")[1]
    a, b = (group.read(each, kind) for each in of.operands[1:3])
    group.write(of.operands[0], np.where(group.read(of.operands[3], "pred"), a, b), lanes)


def move(group: Group, of: Instruction, lanes: Array) -> None:
    """Copy a register, or pack or unpack its parts."""
    to, from_ = of.operands
    kind = of.name.split(".")[1]
    if from_.startswith("{"):
        names = parts_of(from_)
        parts = [group.read(name, f"b{int(kind[1:]) // len(names)}") for name in names]
        group.write(to, np.stack(parts, 1).view(TYPES[kind])[:, 0], lanes)
    elif to.startswith("{"):
        names = parts_of(to)
        part = TYPES[f"b{int(kind[1:]) // len(names)}"]
        whole = group.read(from_, kind).reshape(-1, 1).view(part)
        for n, name in enumerate(names):
            group.write(name, whole[:, n].copy(), lanes)
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
    if of.name == "cvt.f32.bf16":
        wide = group.read(of.operands[1], "b16").astype(np.uint32) << 16
        group.write(of.operands[0], wide, lanes)
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
    to, width = parts_of(of.operands[0]), width_of(of)
    address = group.address(of.operands[1], "u64")[lanes]
    write_parts(group, to, width, lanes, group.launch.memory.load(address, len(to) * width))


def store_global(group: Group, of: Instruction, lanes: Array) -> None:
    content = read_parts(group, parts_of(of.operands[1]), width_of(of), lanes)
    group.launch.memory.store(group.address(of.operands[0], "u64")[lanes], content)


def load_shared(group: Group, of: Instruction, lanes: Array) -> None:
    to, width = parts_of(of.operands[0]), width_of(of)
    at = shared_places(group, of.operands[1], len(to) * width, lanes)
    write_parts(group, to, width, lanes, group.block.content[at])


def store_shared(group: Group, of: Instruction, lanes: Array) -> None:
    content = read_parts(group, parts_of(of.operands[1]), width_of(of), lanes)
    at = shared_places(group, of.operands[0], content.shape[1], lanes)
    group.block.content[at] = content


def width_of(of: Instruction) -> int:
    """Return the bytes of a register that is loaded or stored."""
    return int(of.name.rpartition(".")[2][1:]) // 8


def shared_places(group: Group, operand: str, num_bytes: int, lanes: Array) -> Array:
    """Return the places in this block's shared memory, [active thread, byte]."""
    address = group.address(operand, "u32")[lanes]
    assert (address % num_bytes == 0).all(), "a shared address is not aligned"
    return address[:, None] + np.arange(num_bytes)


def read_parts(group: Group, names: list[str], width: int, lanes: Array) -> Array:
    """Return the bytes of registers, [active thread, byte]."""
    parts = [group.read(name, f"b{8 * width}")[lanes].reshape(-1, 1) for name in names]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], 1)


def write_parts(group: Group, names: list[str], width: int, lanes: Array, content: Array) -> None:
    for n, name in enumerate(names):
        values = np.zeros(THREADS, BITS[width])
        part = np.ascontiguousarray(content[:, n * width : (n + 1) * width])
        values[lanes] = part.view(BITS[width])[:, 0]
        group.write(name, values, lanes)


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
    """Synchronise the threads of a block or a cluster, or some threads of a block.

    `bar.sync` is an arrival and a wait.
    """
    is_block = of.name == "bar.sync"
    meeting = group.cluster.meeting
    if is_block:
        number, *count = (int(group.read(each, "u32")[0]) for each in of.operands)
        meeting = group.block.meeting(number, *count)
    joined = group.joined.setdefault(id(meeting), np.full(THREADS, -1))
    new = lanes & (joined < 0)
    if ".wait" not in of.name:
        joined[new] = meeting.round
        meeting.arrive(int(new.sum()))
    if is_block or ".wait" in of.name:
        assert (joined[lanes] >= 0).all(), "threads wait for a meeting and never arrived"
        if (joined[lanes] == meeting.round).any():
            raise Waits(f"the {'block' if is_block else 'cluster'} to meet: {meeting}")
        joined[lanes] = -1


def swizzled(address: Array) -> Array:
    """Return the swizzled address. The place of 16 bytes in a row depends on the row modulo 8."""
    return address ^ ((address >> 7 & 7) << 4)


def copy(group: Group, of: Instruction, lanes: Array) -> None:
    """Copy a box to shared memory. The last operand of some is a cache policy."""
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


def copy_to_block(group: Group, of: Instruction, lanes: Array) -> None:
    """Copy bytes of this block's shared memory to that of a block of the cluster."""
    nth = only(lanes)
    to, from_, num_bytes, barrier = (
        int(group.read(each.strip("[]"), "u32")[nth]) for each in of.operands
    )
    rank, low = (to >> OF_RANK) - 1, (1 << OF_RANK) - 1
    assert rank == (barrier >> OF_RANK) - 1, "bytes and their barrier are in different blocks"
    at = (to & low) + np.arange(num_bytes)
    content = group.block.content[from_ : from_ + num_bytes].copy()
    group.cluster.copies.append(Copy(group.cluster.blocks[rank], at, content, barrier & low))


def matrix_of(group: Group, descriptor: Array, rows: int) -> Array:
    """Return rows of 32 e4m3 numbers from shared memory."""
    (of,) = {*descriptor.tolist()}
    assert of >> 62 == 1 and (rows == 8 or of >> 32 & 0x3FFF == 64), (
        "not swizzled by 128 bytes, eight rows each"
    )
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


Handler = Callable[..., None]  # of (group, instruction, active threads)
HANDLERS: dict[str, Handler] = {  # by prefixes of names
    **dict.fromkeys(PLAIN, plain),
    "mul.wide": multiply_wide, "setp": compare, "selp": select, "mov": move, "cvt": convert,
    "cvta": same_address, "ld.param": load_parameter, "ld.global": load_global,
    "st.global": store_global, "elect.sync": elect, "mapa": name_block,
    **dict.fromkeys(("shfl.sync.idx", "shfl.sync.bfly"), shuffle),
    **dict.fromkeys(("bar.sync", "barrier.cluster.arrive", "barrier.cluster.wait"), meet),
    "mbarrier.init": begin_barrier, "mbarrier.try_wait.parity": wait,
    "mbarrier.arrive": arrive, "mbarrier.arrive.expect_tx": arrive_and_expect,
    "ld.shared": load_shared, "st.shared": store_shared, "bar.warp.sync": nothing,
    "cp.async.bulk.shared::cluster": copy_to_block,
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
