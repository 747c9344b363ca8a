"""Small arithmetic: a question, written steps as the thought, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.demo.corpus import words
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user

FRAMES = [
    "(What is|What's|Calculate|Compute|Work out|Solve|How much is|Tell me|Find) {0}(?|.)",
    "{0}( = ?| =|?|)",
    "(Can|Could) you (calculate|compute|work out|tell me) {0}( for me|)?",
    "(Please |)(add up|calculate|evaluate|compute) {0}.",
    "(What|How much) does {0} (make|equal|give)?",
    "(I need|Give me) (the (result|value|answer) of |){0}.",
]
SPOKEN = {
    "+": [
        "{a} + {b}",
        "{a}+{b}",
        "{a} plus {b}",
        "the sum of {a} and {b}",
        "{a} and {b} together",
    ],
    "-": ["{a} - {b}", "{a}-{b}", "{a} minus {b}"],
    "*": [
        "{a} * {b}",
        "{a}*{b}",
        "{a} times {b}",
        "{a} x {b}",
        "{a} \u00d7 {b}",
        "{a} multiplied by {b}",
        "the product of {a} and {b}",
    ],
    "/": ["{a} / {b}", "{a}/{b}", "{a} divided by {b}", "{a} ÷ {b}", "{a} over {b}"],
}
STORIES = {
    "+": [
        "{name} has {a} {thing}s and (buys|finds|gets) {b} more. How many does {name} have?",
        "There are {a} {thing}s in (a|the) box and {b} on the table. How many {thing}s are there?",
        "I (had|have) {a} {thing}s and (bought|found) {b} more. How many {thing}s do I have?",
    ],
    "-": [
        "{name} has {a} {thing}s and (loses|sells|gives away) {b}. How many {thing}s are left?",
        "There were {a} {thing}s and {b} (broke|are gone|were sold). How many {thing}s are left?",
        "I had {a} {thing}s and (lost|sold|gave away) {b}. How many {thing}s do I have (now|left)?",
    ],
    "*": [
        "{name} has {a} boxes with {b} {thing}s each. How many {thing}s (are there|is that)?",
        "A {thing} costs {a} euros. (What|How much) do {b} {thing}s cost?",
        "There are {a} rows of {b} {thing}s. How many {thing}s are there( in all|)?",
    ],
    "/": [
        "{a} {thing}s are shared by {b} (people|friends|children). How many does each get?",
        "{name} puts {a} {thing}s into {b} boxes, as many in each. How many are in each box?",
    ],
}


@dataclass(frozen=True)
class Sum:
    a: int
    sign: str
    b: int

    def __str__(self) -> str:
        return f"{self.a} {self.sign} {self.b}"

    @property
    def result(self) -> int:
        if self.sign == "+":
            return self.a + self.b
        if self.sign == "-":
            return self.a - self.b
        return self.a * self.b if self.sign == "*" else self.a // self.b


def small_sum(draw: Draw) -> Sum:
    sign = draw.pick("++--**/")

    def make() -> Sum:
        if sign == "*":
            if draw.chance(0.25):
                return Sum(draw.number(11, 25), sign, draw.number(11, 25))
            sides = [draw.number(2, 10 ** draw.number(1, 2)), draw.number(2, 12)]
            return Sum(sides.pop(draw.number(0, 1)), sign, sides.pop())
        if sign == "/":
            b, c = draw.number(2, 12), draw.number(2, 10 ** draw.number(1, 2))
            return Sum(b * c, sign, b)
        a, b = draw.number(1, 10 ** draw.number(1, 3)), draw.number(1, 10 ** draw.number(1, 3))
        if sign == "-" and a < b and draw.chance(0.85):
            a, b = b, a
        return Sum(a, sign, b)

    return draw.from_split(make)


def digits(number: int, width: int) -> list[int]:
    """Return the digits, units first."""
    return [number // 10**i % 10 for i in range(width)]


def add_steps(a: int, b: int) -> str:
    steps, carry = [], 0
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(digits(a, width), digits(b, width), strict=True):
        total = x + y + carry
        terms = f"{x} + {y}" + (" + 1" if carry else "")
        carry = total // 10
        steps.append(f"{terms} = {total}, write {total % 10}" + (" carry 1" if carry else ""))
    return "; ".join(steps) + (", write 1" if carry else "")


def subtract_steps(a: int, b: int) -> str:
    """Return the steps of a - b, for a >= b."""
    steps, borrow = [], 0
    width = len(str(a))
    for x, y in zip(digits(a, width), digits(b, width), strict=True):
        terms = f"{x} - {y}" + (" - 1" if borrow else "")
        rest = x - y - borrow
        borrow = int(rest < 0)
        step = (
            f"{10 + x} - {terms.partition(' - ')[2]} = {10 + rest}"
            if borrow
            else f"{terms} = {rest}"
        )
        steps.append(f"{step}, write {rest % 10}" + (" borrow 1" if borrow else ""))
    return "; ".join(steps)


def multiply_steps(a: int, b: int) -> str:
    """Return the steps of a * b, with one factor split into tens and units."""
    if b > a:
        a, b = b, a
    if a <= 10 or b == 1:
        return f"{a} * {b} = {a * b}"
    if b > 12:
        tens, units = b // 10 * 10, b % 10
        parts = [(a, tens), (a, units)] if units else [(a, tens)]
    else:
        tens, units = a // 10 * 10, a % 10
        parts = [(tens, b), (units, b)] if units else [(tens, b)]
    steps = [f"{x} * {y} = {x * y}" for x, y in parts]
    if len(parts) == 2:
        left, right = (x * y for x, y in parts)
        steps.append(f"{left} + {right} = {left + right}")
    return "; ".join(steps)


def divide_steps(a: int, b: int) -> str:
    """Return the steps of a / b by long division. The last step ends with the remainder."""
    steps: list[str] = []
    rest = 0
    for digit in str(a):
        part = 10 * rest + int(digit)
        rest = part % b
        if part >= b or steps:
            steps.append(f"{part} - {b} * {part // b} = {rest}")
    return "; ".join(steps)


def steps(problem: Sum) -> str:
    a, b = problem.a, problem.b
    if problem.sign == "+":
        return add_steps(a, b)
    if problem.sign == "*":
        return multiply_steps(a, b)
    if problem.sign == "/":
        return divide_steps(a, b)
    if a < b:
        return f"{b} is larger, so turn it round: {subtract_steps(b, a)}; so -{b - a}"
    return subtract_steps(a, b)


def arithmetic(draw: Draw) -> Sample:
    if draw.chance(0.1):
        return chain(draw)
    problem = small_sum(draw)
    thought = f"{problem}: {steps(problem)}. So {problem.result}."
    if draw.chance(0.25) and problem.result > 0:
        text = draw.expand(draw.pick(STORIES[problem.sign]))
        text = text.replace("{name}", words.first_name(draw))
        text = text.replace("{thing}", draw.value(words.THINGS))
    else:
        text = draw.expand(draw.pick(FRAMES)).replace("{0}", draw.pick(SPOKEN[problem.sign]))
        if draw.chance(0.1):
            text = text.lower()
    text = text.replace("{a}", str(problem.a)).replace("{b}", str(problem.b))
    text = text[0].upper() + text[1:] if draw.chance(0.8) else text
    answer = f"{problem} = {problem.result}."
    return Sample("sum", [user(text)], answer, thought=thought, thinks=True)


def chain(draw: Draw) -> Sample:
    """Return a sum of three small numbers, evaluated from left to right."""

    def make() -> tuple[int, str, int, str, int]:
        a, b, c = (draw.number(2, 30) for _ in range(3))
        first, second = draw.pick("+-"), draw.pick("+-")
        return max(a, b), first, min(a, b), second, c

    a, first, b, second, c = draw.from_split(make)
    left = Sum(a, first, b)
    right = Sum(left.result, second, c)
    expression = f"{left} {second} {c}"
    text = draw.expand(draw.pick(FRAMES)).replace("{0}", expression)
    thought = f"{expression}: {left} = {left.result}; {right} = {right.result}. So {right.result}."
    answer = f"{expression} = {right.result}."
    return Sample("sum", [user(text)], answer, thought=thought, thinks=True)


def counting(draw: Draw) -> Sample:
    """Return a request to count from one number to another. It is no sum, so `thinks` is False."""
    low = draw.pick([1, 1, 1, draw.number(0, 50)])
    high = low + draw.number(2, 14)
    numbers = [str(number) for number in range(low, high + 1)]
    expand: Callable[[str], str] = draw.expand
    text = expand("(Count|Please count|Can you count|Count up) from {a} to {b}(.||?)")
    if draw.chance(0.2):
        text = expand("(Count|Please count) (down|backwards) from {b} to {a}(.|)")
        numbers.reverse()
    text = text.replace("{a}", str(low)).replace("{b}", str(high))
    return Sample("chat", [user(text)], ", ".join(numbers), thought="I count one by one.")
