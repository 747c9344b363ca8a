"""Disk cache of compiled CuTe DSL kernels, so that a second start does not compile.

Decision: the cache of the package quack is not used. Its import loads all of quack and, through its
autotuner, torch.compile. That takes 2 s of each start, and 4 s with its matrix products, even if
nothing is compiled. So a function that compiles a kernel imports its packages when it is called.

There is one object file per kernel, named by a hash of the function and its arguments. The files of
one folder have the same versions of all packages in use and the same sources of this package.
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
NAME = "kernel"  # name of the function in every object file


def use_folder(folder: Path) -> None:
    """Load and save the kernels of this process in a subfolder of `folder` from now on."""
    CachedCompile.folder = folder / environment_digest()


def environment_digest() -> str:
    """Return a digest of all that a compiled kernel depends on except its arguments."""
    digest = sha256(f"python {sys.version_info[:2]}".encode())
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{package} {metadata.version(package)}".encode())
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        source = sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package)} {source}".encode())
    return digest.hexdigest()


class Job(NamedTuple):
    """A kernel to be compiled."""

    function: str  # "module:name" of a CachedCompile
    arguments: str  # repr of their tuple
    path: Path | None  # of its object file, if there is a folder


class CachedCompile(Generic[*Kind]):
    """A compile function whose results are cached in memory and, with a folder, on disk.

    Arguments are plain values with distinct results of `repr`.
    """

    folder: ClassVar[Path | None] = None  # None: kernels are cached in memory only

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
    """Return the kernel, or None if the file is damaged."""
    from cutlass import cute  # imported here, because it takes a second

    with suppress(Exception):  # the loader's exception for a damaged file is unspecified
        kernel: Compiled = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[NAME]
        return kernel
    return None


def save(kernel: Any, path: Path) -> None:  # noqa: ANN401
    """Write a kernel to a temporary file and rename it, since other processes may read `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(f".{os.getpid()}")
    kernel.export_to_c(object_file_path=str(begun), function_name=NAME)
    begun.replace(path)
