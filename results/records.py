"""The records in results/: list them, show one, add some, and keep links to them right.

    python -m results.records list [WORD ...]      entries whose row has every word
    python -m results.records show ID              one record as indented JSON, or one text
    python -m results.records add FILE ...         append records or texts that were made elsewhere
    python -m results.records links FILE.md ...    make every link to a record or former file right

`add` takes records.jsonl files, JSON files of one record, and with --machine and --kind text files
that are named <date>_<commit>_<rest>.txt. `links` rewrites links of three forms. One is a bare id,
as in `[445](3f2a9c1b)`. The others are a link to a line, whose title is the id, and the path of a
former file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import click
import msgspec

from nanovllm.bench import record, store
from nanovllm.bench.record import Kind
from nanovllm.bench.store import StoredEntry
from nanovllm.config import ConfigError

RESULTS = Path(__file__).parent
COMMENT = re.compile(r"(<!--.*?-->)", re.DOTALL)
LINK = re.compile(r'\]\(([^()\s]+)(?: "([^"]*)")?\)')
ONLINE = re.compile(r"https?://.+?/(?:blob|raw)/[^/]+/")  # a page of the repository on the web
TEXT_NAME = re.compile(r"\d{4}-\d\d-\d\d_[0-9a-f]{7}_.+")


class Line(NamedTuple):
    """An entry and where it is, in a file relative to the folder of results."""

    path: Path
    number: int
    entry: StoredEntry

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def former(self) -> str:
        """Return the path of the file that contained the entry until November 2026."""
        suffix = ".json" if self.entry.is_record else ".txt"
        return f"{self.machine}/{self.entry.kind}/{self.entry.name}{suffix}"


class Records:
    """Index of all entries below a folder of results, by id and by former path, without scratch."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder.resolve()
        self.lines = [
            Line(path.relative_to(self.folder), number, entry)
            for path in sorted(self.folder.glob(f"*/{store.FILE}"))
            for number, entry in enumerate(store.read(path), start=1)
        ]
        self.by_id = {line.entry.id: line for line in self.lines}
        self.by_former = {line.former: line for line in reversed(self.lines)}

    def line(self, record_id: str) -> Line:
        if record_id not in self.by_id:
            raise ConfigError(f"no record {record_id}; python -m results.records list shows all")
        return self.by_id[record_id]

    def link(self, record_id: str, start: Path) -> str:
        """Return the target of a link from a file in the folder `start`, with the id as title."""
        line = self.line(record_id)
        path = os.path.relpath(self.folder / line.path, start)
        return f'{Path(path).as_posix()}#L{line.number} "{record_id}"'

    def rewritten(self, text: str, page: Path) -> str:
        """Return the text of a Markdown page with its links to records made right.

        Raise ConfigError for the id of no record. Other links and comments stay as they are.
        """

        def right(match: re.Match[str]) -> str:
            target, title = match[1], match[2] or ""
            web = ONLINE.match(target)
            root = self.folder.parent if web else page.resolve().parent
            path, _, fragment = target[web.end() if web else 0 :].partition("#")
            if store.ID.fullmatch(path):
                new = self.link(path, root)
            elif path.endswith(store.FILE) and (fragment or title):
                new = self.link(title, root)
            else:
                new = self._renamed(Path(os.path.normpath(root / path)), root)
            if not new:
                return match[0]
            return f"]({web[0] if web else ''}{new})"

        parts = COMMENT.split(text)
        return "".join(LINK.sub(right, one) if at % 2 == 0 else one for at, one in enumerate(parts))

    def _renamed(self, path: Path, start: Path) -> str:
        """Return the new target of a link to a former file or folder, or an empty string."""
        if not path.is_relative_to(self.folder) or path.exists():
            return ""
        former = path.relative_to(self.folder)
        if former.as_posix() in self.by_former:
            return self.link(self.by_former[former.as_posix()].entry.id, start)
        machine = self.folder / former.parts[0]
        moved = machine / (former.name if former.suffix == ".svg" else store.FILE)
        is_known = len(former.parts) == 2 or former.suffix == ".svg"
        return os.path.relpath(moved, start) if is_known and moved.exists() else ""


def listed(lines: Sequence[Line], words: Sequence[str]) -> list[str]:
    """Return a row for every entry that has all words, with its rate where it has one."""
    rows = []
    for line in lines:
        entry = line.entry
        text = f"{entry.id}  {line.machine:8} {entry.kind:8} {entry.name}"
        if all(word in text for word in words):
            metrics = store.record_of(entry).metrics if entry.is_record else {}
            rate = metrics.get("output_tokens_per_s")
            rows.append(text if rate is None else f"{text}  {rate:,.1f} tok/s")
    return rows


def shown(entry: StoredEntry) -> str:
    if not entry.is_record:
        return entry.text
    return msgspec.json.format(bytes(entry.record), indent=2).decode() + "\n"


def added(path: Path, folder: Path, machine: str, kind: Kind) -> list[str]:
    """Append the records or the text of a file. Return a row for each one that was new."""
    if path.suffix == ".jsonl":
        entries = store.read(path)
    elif path.suffix == ".json":
        entries = [store.entry_of(record.read(path))]
    elif machine and kind and TEXT_NAME.fullmatch(path.stem):
        entries = [store.text_entry(path.read_text(), kind, path.stem)]
    else:
        raise ConfigError(f"{path}: a text needs --machine, --kind and a name <date>_<commit>_...")
    rows = []
    for entry in entries:
        place = machine
        if entry.is_record:
            entry_record = store.record_of(entry)
            place = store.folder_of(entry_record, Path()).as_posix()
        elif not place:
            place = path.parent.name
        new = store.append(folder / place / store.FILE, [entry])
        rows += [f"{one.id}  {place}  {one.name}" for one in new]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.records", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("list", "show", "add", "links"))
    parser.add_argument("names", nargs="*", help="words, ids or files")
    parser.add_argument("--machine", default="", help="of a text, as in h200-x1")
    parser.add_argument("--kind", default="", choices=("", *get_args(Kind)), help="of a text")
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args(arguments)
    records = Records(options.results_dir)
    if options.action == "list":
        click.echo("\n".join(listed(records.lines, options.names)))
    elif options.action == "show":
        click.echo("".join(shown(records.line(name).entry) for name in options.names), nl=False)
    elif options.action == "add":
        for name in options.names:
            rows = added(Path(name), records.folder, options.machine, options.kind)
            click.echo("\n".join(rows or [f"{name}: nothing new"]))
    else:
        for name in options.names:
            page = Path(name)
            page.write_text(records.rewritten(page.read_text(), page))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
