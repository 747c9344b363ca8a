"""Wrapper of nanovllm that changes constants of its modules in the supervisor.

python -m tests.end_to_end.with_constants '{"nanovllm.launch.LAST_WORDS_S": 1}' serve RECIPE ...
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

if __name__ == "__main__":
    from nanovllm.cli import main

    for name, value in json.loads(sys.argv[1]).items():
        module_name, _, constant = name.rpartition(".")
        module = import_module(module_name)
        assert type(getattr(module, constant)) is type(value), name
        setattr(module, constant, value)
    sys.argv = ["nanovllm", *sys.argv[2:]]
    main()
