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
from functools import wraps
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import ParamSpec

Args = ParamSpec("Args")
Compiled = Callable[..., None]
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "quack-kernels")
NAME = "kernel"  # in every object file


class Disk:
    folder: Path | None = None  # None: kernels are kept in memory only


DISK = Disk()


def keep_in(folder: Path) -> None:
    """Every kernel, from now on."""
    DISK.folder = folder / made_of()


def made_of() -> str:
    """A name for everything that kernels are compiled from and by, beside their arguments."""
    digest = sha256(f"python {sys.version_info[:2]}".encode())
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{package} {metadata.version(package)}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def kept(compile_kernel: Callable[Args, Compiled]) -> Callable[Args, Compiled]:
    """The same, in memory and on disk. Its arguments are plain values, which `repr` tells apart."""
    known: dict[str, Compiled] = {}

    @wraps(compile_kernel)
    def get(*args: Args.args, **kwargs: Args.kwargs) -> Compiled:
        key = f"{compile_kernel.__module__}.{compile_kernel.__qualname__} {args} {kwargs}"
        if key not in known:
            known[key] = load(key) or save(key, compile_kernel(*args, **kwargs))
        return known[key]

    return get


def path_of(key: str) -> Path | None:
    return DISK.folder and DISK.folder / f"{sha256(key.encode()).hexdigest()}.o"


def load(key: str) -> Compiled | None:
    """A file that cannot be loaded is none."""
    from cutlass import cute

    path = path_of(key)
    if path is None or not path.exists():
        return None
    with suppress(Exception):  # whatever a damaged file makes of the loader
        loaded: Compiled = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[NAME]
        return loaded
    return None


def save(key: str, compiled: Compiled) -> Compiled:
    """Under its name only when it is whole: others may look for it at the same time."""
    if (path := path_of(key)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}")
        compiled.export_to_c(object_file_path=str(begun), function_name=NAME)  # type: ignore[attr-defined]
        begun.replace(path)
    return compiled
