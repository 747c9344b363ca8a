"""Command that compiles one kernel to disk.

Usage: python -m nanovllm_kernels.compile_one FOLDER FUNCTION ARGUMENTS. FUNCTION and ARGUMENTS are
those of a compile_cache.Job.
"""

from __future__ import annotations

import sys
from ast import literal_eval
from importlib import import_module
from pathlib import Path

from nanovllm_kernels.compile_cache import use_folder


def main(folder: str, function: str, arguments: str) -> None:
    use_folder(Path(folder))
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*literal_eval(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
