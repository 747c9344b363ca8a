"""The name and the limits of a process, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

SETS = """
import resource
from nanovllm.own_process import num_pages, set_limit, set_name

set_name("nanovllm-a-long-name")
print(open("/proc/self/comm").read().strip())
files = resource.RLIMIT_NOFILE
resource.setrlimit(files, (64, 128))
for value in (100, 200, resource.RLIM_INFINITY, 32):
    set_limit(files, value)
    print(resource.getrlimit(files))
core = resource.RLIMIT_CORE
set_limit(core, 0)
print(resource.getrlimit(core)[0], num_pages(0) > num_pages(1) > 0)
"""


def test_a_limit_is_soft_and_within_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", SETS], capture_output=True, text=True)
    assert done.stderr == ""
    name, *limits, last = done.stdout.splitlines()
    assert name == "nanovllm-a-long"
    assert limits == ["(100, 128)", "(128, 128)", "(128, 128)", "(32, 128)"]
    assert last == "0 True"
