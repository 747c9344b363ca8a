"""Stand-in for a Hopper GPU, sufficient for Triton's compiler."""

from __future__ import annotations

from typing import Any


class Hopper:
    """The part of a Triton driver that compilation needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, at: int) -> int:
        return at

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)
