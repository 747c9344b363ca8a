"""Processes that start with third-party packages imported, since imports take long.

Each is a fork of a process that has imported them, but no module of this project. Started with
`python -m tests.forks PACKAGES`, it reads one task per line in JSON, runs each in a fork, and
writes its exit status.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_S = 1800
TORCH = (  # imported in 7 s
    "httptools", "httpx", "huggingface_hub", "hypothesis.strategies", "jinja2", "msgspec", "numpy",
    "pandas", "pytest", "tokenizers", "torch._dynamo", "transformers",
    "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "triton.language",
    "uvicorn", "uvloop",
)  # fmt: skip


class Forks:
    """A process to fork, which ends with its parent. `environment` applies to it and its forks."""

    def __init__(self, *packages: str, **environment: str) -> None:
        variables = [f"{name}={value}" for name, value in environment.items()]
        command = ["env", *variables, sys.executable, "-m", __name__, *packages]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def run(
        self, function: str, *arguments: str, folder: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run "module:function" with the arguments in a fork. Return its output and exit code.

        `folder` is the working folder and the first one on the module path.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with TemporaryDirectory() as written:
            said, errors = Path(written, "stdout"), Path(written, "stderr")
            task = [function, arguments, environment, *map(str, (folder, said, errors))]
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            status = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
            return subprocess.CompletedProcess(task, status, said.read_text(), errors.read_text())


@functools.cache
def with_torch() -> Forks:
    """Return one process for all tests whose forks import torch with no environment of their own.

    It ends with the process of the tests.
    """
    return Forks(*TORCH)


def do(
    function: str, arguments: list[str], environment: dict[str, str], folder: str, *written: str
) -> None:
    """Run a task and end the process without Python's usual cleanup of imported modules."""
    signal.alarm(MOST_S)
    for number, path in enumerate(written, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv[1:] = arguments
    code: Any = 1
    try:
        module, name = function.split(":")
        code = getattr(import_module(module), name)(*arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0 if code is None or isinstance(code, int) else 1)


def main() -> None:
    for package in sys.argv[1:]:
        import_module(package)
    assert not [name for name in sys.modules if name.startswith("nanovllm")]
    gc.freeze()
    for line in sys.stdin:
        if not (fork := os.fork()):
            do(*json.loads(line))
        _, status = os.waitpid(fork, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
