"""Faster runs of kernels in Triton's interpreter.

Decision: private names of Triton are used, since they make the small cases run in less than half
the time. A Triton without these names runs as it is.

- The functions of triton.language are replaced once per kernel. The interpreter does so before
  each function that a kernel calls, although the replacement lasts until the kernel ends.
- Integer operations are not repeated in 64 bits. The interpreter looks for overflow in that way,
  but its assertion has no effect unless `debug` is on, which no launch can set.
- NumPy's types, and the shapes of types and tensors, are computed once each.
- The first use of an operator with two types goes through Triton's promotion and broadcasting.
  Later ones are a single NumPy function, which broadcasts itself (`Operators`).
- bfloat16 is the upper half of float32, and types of 8 bits are looked up in a table.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

PRIVATE_NAMES = (
    "_patch_lang", "_patch_attr", "_LangPatchScope", "_get_np_dtype", "_convert_float",
    "interpreter_builder", "interpreter_semantic", "TensorHandle",
)  # fmt: skip
SIGNED = ("int32", "int64")
INTEGERS = (*SIGNED, "uint32", "uint64")
NUMBERS = ("fp32", *INTEGERS)
WHOLE = slice(None)


def quotient(x: Any, y: Any) -> Any:  # noqa: ANN401
    """Return x / y rounded towards zero, as C does."""
    return (x - np.fmod(x, y)) // y


# Operators of tensors: a function of NumPy, and the types of elements for which it is the same.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "__add__": (operator.add, NUMBERS),
    "__sub__": (operator.sub, NUMBERS),
    "__mul__": (operator.mul, NUMBERS),
    "__radd__": (operator.add, NUMBERS),
    "__rsub__": (lambda x, y: y - x, NUMBERS),
    "__rmul__": (operator.mul, NUMBERS),
    "__truediv__": (operator.truediv, ("fp32",)),
    "__floordiv__": (quotient, INTEGERS),
    "__mod__": (np.fmod, INTEGERS),
    "__lt__": (operator.lt, NUMBERS),
    "__le__": (operator.le, NUMBERS),
    "__gt__": (operator.gt, NUMBERS),
    "__ge__": (operator.ge, NUMBERS),
    "__eq__": (operator.eq, NUMBERS),
    "__ne__": (operator.ne, NUMBERS),
    "__and__": (operator.and_, ("int1", *INTEGERS)),
    "__or__": (operator.or_, ("int1", *INTEGERS)),
    "__xor__": (operator.xor, ("int1", *INTEGERS)),
    "__lshift__": (operator.lshift, INTEGERS),
    "__rshift__": (operator.rshift, INTEGERS),
}


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


def tensor_of(data: Any, kind: Any) -> Any:  # noqa: ANN401
    """Return a tensor with NumPy's values of a type."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, kind.scalar, {}
    return language.tensor(handle, kind)


