"""Stand-in for a CUDA graph that records operations during capture and repeats them on replay.

A replay reads current inputs and writes outputs to the addresses of the capture. Values that Python
computed or read during the capture do not change, except inside of an `opaque` function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

from nanovllm.runner.runner import Runner


class Operation(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, Tensor]]  # by place; neither views nor in-place results


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.replays = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.record(function, args, kwargs or {}, made)
        return made

    def record(self, function: Any, args: Any, kwargs: dict[str, Any], made: object) -> None:
        """Append an operation. A view is left out, since its memory does not change."""
        given = {memory(leaf) for leaf in tree_leaves((args, kwargs))}
        leaves = enumerate(tree_leaves(made))
        results = [(at, leaf) for at, leaf in leaves if memory(leaf) not in given]
        schema = getattr(function, "_schema", None)  # an opaque function has none
        if results or schema is None or schema.is_mutable:
            self.operations.append(Operation(function, args, kwargs, results))

    def capture_begin(self, pool: object) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self.operations:
            again = function(*args, **kwargs)
            leaves = [again] if isinstance(again, Tensor) else tree_leaves(again)
            for at, old in results:
                old.copy_(leaves[at])


def opaque(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function as one operation of a tape, as a kernel is one of a CUDA graph.

    A replay may therefore read values of its tensors on the host.
    """

    def one(*args: Any, **kwargs: Any) -> Tensor:
        tape = _get_current_dispatch_mode()
        if not isinstance(tape, Tape):
            return function(*args, **kwargs)
        with _disable_current_modes():
            made = function(*args, **kwargs)
        tape.record(function, args, kwargs, made)
        return made

    return one


def memory(leaf: object) -> int:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else 0


@torch.inference_mode()
def capture_on_tapes(runner: Runner, sizes: list[int], *, adapted: bool = False) -> None:
    """Capture steps with prompt chunks of the given sizes."""
    mixed = runner.graphs.of(adapted=adapted).mixed
    mixed.new_graph = Tape
    mixed.capture(sizes)
