"""Simulator of the PTX of Hopper kernels, which checks their results without a GPU.

It models a launch of clusters of blocks, one cluster after the other. Four warps form a group of
threads and run together; after a divergence, the threads with the lowest next instruction run. A
seed determines the speed of each group and the order of turns. It also determines the arrival of
copies by the tensor memory accelerator, separately for each block of a multicast. Barriers in
shared memory count arrivals, bytes and phases. Clusters and blocks synchronise. Shared memory is
swizzled as in tensor maps and matrix descriptors. Unset memory is NaN. An access outside of the
tensors in global memory is an error, and the writes of each byte are counted.

The instructions are in ptx_instructions.py.

These are not modelled:

- time and speed, and divergence of warps in a group;
- asynchronous operations except copies: a product is complete at once, so that fences, commits and
  waits of `wgmma` and memory fences have no effect;
- the number of registers, griddepcontrol, and truncation in sums of a tensor core.

A tensor map is not in the PTX; a test gives its box as a Box.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.played_memory import Array, Barrier, Block, Copy, Meeting, Memory
from tests.kernels.ptx_instructions import (
    BITS,
    HANDLE,
    LANES,
    OF_RANK,
    SHARED_FROM,
    THREADS,
    TYPES,
    Box,
    Instruction,
    Waits,
    constant,
    handler_of,
)

FASTEST = 9  # a group takes up to 2 ** 9 steps until others have a turn
STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*?)\s*;$")
OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.\w+ \w+_param_\d+(?:\[(\d+)\])?")
SPINS = ("LAB_WAIT", "DONE")  # labels around try_wait, which waits by itself here


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


class Group:
    """128 threads, in four warps. Registers are arrays with an element for each thread."""

    def __init__(self, cluster: Cluster, rank: int, nth: int) -> None:
        self.cluster, self.launch, self.rank, self.nth = cluster, cluster.launch, rank, nth
        self.block = cluster.blocks[rank]
        self.at = np.zeros(THREADS, int)  # each thread's next instruction, or -1
        self.at[LANES + THREADS * nth >= self.launch.num_threads] = -1
        # By meeting, the round at which each thread waits.
        self.joined: dict[int, Array] = {}
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
    nths = range(-(-launch.num_threads // THREADS))
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
