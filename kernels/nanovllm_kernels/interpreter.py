"""Faster runs of kernels in Triton's interpreter.

Decision: private names of Triton are used, since they make the small cases run in less than half
the time. A Triton without these names runs as it is.

- The functions of triton.language are replaced once per kernel. The interpreter does so before
  each function that a kernel calls, although the replacement lasts until the kernel ends.
- Integer operations are not repeated in 64 bits. The interpreter looks for overflow in that way,
  but its assertion has no effect unless `debug` is on, which no launch can set.
- NumPy's types, and the shapes of types and tensors, are computed once each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

PRIVATE_NAMES = "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder"


class PatchedOnce:
    """Replacement of the interpreter's _patch_lang, which patches once per kernel.

    It patches again only for functions with other modules.
    """

    def __init__(self, patch: Callable[..., Any]) -> None:
        self.patch = patch
        self.scope, self.modules = interpreter._LangPatchScope(), set[str]()
        self.known: dict[int, set[str]] = {}  # by the id of a function's globals

    def __call__(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401
        modules = self.modules_of(function.__globals__)
        if not self.scope._changes:  # the last kernel has ended
            self.scope, self.modules = self.patch(function), {*modules}
            return self.scope
        if not modules <= self.modules:
            self.scope._changes += self.patch(function)._changes
            self.modules |= modules
        return interpreter._LangPatchScope()

    def modules_of(self, variables: dict[str, Any]) -> set[str]:
        """Return the modules of triton.language among a function's globals."""
        if (found := self.known.get(id(variables))) is None:
            values, kinds = [*variables.values()], (language, language.core)
            found = {one.__name__ for one in kinds if any(one is value for value in values)}
            self.known[id(variables)] = found
        return found


class NumpyTypes:
    """Replacement of the interpreter's _get_np_dtype, which builds a table in every call."""

    def __init__(self, numpy_type: Callable[..., Any]) -> None:
        self.numpy_type = numpy_type
        self.known: dict[str, np.dtype[Any]] = {}  # by the name of an element's type

    def __call__(self, kind: Any) -> np.dtype[Any]:  # noqa: ANN401
        name = kind.scalar.name
        if (found := self.known.get(name)) is None:
            found = self.known[name] = self.numpy_type(kind)
        return found


class Shapes:
    """Replacements of the constructors of block types and of tensors.

    Their shapes are tuples of Triton's own kind, whose construction takes a tenth of the time.
    """

    def __init__(self, init_type: Callable[..., None]) -> None:
        self.init_type = init_type
        self.known: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.scalar = self.of_tensor(())

    @staticmethod
    def of_tensor(shape: Sequence[int]) -> tuple[Any, Any]:
        """Return the number of elements and the shape of a tensor, as constants of Triton."""
        constants = [language.constexpr(size) for size in shape]
        return language.constexpr(math.prod(shape)), language.tuple(constants)

    def set_type(self, block_type: Any, element_ty: Any, shape: Any) -> None:  # noqa: ANN401
        key = element_ty.name, *shape
        if (fields := self.known.get(key)) is None:
            self.init_type(block_type, element_ty, shape)
            block_type.of_tensor = self.of_tensor(block_type.shape.values)
            fields = self.known[key] = {**vars(block_type)}
        vars(block_type).update(fields, element_ty=element_ty)

    def set_tensor(self, tensor: Any, handle: Any, type: Any) -> None:  # noqa: ANN401
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.numel, tensor.shape = type.of_tensor if type.is_block() else self.scalar


def patch_once() -> None:
    """Let kernels run faster in this process's interpreter. Further calls change nothing."""
    if not all(hasattr(interpreter, name) for name in PRIVATE_NAMES):
        return
    if isinstance(interpreter._patch_lang, PatchedOnce):
        return
    interpreter._patch_lang = PatchedOnce(interpreter._patch_lang)
    interpreter._get_np_dtype = NumpyTypes(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    shapes = Shapes(language.block_type.__init__)
    language.block_type.__init__ = lambda *given: shapes.set_type(*given)
    language.tensor.__init__ = lambda *given: shapes.set_tensor(*given)
