"""Faster runs of kernels in Triton's interpreter.

Decision: two private names of Triton are used. The interpreter replaces the functions of
triton.language before each function that a kernel calls, although the replacement lasts until the
kernel ends. That took 10 of 39 s of the small cases. A Triton without these names runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


class PatchedOnce:
    """Replacement of the interpreter's _patch_lang, which patches once per kernel.

    It patches again only for functions with other modules.
    """

    def __init__(self, patch: Callable[..., Any]) -> None:
        self.patch = patch
        self.scope, self.modules = interpreter._LangPatchScope(), set[str]()

    def __call__(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401
        known = function.__globals__.values()
        modules = {
            one.__name__ for one in (language, language.core) if any(one is k for k in known)
        }
        if not self.scope._changes:  # the last kernel has ended
            self.scope, self.modules = self.patch(function), modules
            return self.scope
        if not modules <= self.modules:
            self.scope._changes += self.patch(function)._changes
            self.modules |= modules
        return interpreter._LangPatchScope()


def patch_once() -> None:
    """Let the interpreter of this process patch triton.language once per kernel."""
    patch = getattr(interpreter, "_patch_lang", None)
    if hasattr(interpreter, "_LangPatchScope") and not isinstance(patch, PatchedOnce):
        interpreter._patch_lang = PatchedOnce(patch)
