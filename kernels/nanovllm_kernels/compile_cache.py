"""Compiled CuTe DSL kernels on disk, so that a second start does not compile.

Decision: not with the cache of the package quack. To import that is to import all of quack and,
through its autotuner, torch.compile: 2 s of each start, and 4 s with its matrix products, for a
start that compiles nothing. So what compiles a kernel imports what it needs when it is called.

One object file a kernel, under a key of the function and its arguments; in one folder for the
versions of all packages that have a part in it and the sources of this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVarTuple

Kind = TypeVarTuple("Kind")
Compiled = Callable[..., None]
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "quack-kernels")
NAME = "kernel"  # in every object file


def use_folder(folder: Path) -> None:
    """Every kernel of this process, from now on."""
    CachedCompile.folder = folder / made_of()


def made_of() -> str:
    """A name for everything that kernels are compiled from and by, beside their arguments."""
    digest = sha256(f"python {sys.version_info[:2]}".encode())
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{package} {metadata.version(package)}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


class Job(NamedTuple):
    """A kernel to compile."""

    function: str  # "module:name" of a CachedCompile
    arguments: str  # as Python writes them
    path: Path | None  # where it is kept


class CachedCompile(Generic[*Kind]):
    """A function that compiles a kernel, called once for equal arguments, or not if it is on disk.

    Arguments are plain values, which `repr` tells apart.
    """

    folder: ClassVar[Path | None] = None  # None: kernels are kept in memory only

    def __init__(self, compiles: Callable[[*Kind], Compiled]) -> None:
        self.compiles = compiles
        self.known: dict[tuple[*Kind], Compiled] = {}

    def job(self, *kind: *Kind) -> Job:
        function, arguments = f"{self.compiles.__module__}:{self.compiles.__qualname__}", repr(kind)
        name = sha256(f"{function} {arguments}".encode()).hexdigest()
        return Job(function, arguments, self.folder and self.folder / f"{name}.o")

    def __call__(self, *kind: *Kind) -> Compiled:
        if kind not in self.known:
            path = self.job(*kind).path
            kernel = load(path) if path and path.exists() else None
            if kernel is None:
                kernel = self.compiles(*kind)
                if path:
                    save(kernel, path)
            self.known[kind] = kernel
        return self.known[kind]


def load(path: Path) -> Compiled | None:
    """None if the file is damaged."""
    from cutlass import cute  # for a second

    with suppress(Exception):  # whatever the loader makes of it
        loaded: Compiled = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[NAME]
        return loaded
    return None


def save(kernel: Any, path: Path) -> None:  # noqa: ANN401
    """Under its name only when it is whole: others may look for it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(f".{os.getpid()}")
    kernel.export_to_c(object_file_path=str(begun), function_name=NAME)
    begun.replace(path)
