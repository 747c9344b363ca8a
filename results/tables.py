"""The tables of results/README.md, generated from records.

    python -m results.tables            writes the tables anew, and makes links to records right
    python -m results.tables --check    fails if that would change the file

A table's source is the comment above it, with one row a line and `|` between cells. In a cell

    {ID METRIC}            is a metric of a record, with a link to it: {3f2a9c1b tok/s}
    {ID METRIC FORMAT}     formats it in another way: {3f2a9c1b ttft_p50_ms .1f}
    {speedup N}            compares the value before it with that in column N, counted from 0
    {speedup over ID}      compares it with the same metric of another record
    [text](ID)             links to a record or text

METRIC is a name in the record's metrics, an abbreviation of `SHORT`, or KERNEL: CASE: FIELD of the
cases that `check-kernels` writes. The first row is the head of the table.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from nanovllm.bench import store
from nanovllm.bench.record import Record
from nanovllm.config import ConfigError
from results.records import RESULTS, Records

PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- table\n", "<!-- end of table -->"
TABLE = re.compile(rf"{BEGIN}(.*?)-->\n.*?{END}", re.DOTALL)
VALUE = re.compile(r"\{(\w+) ([^{}]+)\}")
SHORT = {
    "tok/s": "output_tokens_per_s",
    "s": "duration_s",
    "ttft": "ttft_p50_ms",
    "tpot": "tpot_p50_ms",
    "itl": "itl_p50_ms",
    "ready": "start_to_ready_s",
}
FORMATS = {"duration_s": ".3f", "start_to_ready_s": ".0f"}  # others: three digits or more
FORMAT = re.compile(r"(.+) (,?\.\d[f%])")


class Value(NamedTuple):
    number: float
    metric: str
    gpu: str  # kind of the machine's GPU


def value_of(result: Record, metric: str) -> float:
    """Return a metric, or a field of a case of check-kernels. Raise ConfigError for neither."""
    name = SHORT.get(metric, metric)
    if name in result.metrics:
        return result.metrics[name]
    case, _, field = name.rpartition(": ")
    for one in result.workload.get("cases", ()):
        if f"{one['kernel']}: {one['case']}" == case and field in one:
            return float(one[field])
    raise ConfigError(
        f"a record of {result.model} has no {name}: {', '.join([*result.metrics][:5])}"
    )


def formatted(value: float, form: str) -> str:
    """Return a number by `form`, or with three significant digits or all before the point."""
    if not form:
        form = ",.0f" if abs(value) >= 99.95 else ".3g" if abs(value) < 1 else ".1f"
        if 1 <= abs(value) < 9.995:
            form = ".2f"
    return format(value, form)


def is_rate(metric: str) -> bool:
    """Return whether more is better. All other metrics that have ratios are times."""
    return bool(re.search(r"_per_s$|tflops$|_per_(?:second|minute)(?:_|$)", metric))


class Row:
    """Cells of a row in Markdown. A cell may use the values of earlier cells."""

    def __init__(self, line: str, records: Records) -> None:
        self.records = records
        self.values: dict[int, Value] = {}  # by column
        self.last: Value | None = None
        texts = [text.strip() for text in line.strip().strip("|").split("|")]
        self.cells = [self._cell(column, text) for column, text in enumerate(texts)]

    def _cell(self, column: int, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            cell_format = FORMAT.fullmatch(match[2])
            first, metric, form = (
                match[1],
                *((cell_format[1], cell_format[2]) if cell_format else (match[2], "")),
            )
            if first == "speedup":
                return format(self._speedup(match[0], metric), form or ".2f")
            name = SHORT.get(metric, metric)
            self.last = self.values[column] = self._value_of(first, name)
            return f"[{formatted(self.last.number, form or FORMATS.get(name, ''))}]({first})"

        return VALUE.sub(value, text)

    def _value_of(self, record_id: str, metric: str) -> Value:
        record = store.record_of(self.records.line(record_id).entry)
        return Value(value_of(record, metric), metric, record.machine.gpu)

    def _speedup(self, cell: str, other: str) -> float:
        """Return how many times faster the last value is than that of a column or record.

        Raise ConfigError if their metrics or their kinds of GPU have no ratio.
        """
        if self.last is None:
            raise ConfigError(f"{cell}: no value stands before it")
        value = self.last
        if other.startswith("over "):
            base = self._value_of(other.removeprefix("over "), value.metric)
        elif other.isdigit() and int(other) in self.values:
            base = self.values[int(other)]
        else:
            raise ConfigError(f"{cell}: no value stands in column {other}")
        if is_rate(base.metric) != is_rate(value.metric):
            raise ConfigError(f"{cell}: {base.metric} and {value.metric} have no ratio")
        if base.gpu != value.gpu:
            raise ConfigError(f"{cell}: {base.gpu or 'no GPU'} and {value.gpu} have no ratio")
        is_more_better = is_rate(value.metric)
        return value.number / base.number if is_more_better else base.number / value.number


def table(source: str, records: Records) -> str:
    """Return a table in Markdown. The first column is aligned left, all others right."""
    head, *rows = [Row(line, records).cells for line in source.strip().splitlines()]
    for row in rows:
        if len(row) != len(head):
            raise ConfigError(f"the row {' | '.join(row)} has {len(row)} cells; {len(head)} in all")
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def generated(text: str, page: Path, records: Records) -> str:
    """Return a page with its tables made from their sources and its links to records made right."""

    def block(match: re.Match[str]) -> str:
        body = records.rewritten(table(match[1], records), page)
        return f"{BEGIN}{match[1]}-->\n\n{body}\n{END}"

    return records.rewritten(TABLE.sub(block, text), page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it is stale")
    parser.add_argument("page", nargs="?", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    text = options.page.read_text()
    new = generated(text, options.page, Records())
    if options.check and new != text:
        raise ConfigError(f"{options.page} is stale; run python -m results.tables")
    if new != text:
        options.page.write_text(new)
    click.echo(f"{options.page}: {len(TABLE.findall(new))} tables")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
