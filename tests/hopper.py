"""A Hopper GPU as far as Triton's compiler asks for one: nothing runs on it."""

from __future__ import annotations

from typing import Any


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, at: int) -> int:
        return at

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)