class Operators:
    """Replacement of the interpreter's _patch_attr, which wraps the functions of triton.language.

    An operation on certain types first runs as usual. If it converts no element, it is only a
    function of NumPy from then on, and the type of its result is known.
    """

    def __init__(self, semantic: Any) -> None:  # noqa: ANN401
        self.semantic = semantic
        self.wrapped: dict[tuple[str, Any], Callable[..., Any]] = {}  # by name and function

    def __call__(self, owner: Any, name: str, member: Any, _: object, scope: Any) -> None:  # noqa: ANN401
        if (wrapped := self.wrapped.get((name, member))) is None:
            wrapped = self.with_semantic(member)
            if owner is language.tensor and name in OPERATORS:
                wrapped = self.binary(name, wrapped)
            elif owner is language.tensor and name == "__getitem__":
                wrapped = self.index(wrapped)
            elif name == "where":
                wrapped = self.choice(wrapped)
            self.wrapped[name, member] = wrapped
        scope.set_attr(owner, name, wrapped)

    def with_semantic(self, member: Callable[..., Any]) -> Callable[..., Any]:
        semantic = self.semantic

        def call(*values: Any, **named: Any) -> Any:  # noqa: ANN401
            named["_semantic"] = semantic
            return member(*values, **named)

        return call

    @staticmethod
    def binary(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        compute, elements = OPERATORS[name]
        known: dict[tuple[Any, Any], Any] = {}  # a function and the result's type by those of x, y

        def apply(x: Any, y: Any) -> Any:  # noqa: ANN401
            y = y.value if y.__class__ is language.constexpr else y
            is_tensor = y.__class__ is language.tensor
            key = x.type.name, y.type.name if is_tensor else y.__class__
            if plan := known.get(key):
                return tensor_of(plan[0](x.handle.data, y.handle.data if is_tensor else y), plan[1])
            result = usual(x, y)
            if x.dtype.is_ptr():
                is_offset = y.dtype.name in SIGNED if is_tensor else y.__class__ is int
                if name == "__add__" and is_offset:
                    known[key] = partial(moved, bytes_of(x)), result.type
            elif converts_nothing(x, y, elements):
                known[key] = compute, result.type
            return result

        return apply

    @staticmethod
    def choice(usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return `where`, which takes each element from one of two values."""
        known: dict[tuple[Any, ...], Any] = {}  # the result's type by those of the arguments

        def apply(condition: Any, x: Any, y: Any) -> Any:  # noqa: ANN401
            values = [x.value if x.__class__ is language.constexpr else x for x in (x, y)]
            tensors = [x.__class__ is language.tensor for x in values]
            if condition.__class__ is not language.tensor or not any(tensors):
                return usual(condition, x, y)
            pairs = [*zip(values, tensors, strict=True)]
            key = condition.type.name, *[x.type.name if ok else x.__class__ for x, ok in pairs]
            if (kind := known.get(key)) is not None:
                data = [x.handle.data if ok else x for x, ok in pairs]
                return tensor_of(np.where(condition.handle.data, *data), kind)
            result = usual(condition, x, y)
            first, second = values if tensors[0] else reversed(values)
            if condition.dtype.name == "int1" and converts_nothing(first, second, NUMBERS):
                known[key] = result.type
            return result

        return apply

    @staticmethod
    def index(usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return `__getitem__`, which only adds dimensions."""
        known: dict[tuple[Any, ...], Any] = {}  # the result's type by that of x and the index

        def apply(x: Any, slices: Any) -> Any:  # noqa: ANN401
            if slices.__class__ is not tuple or not x.type.is_block():
                return usual(x, slices)
            if not all(one is None or (one.__class__ is slice and one == WHOLE) for one in slices):
                return usual(x, slices)
            key = x.type.name, *[one is None for one in slices]
            if (kind := known.get(key)) is not None:
                return tensor_of(x.handle.data[slices], kind)
            result = usual(x, slices)
            known[key] = result.type
            return result

        return apply


def converts_nothing(x: Any, y: Any, elements: tuple[str, ...]) -> bool:  # noqa: ANN401
    """Return True if NumPy's result of a tensor and a tensor or number has the type of Triton's."""
    kind = x.dtype.name
    if kind not in elements or y.__class__ is not language.tensor:
        number = (int, float) if kind == "fp32" else (int,)
        return kind in elements and kind != "int1" and y.__class__ in number
    return kind == y.dtype.name or (kind in SIGNED and y.dtype.name in SIGNED)


def bytes_of(pointers: Any) -> int:  # noqa: ANN401
    return max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)


def moved(size: int, pointers: Any, offsets: Any) -> Any:  # noqa: ANN401
    """Return pointers to other elements of `size` bytes."""
    if offsets.__class__ is int:
        return pointers + np.uint64(offsets * size % 2**64)
    return pointers + offsets.astype(np.uint64) * np.uint64(size)


class Broadcasts:
    """Replacement of the interpreter's broadcast_impl_value, which gives two tensors one shape."""

    def __init__(self, broadcast: Callable[..., Any]) -> None:
        self.broadcast = broadcast
        self.known: dict[tuple[str, str], tuple[Any, Any]] = {}  # types of the results by name

    def __call__(self, x: Any, y: Any) -> tuple[Any, Any]:  # noqa: ANN401
        key = x.type.name, y.type.name
        if (kinds := self.known.get(key)) is None:
            wide = self.broadcast(x, y)
            self.known[key] = kinds = wide[0].type, wide[1].type
        return self.widen(x, kinds[0]), self.widen(y, kinds[1])

    @staticmethod
    def widen(x: Any, kind: Any) -> Any:  # noqa: ANN401
        if x.type.name == kind.name:
            return x
        data = np.empty(kind.shape.values, x.handle.data.dtype)
        data[...] = x.handle.data
        return tensor_of(data, kind)


class Conversions:
    """Replacement of the interpreter's _convert_float, which takes floats apart bit by bit."""

    def __init__(self, convert: Callable[..., Any]) -> None:
        self.convert = convert
        self.tables: dict[tuple[str, str], Any] = {}  # of all values of 8 bits

    def __call__(self, data: Any, old: Any, new: Any, rounding: Any) -> Any:  # noqa: ANN401
        """Return the bits of the converted values, as integers."""
        if old.name == "bf16" and new.name == "fp32":
            return data.astype(np.uint32) << np.uint32(16)
        if old.name == "fp32" and new.name == "bf16" and rounding is None:
            return (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if old.primitive_bitwidth == 8 < new.primitive_bitwidth:
            key = old.name, new.name
            if (table := self.tables.get(key)) is None:
                every = np.arange(256, dtype=np.uint8)
                table = self.tables[key] = self.convert(every, old, new, rounding)
            return table[data.view(np.uint8)]
        return self.convert(data, old, new, rounding)


def patch_once() -> None:
    """Let kernels run faster in this process's interpreter. Further calls change nothing."""
    if not all(hasattr(interpreter, name) for name in PRIVATE_NAMES):
        return
    if isinstance(interpreter._patch_lang, PatchedOnce):
        return
    interpreter._patch_lang = PatchedOnce(interpreter._patch_lang)
    interpreter._patch_attr = Operators(interpreter.interpreter_semantic)
    interpreter._convert_float = Conversions(interpreter._convert_float)
    interpreter._get_np_dtype = NumpyTypes(interpreter._get_np_dtype)
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    semantic.broadcast_impl_value = Broadcasts(semantic.broadcast_impl_value)
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    shapes = Shapes(language.block_type.__init__)
    language.block_type.__init__ = lambda *given: shapes.set_type(*given)
    language.tensor.__init__ = lambda *given: shapes.set_tensor(*given)
