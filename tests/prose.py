"""Measure of the English in comments, docstrings and documents.

`python -m tests.prose nanovllm/kv README.md` prints the rates of these folders or files, and each
place that uses a word of a limited group or breaks a rule. `-q` prints the rates only.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 25  # of a sentence
# Per 1,000 words. A group is a word that makes a sentence vague or makes a person of a thing.
LIMITS = {
    "what": 3.0,
    "tell": 2.5,
    "many": 0.3,
    "behind": 0.6,
    "who": 0.3,
}
GROUPS = {
    "what": r"what|whatever",
    "tell": r"(?:tell|say|ask|hear|know)s?|telling|saying|asking|asked|hearing|knowing"
    r"|told|said|heard|knew|known",
    "many": r"so many|as many|so much|as much",
    "behind": r"behind|beside",
    "who": r"who|whom|whoever|nobody|somebody|everybody|anybody",
}
PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in GROUPS.items()}
VAGUE_START = re.compile(r"(What|Which|Whom?|Whose|How|Whether|Of|As(?! soon)|So many|To whom)\b")
CODE = re.compile(r"`[^`]*`|\"[^\"\n]*\"|https?://\S+")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`(\"\[])|\n\s*\n|\n\s*[-*|#]")


@dataclass(frozen=True)
class Piece:
    """A docstring, a block of comments, or a paragraph of a document."""

    place: str
    kind: str
    text: str


def pieces_of(path: Path) -> list[Piece]:
    """Return the pieces of a Python, YAML, shell, JavaScript or Markdown file."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    if path.suffix == ".py":
        return [*docstrings(name, text), *comments(name, text)]
    if path.suffix == ".md":
        return [*paragraphs(name, text)]
    marks = r"//|/?\*+/?" if path.suffix in {".js", ".css"} else "#"
    found = re.finditer(rf"(?:^|\s)(?:{marks})\s(.*)$", text, re.MULTILINE)
    return [Piece(f"{name}:{line_of(text, one.start(1))}", "comment", one[1]) for one in found]


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def docstrings(name: str, text: str) -> Iterator[Piece]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Piece(f"{name}:{node.body[0].lineno}", "docstring", docstring)


def comments(name: str, text: str) -> Iterator[Piece]:
    """Comments on adjacent lines of their own are one piece."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or "fmt:" in token.string or "noqa" in token.string:
            continue
        line = token.start[0]
        stands_alone = not token.line[: token.start[1]].strip()
        if block and not (stands_alone and line == last + 1):
            yield Piece(f"{name}:{first}", "comment", "\n".join(block))
            block = []
        first = first if block else line
        last = line if stands_alone else -1
        block.append(token.string.lstrip("#: "))
    if block:
        yield Piece(f"{name}:{first}", "comment", "\n".join(block))


def paragraphs(name: str, text: str) -> Iterator[Piece]:
    """Code blocks are not prose."""
    prose = re.sub(r"```.*?```", blanked, text, flags=re.DOTALL)
    prose = re.sub(r"^(    |\t).*$", "", prose, flags=re.MULTILINE)
    at = 0
    for paragraph in re.split(r"(\n\s*\n)", prose):
        if paragraph.strip():
            shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
            yield Piece(f"{name}:{line_of(prose, at)}", "paragraph", shown)
        at += len(paragraph)


def blanked(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'-]*|\d[\d.,]*", text)


def sentences_of(text: str) -> list[str]:
    return [one for one in SENTENCE_END.split(text) if one and one.strip()]


def faults_of(piece: Piece) -> Iterator[str]:
    """Yield a line for each rule that a piece breaks. Indented blocks are code or drawings."""
    plain = CODE.sub("`x`", re.sub(r"^    .*$", "", piece.text, flags=re.MULTILINE))
    for name, pattern in PATTERNS.items():
        for found in pattern.findall(plain):
            yield f"{name}: {found}"
    for sentence in sentences_of(plain):
        length = len(words_of(sentence))
        if length > MAX_WORDS and not (piece.kind == "paragraph" and "|" in sentence):
            yield f"long: {length} words: {sentence[:60].strip()}..."
        if VAGUE_START.match(sentence.strip()):
            yield f"start: {sentence[:60].strip()}"


def rates_of(pieces: Iterable[Piece]) -> dict[str, float]:
    """Return the uses of each group per 1,000 words, and of rules per 1,000 sentences."""
    counts: Counter[str] = Counter()
    num_words = num_sentences = 0
    for piece in pieces:
        num_words += len(words_of(piece.text))
        num_sentences += len(sentences_of(piece.text))
        counts.update(fault.partition(":")[0] for fault in faults_of(piece))
    rates = {name: 1000 * counts[name] / max(num_words, 1) for name in GROUPS}
    rules = {name: 1000 * counts[name] / max(num_sentences, 1) for name in ("long", "start")}
    return {"words": num_words, **rates, **rules}


def files_of(*names: str) -> list[Path]:
    """Return the files with prose below these folders, or these files."""
    suffixes = {".py", ".md", ".yaml", ".sh", ".js", ".css"}
    found = []
    for name in names:
        path = ROOT / name
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [
            one for one in inside if one.suffix in suffixes and "__pycache__" not in one.parts
        ]
    return [path for path in found if "log" not in path.relative_to(ROOT).parts[:-1]]


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "-q"]
    pieces = [piece for path in files_of(*names) for piece in pieces_of(path)]
    if "-q" not in sys.argv:
        lines = [f"{piece.place}: {fault}\n" for piece in pieces for fault in faults_of(piece)]
        sys.stdout.writelines(lines)
    sys.stdout.write(f"{ {name: round(rate, 2) for name, rate in rates_of(pieces).items()} }\n")


if __name__ == "__main__":
    main()
