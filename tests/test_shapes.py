"""Names of tensors end in their shape: one letter of the legend per dimension."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [p for folder in ("nanovllm", "kernels") for p in sorted((ROOT / folder).rglob("*.py"))]
NAMED = re.compile(r"_*[a-z][a-z0-9_]*_([A-Z][A-Z0-9]{0,5}|\d[A-Z][A-Z0-9]{0,4})")
LINE = re.compile(r"\| ([A-Z]) \| (?:`([^`]*)`)? *\| (.+) \|")
PLUS_ONE = {"samples_R1", "starts_E1", "starts_R1", "steps_R1"}
AS_BEFORE = {"to", "float", "long", "int", "bool", "double", "contiguous", "clone", "detach", "cpu",
             "clamp", "exp", "neg", "abs", "transpose", "zero_", "fill_", "masked_fill",
             "pin_memory", "log_softmax", "softmax", "cumsum"}  # fmt: skip
LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like"}
MADE = {"empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full"}
RESHAPED = {"view", "reshape", "permute", "expand"}


def legend(text: str) -> list[tuple[str, list[str], str]]:
    return [(m[1], (m[2] or "").split(), m[3]) for m in map(LINE.fullmatch, text.splitlines()) if m]


LEGEND = legend((ROOT / "nanovllm" / "shapes.md").read_text())


def meanings(letter: str, name: str) -> list[str]:
    """Return the meanings of a letter in a name; the legend must give exactly one."""
    lines = [(names, means) for known, names, means in LEGEND if known == letter]
    listed = [means for names, means in lines if any(fnmatchcase(name, n) for n in names)]
    return listed or [means for names, means in lines if not names]


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield variables, attributes, parameters and keywords, without methods (partition_A)."""
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and id(node) not in called:
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def unclear(tree: ast.AST) -> list[str]:
    found = []
    for name in sorted(set(names_in(tree))):
        shape = NAMED.fullmatch(name)
        for letter in shape[1] if shape else "":
            means = meanings(letter, name)
            if letter.isalpha() and len(means) != 1:
                found.append(f"{name}: {letter} means {means}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_letter_is_in_the_legend_and_every_rank_is_right(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert unclear(tree) == []
    assert wrong_ranks(tree) == []


def rank_of_name(name: str) -> int | None:
    shape = NAMED.fullmatch(name)
    if shape is None:
        return None
    return (
        1
        if name.lstrip("_") in PLUS_ONE
        else len(re.sub(r"(?<=[A-Z])[2-9](?=[A-Z])", "", shape[1]))
    )


def rank(node: ast.expr) -> int | None:
    """Return the number of dimensions of an expression, or None if the code does not show it."""
    if isinstance(node, ast.Name | ast.Attribute):
        return rank_of_name(node.id if isinstance(node, ast.Name) else node.attr)
    if isinstance(node, ast.UnaryOp):
        return rank(node.operand)
    if isinstance(node, ast.Subscript):
        return rank_of_part(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return rank_of_call(node, node.func)
    return None


def rank_of_part(node: ast.Subscript) -> int | None:
    whole = rank(node.value)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if whole is None:
        return None
    for part in parts:
        if isinstance(part, ast.Slice):
            continue
        if not isinstance(part, ast.Constant) or not isinstance(part.value, int | None):
            return None
        whole += 1 if part.value is None else -1
    return whole


def rank_of_call(node: ast.Call, called: ast.Attribute) -> int | None:
    name, args = called.attr, node.args
    if any(isinstance(arg, ast.Starred) for arg in args):
        return None
    if name in AS_BEFORE:
        return rank(called.value)
    if name in LIKE and args:
        return rank(args[0])
    if name == "arange":
        return 1
    if name == "unsqueeze":
        before = rank(called.value)
        return None if before is None else before + 1
    if name in MADE | RESHAPED and args:
        if isinstance(args[0], ast.Tuple):
            starred = any(isinstance(one, ast.Starred) for one in args[0].elts)
            return None if starred else len(args[0].elts)
        from_numpy = getattr(called.value, "id", "") == "np"  # its second argument is a dtype
        if len(args) > 1 and not name.endswith("full") and not from_numpy:
            return len(args)
    return None


def is_on_device(node: ast.AST) -> bool:
    """Return True for kernels, in which a name is a pointer or a tile of its data."""
    used = [d.func if isinstance(d, ast.Call) else d for d in getattr(node, "decorator_list", [])]
    return any(getattr(d, "attr", getattr(d, "id", "")) in {"jit", "kernel"} for d in used)


def wrong_ranks(tree: ast.AST) -> list[str]:
    found, inside = [], [tree]
    while inside:
        node = inside.pop()
        if is_on_device(node):
            continue
        inside += ast.iter_child_nodes(node)
        pairs: list[tuple[ast.expr | str, ast.expr]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
                else:
                    pairs.append((target, node.value))
        elif isinstance(node, ast.Call):
            pairs += [(word.arg, word.value) for word in node.keywords if word.arg]
        for target, value in pairs:
            named = rank_of_name(target) if isinstance(target, str) else rank(target)
            real = rank(value)
            if named is not None and real is not None and named != real:
                said = target if isinstance(target, str) else ast.unparse(target)
                found.append(f"{said} = {ast.unparse(value)}: {named} letters, {real} dimensions")
    return found


def test_legend_is_read() -> None:
    assert len(LEGEND) > 20 and all(means for _, _, means in LEGEND)
    assert meanings("S", "logits_SV") != meanings("S", "k_PSGA")
    assert meanings("D", "x_TD") == meanings("D", "weight_D") != meanings("D", "drafts_RD")
    for letter, names, _ in LEGEND:
        assert all(letter in name for name in names)


def test_what_is_wrong_is_said() -> None:
    assert unclear(ast.parse("logits_SV = x_TD + LOG2_E; x.partition_J(y)")) == []
    assert unclear(ast.parse("def f(logits_SJ): ...")) == ["logits_SJ: J means []"]
    assert unclear(ast.parse("self.x_TJ = 1")) == ["x_TJ: J means []"]


@pytest.mark.parametrize(
    "code",
    [
        "x_TD = torch.empty(num_tokens, 1, 2)", "x_T = new.new_zeros((1, 2))", "x_TD = y_TD[0]",
        "a, x_T = 1, y_TD.to(int)", "f(x_TD=y_T)", "x_TD = y_T[:, None, None]",
        "starts_R1 = torch.zeros(1, 2)", "copies_2X = x_TD.view(1, 2, 3)",
        "x_T2F[0] = y_TD", "a_N = np.zeros((1, 2), int)",
    ],
)  # fmt: skip
def test_a_wrong_rank_is_found(code: str) -> None:
    assert len(wrong_ranks(ast.parse(code))) == 1
    assert wrong_ranks(ast.parse(f"@triton.jit\ndef f():\n    {code}")) == []


@pytest.mark.parametrize(
    "code",
    [
        "x_TD = torch.empty(num_tokens, 2)", "x_TD = torch.zeros(shape)", "x_T = y_TD[0]",
        "starts_R1 = torch.arange(3)", "x_S1 = y_S[:, None]", "f(x_TD=y_TN)",
        "x_TD = torch.full((1, 2), 0)", "x_TD = y.view(*a)", "x_T2F = y_TD.float()",
        "x_TD[0] = y_D", "copies_2X = y_TD", "a_N = np.zeros(1, int)",
    ],
)  # fmt: skip
def test_a_right_rank_is_passed_over(code: str) -> None:
    assert wrong_ranks(ast.parse(code)) == []
