"""Wrapper of nanovllm that records the modules imported while its processes serve.

    python -m tests.end_to_end.late_imports FOLDER serve RECIPE ...

When a process ends, it writes a list of names to `engine.json` or `api.json` in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASKED = "NANOVLLM_LATE_IMPORTS"  # spawned processes import this file too


@contextmanager
def noting(name: str) -> Iterator[None]:
    before = set(sys.modules)
    yield
    found = sorted(set(sys.modules) - before)
    (Path(os.environ[ASKED]) / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__mp_main__" and ASKED in os.environ:
    from nanovllm.engine.process import Engine
    from nanovllm.server.main import DrainingServer

    plain_run, plain_loop = Engine.run, DrainingServer.main_loop

    def run(engine: Engine) -> None:
        with noting("engine"):
            plain_run(engine)

    async def main_loop(server: DrainingServer) -> None:
        with noting("api"):
            await plain_loop(server)

    Engine.run = run  # type: ignore[method-assign]
    DrainingServer.main_loop = main_loop  # type: ignore[method-assign]

if __name__ == "__main__":
    from nanovllm.cli import main

    os.environ[ASKED] = sys.argv[1]
    sys.argv = ["nanovllm", *sys.argv[2:]]
    main()
