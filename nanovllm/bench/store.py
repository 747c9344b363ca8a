"""Files of records: `results/<machine>/records.jsonl`, one entry per line.

An entry is a record, or the output of another tool (a profile, a table of variants). Its id is the
first eight hex digits of the SHA-256 of its content, so it is the same in every copy. Lines are
appended and never changed, so `records.jsonl#L12` stays a valid link. Records that cannot be
reproduced (unknown commit, changed tree, failed requests) go to `results/scratch/`, outside git.
"""

from __future__ import annotations

import fcntl
import re
import tempfile
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from nanovllm.bench import record
from nanovllm.bench.record import Kind, Record
from nanovllm.config import NOT_JSON, ConfigError

FILE = "records.jsonl"
SCRATCH = "scratch"
DIGITS = 8  # length of an id
ID = re.compile(rf"[0-9a-f]{{{DIGITS}}}")


class StoredEntry(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One line of a file: `record` as its original bytes, or `text`."""

    id: str
    kind: Kind
    name: str  # <date>_<commit>_<model>_<workload>_<changes>
    record: Raw = Raw()
    text: str = ""

    @property
    def is_record(self) -> bool:
        return bool(bytes(self.record))

    @property
    def content(self) -> bytes:
        """Return the bytes whose digest is the id."""
        return bytes(self.record) or self.text.encode()


class EntryPlace(NamedTuple):
    """Place of an entry: `results/h200-x1/records.jsonl#3f2a9c1b`, which `find` accepts."""

    path: Path
    id: str

    def __str__(self) -> str:
        return f"{self.path}#{self.id}"


def id_of(content: bytes) -> str:
    return sha256(content).hexdigest()[:DIGITS]


def entry_of(result: Record) -> StoredEntry:
    """Return the entry of a record. Its name has the date, commit, model, load and changes."""
    content = msgspec.json.encode(result)
    name = f"{result.started_at[:10]}_{result.commit[:7] or 'unknown'}_{record.name(result)}"
    return StoredEntry(id=id_of(content), kind=result.kind, name=name, record=Raw(content))


def text_entry(text: str, kind: Kind, name: str) -> StoredEntry:
    return StoredEntry(id=id_of(text.encode()), kind=kind, name=name, text=text)


def write(result: Record, results_dir: Path) -> EntryPlace:
    """Append a record to the file of its kind of machine, unless it is already present."""
    entry, path = entry_of(result), folder_of(result, results_dir) / FILE
    append(path, [entry])
    return EntryPlace(path, entry.id)


def check_writable(results_dir: Path) -> None:
    """Make the folder. Raise ConfigError if it cannot be made, or no file can be written there."""
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"--results-dir {results_dir}: no record can be written there ({error.strerror})"
        ) from None


def put(result: Record, where: Path) -> None:
    """Write a record to a file of its own, or append it below `where` if that is a folder."""
    if where.is_dir():
        write(result, where)
    else:
        record.write_to(where, result)


def append(path: Path, entries: list[StoredEntry]) -> list[StoredEntry]:
    """Append the entries that a file lacks, and return them.

    Raise ConfigError if the file cannot be written, or has other content under one of the ids.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # others may append to the file at the same time
            new = lacking(path, entries)
            lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in new)
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):  # removed by an editor
                lines = b"\n" + lines
            file.write(lines)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return new


def lacking(path: Path, entries: list[StoredEntry]) -> list[StoredEntry]:
    """Return the entries that a file lacks. Raise ConfigError like `append`."""
    there = {one.id: one for one in read(path)}
    for entry in entries:
        if entry.id in there and there[entry.id].content != entry.content:
            raise ConfigError(f"{path} has a different record {entry.id}; repeat the measurement")
    return [entry for entry in entries if entry.id not in there]


def read(path: Path) -> list[StoredEntry]:
    """Return the entries in the order of lines. Raise ConfigError with the file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    entries: list[StoredEntry] = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line, type=StoredEntry))
        except NOT_JSON as error:
            raise ConfigError(f"{path}:{len(entries) + 1} is not an entry: {error}") from None
    return entries


def record_of(entry: StoredEntry) -> Record:
    """Return the record of an entry. Raise ConfigError with the id and the field."""
    try:
        return msgspec.json.decode(bytes(entry.record), type=Record)
    except NOT_JSON as error:
        raise ConfigError(f"record {entry.id} is broken: {error}") from None


def records(results_dir: Path) -> list[Record]:
    """Return all records below a folder, those of scratch last."""
    entries = [entry for path in files(results_dir) for entry in read(path)]
    return [record_of(entry) for entry in entries if entry.is_record]


def files(results_dir: Path) -> list[Path]:
    """Return the files of records below a folder, those of scratch last."""
    return [
        *sorted(results_dir.glob(f"*/{FILE}")),
        *sorted(results_dir.glob(f"{SCRATCH}/*/{FILE}")),
    ]


def find(text: str, results_dir: Path) -> Record:
    """Return the record given by an id, FILE.jsonl#ID, or a JSON file with one record.

    Raise ConfigError with the missing file or id.
    """
    path, _, id_or_name = text.rpartition("#")
    if ID.fullmatch(text) and not Path(text).exists():
        path, id_or_name = "", text
    elif not path:
        return record.read(Path(text))
    places = [Path(path)] if path else files(results_dir)
    entries = [one for place in places for one in read(place) if one.id == id_or_name]
    if not entries:
        raise ConfigError(
            f"no record {id_or_name} in {path or results_dir}; give an id or a JSON file"
        )
    if not entries[0].is_record:
        raise ConfigError(f"{id_or_name} is a text without metrics; only records can be compared")
    return record_of(entries[0])


def plot_path(result: Record, results_dir: Path, suffix: str = ".svg") -> Path:
    """Return an unused path for a plot next to the file of its record."""
    folder, stem = folder_of(result, results_dir), entry_of(result).name
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"{stem}_{again}" if again > 1 else stem for again in count(1))
    paths = (folder / f"{name}{suffix}" for name in names)
    return next(path for path in paths if not path.exists())


def folder_of(result: Record, results_dir: Path) -> Path:
    root = results_dir if result.is_publishable else results_dir / SCRATCH
    return root / result.machine.slug
