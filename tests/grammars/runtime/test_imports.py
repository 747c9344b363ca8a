"""xgrammar is imported without torch and transformers where it does not need them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nanovllm.config import DEMO
from nanovllm.grammars.runtime.queue import WARM_TAG

LIBRARIES = "torch", "transformers"
TAG = (
    '{"type":"structural_tag","format":'
    '{"type":"json_schema","json_schema":{"type":"string","maxLength":9}}}'
)


def printed(code: str, folder: Path | None = None) -> list[str]:
    """Run code in a new process, which finds modules in `folder` first. Return its lines."""
    at = "" if folder is None else f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run([sys.executable, "-c", at + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_trial_imports_neither() -> None:
    code = f"""
import sys
from pathlib import Path
from nanovllm.grammars.runtime.compiler import attempt_of
attempt = attempt_of(Path({str(DEMO)!r}), 2048, [0])
print([attempt(tag) for tag in ({WARM_TAG!r}, {TAG!r})])
print([name for name in {LIBRARIES} if name in sys.modules])
"""
    assert printed(code) == ["['', '']", "[]"]


def test_a_library_that_is_imported_is_used(tmp_path: Path) -> None:
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text("number = 7")
    (tmp_path / "tvm_ffi.py").write_text("import torch; found = torch.number")
    (tmp_path / "xgrammar.py").write_text("import torch, transformers; Base = transformers.Base")
    code = f"""
import sys
import torch
from nanovllm.grammars.runtime.imports import import_xgrammar
import_xgrammar(*{LIBRARIES})
import tvm_ffi, xgrammar
print(tvm_ffi.found, xgrammar.torch is torch, xgrammar.Base(1, a=2).__class__.__name__)
print([name for name in {LIBRARIES} if name in sys.modules])
"""
    assert printed(code, tmp_path) == ["7 True Base", "['torch']"]


def test_a_version_that_needs_them_gets_them(tmp_path: Path) -> None:
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text("number = 7")
    (tmp_path / "tvm_ffi.py").write_text("")
    (tmp_path / "xgrammar").mkdir()
    (tmp_path / "xgrammar/__init__.py").write_text("from . import part; found = part.found")
    (tmp_path / "xgrammar/part.py").write_text("import torch; found = torch.number + 1")
    code = f"""
import sys
from nanovllm.grammars.runtime.imports import import_xgrammar
import_xgrammar(*{LIBRARIES})
print(sys.modules["xgrammar"].found, [name for name in {LIBRARIES} if name in sys.modules])
"""
    assert printed(code, tmp_path) == ["8 ['torch']"]
