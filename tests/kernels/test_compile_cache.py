"""The disk cache of compiled CuTe DSL kernels: its keys, its files and its cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nanovllm_kernels import COMPILED, compile_cache

from nanovllm.registry import resolve
from nanovllm.runner.precompile import HOPPER

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from flash-attn-4's imports
COMPILE = """
import sys
from pathlib import Path
from nanovllm_kernels.attention.flash_prefill import compile_causal
from nanovllm_kernels.products.gated_linear import compile_gated
from nanovllm_kernels.compile_cache import use_folder
from nanovllm_kernels.attention.paged_decode_cute import compile_decode
from nanovllm_kernels.products.skinny_linear import compile_product

def compile_all(folder):
    use_folder(Path(folder))
    compile_gated("bfloat16", True)
    compile_decode(2, 64, 16, 0)
    compile_product(64, 2, 2, 1, False, False, False)
    compile_causal(2, 128, 128, "bfloat16")

compile_all(sys.argv[1])
print({"torch._dynamo", "torch._inductor", "quack", "flash_attn"} & {*sys.modules})
"""


def run(code: str, folder: Path) -> str:
    """Run the code in a new process, as the architecture is read when the package is imported."""
    command = [*HOPPER, sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_second_start_compiles_nothing_and_imports_no_compiler(tmp_path: Path) -> None:
    assert "torch._dynamo" in run(COMPILE, tmp_path)
    written = files(tmp_path)
    assert len(written) == 4 and {path.suffix for path in written} == {".o"}
    assert len({path.parent for path in written}) == 1
    assert run(COMPILE, tmp_path) == "set()\n"
    assert files(tmp_path) == written


class Kernel:
    """A mock of a compiled kernel, exported as a file with its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_text(f"{function_name} {self.name}")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(compile_cache.CachedCompile, "folder", None)
    monkeypatch.setattr(compile_cache, "load", lambda path: read_whole(path))
    return []


def read_whole(path: Path) -> str | None:
    text = path.read_text()
    return text if text.startswith(compile_cache.NAME) else None


def compiler(compiled: list[str]) -> compile_cache.CachedCompile:
    @compile_cache.CachedCompile
    def compiles(size: int, name: str = "a") -> Kernel:
        compiled.append(f"{size} {name}")
        return Kernel(f"{size} {name}")

    return compiles


def test_equal_arguments_compile_once(compiled: list[str], tmp_path: Path) -> None:
    compiles = compiler(compiled)
    for _ in range(2):
        assert [compiles(n, name).name for n in (1, 2) for name in "ab"] == [*compiled]
    assert compiled == ["1 a", "1 b", "2 a", "2 b"]
    assert files(tmp_path) == {}  # no folder was set


def test_another_process_finds_them(compiled: list[str], tmp_path: Path) -> None:
    compile_cache.use_folder(tmp_path)
    compiler(compiled)(7, "b")
    assert compiler(compiled)(7, "b") == "kernel 7 b"
    assert compiled == ["7 b"]
    compiler(compiled)(7, "c")
    assert compiled == ["7 b", "7 c"]


def test_a_damaged_file_is_written_anew(compiled: list[str], tmp_path: Path) -> None:
    compile_cache.use_folder(tmp_path)
    compiler(compiled)(7)
    (path,) = files(tmp_path)
    path.write_text("half a ker")
    assert compiler(compiled)(7).name == "7 a"
    assert compiler(compiled)(7) == "kernel 7 a"
    assert [*files(tmp_path)] == [path] and compiled == ["7 a", "7 a"]


@pytest.mark.parametrize("package", compile_cache.PACKAGES)
def test_versions_belong_to_the_key(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, before = compile_cache.metadata.version, compile_cache.environment_digest()
    assert compile_cache.environment_digest() == before
    monkeypatch.setattr(
        compile_cache.metadata, "version", lambda p: version(p) + ".1" * (p == package)
    )
    assert compile_cache.environment_digest() != before


@pytest.mark.parametrize("name", COMPILED)
def test_sources_of_what_compiles_a_kernel_belong_to_its_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles: Callable[..., object] = resolve({name: COMPILED[name][0]}, name).compiles
    source, before = Path(compiles.__code__.co_filename), compile_cache.environment_digest()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b" " * (p == source))
    assert compile_cache.environment_digest() != before
