"""Import of xgrammar without the libraries that only other callers of it need.

xgrammar 0.2.9 imports transformers for two types and torch for the functions that apply masks. None
of these is used here. The two imports would take 2 s of CPU time in each process that compiles
grammars, and 150 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class Placeholder(ModuleType):
    """A module in which each name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


def import_xgrammar(*unused: str) -> None:
    """Import xgrammar without importing the modules in `unused`.

    A version of xgrammar that uses more of them is imported together with them.
    """
    if "xgrammar" in sys.modules:
        return
    try:
        with missing(*unused):
            import tvm_ffi  # noqa: F401  # it checks which libraries there are
        with placeholders(*unused):
            import xgrammar
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "xgrammar"]:
            del sys.modules[name]
        import xgrammar  # noqa: F401


@contextmanager
def missing(*names: str) -> Iterator[None]:
    """Let imports of the named modules fail, except of those that are already imported."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: not found
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def placeholders(*names: str) -> Iterator[None]:
    """Replace the named modules, except those that are already imported."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update({name: Placeholder(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
