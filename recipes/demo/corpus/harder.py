"""Sums that take more care: below zero, remainders, percentages, tenths, round numbers, primes."""

from __future__ import annotations

from recipes.demo.corpus import sums
from recipes.demo.corpus.draw import Draw
from recipes.demo.corpus.sample import Sample, user
from recipes.demo.corpus.sums import Sum

PERCENTS = [5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100]
PERCENT_FRAMES = [
    "(What is|What's|what's|what is|Calculate|How much is|Compute|) {p}(%| %| percent) of {n}(?|)",
]
IS_IT = "(Is|is) (the number |){n} "
TENTHS = {"+": ["{a} + {b}", "{a}+{b}", "{a} plus {b}"], "-": ["{a} - {b}", "{a}-{b}"]}
HIGHEST_PRIME = 100


def framed(draw: Draw, expression: str) -> str:
    text = draw.expand(draw.pick(sums.FRAMES)).replace("{0}", expression)
    return text[0].upper() + text[1:] if draw.chance(0.5) else text.lower()


def spoken(draw: Draw, sign: str, a: str, b: str) -> str:
    text = draw.pick(sums.SPOKEN[sign])
    return text.replace("{a}", a).replace("{b}", b)


def finished(text: str, thought: str, answer: str) -> Sample:
    return Sample("harder", [user(text)], answer, thought=thought, thinks=True)


def below_zero(draw: Draw) -> Sample:
    def make() -> Sum:
        b = draw.number(2, 10 ** draw.number(1, 3))
        a = draw.number(max(0, b - 9), b - 1) if draw.chance(0.35) else draw.number(0, b - 1)
        return Sum(a, "-", b)

    return of_sum(draw, draw.from_split(make))


def of_sum(draw: Draw, problem: Sum) -> Sample:
    text = framed(draw, spoken(draw, problem.sign, str(problem.a), str(problem.b)))
    thought = f"{problem}: {sums.steps(problem)}. So {problem.result}."
    return finished(text, thought, f"{problem} = {problem.result}.")


def longer(draw: Draw) -> Sample:
    """Return a sum or difference of four-digit numbers."""

    def make() -> Sum:
        a, b = draw.number(1000, 9999), draw.number(10, 10 ** draw.number(2, 4) - 1)
        return Sum(max(a, b), draw.pick("+-"), min(a, b))

    return of_sum(draw, draw.from_split(make))


def three_digits(draw: Draw) -> Sample:
    """Return a product of a three-digit and a one-digit number."""
    problem = draw.from_split(lambda: Sum(draw.number(101, 999), "*", draw.number(2, 9)))
    parts = [digit * 10**i for i, digit in enumerate(sums.digits(problem.a, 3))]
    products = [part * problem.b for part in reversed(parts) if part]
    steps = [f"{part} * {problem.b} = {part * problem.b}" for part in reversed(parts) if part]
    total = products[0]
    for product in products[1:]:
        steps.append(f"{total} + {product} = {total + product}")
        total += product
    sides = [problem.a, problem.b] if draw.chance(0.8) else [problem.b, problem.a]
    text = framed(draw, spoken(draw, "*", str(sides[0]), str(sides[1])))
    expression = f"{sides[0]} * {sides[1]}"
    thought = f"{expression}: {'; '.join(steps)}. So {total}."
    return finished(text, thought, f"{expression} = {total}.")


def remainder(draw: Draw) -> Sample:
    def make() -> Sum:
        if draw.chance(0.2):
            b = draw.pick([13, 15, 16, 18, 20, 24, 25, 30, 50, 100])
            return Sum(b * draw.number(1, 9) + draw.pick([0, draw.number(0, b - 1)]), "/", b)
        a = draw.pick([100, 50, 1000, *[draw.number(2, 10 ** draw.number(1, 3))] * 12])
        return Sum(a, "/", draw.number(2, 12))

    problem = draw.from_split(make)
    text = framed(draw, spoken(draw, "/", str(problem.a), str(problem.b)))
    quotient, rest = divmod(problem.a, problem.b)
    answer = f"{problem} = {quotient}"
    if rest:
        answer += f", remainder {rest}"
    steps = sums.divide_steps(problem.a, problem.b)
    if problem.a < problem.b:
        steps = f"{problem.b} is larger"
    thought = f"{problem}: {steps}. So {quotient}" + (f", remainder {rest}." if rest else ".")
    return finished(text, thought, answer + ".")


def percent(draw: Draw) -> Sample:
    """Return a multiple of five percent of a round number."""

    def make() -> tuple[int, int]:
        n = draw.pick([100 * draw.number(1, 10), 10 * draw.number(1, 12), 10 * draw.number(1, 50)])
        return draw.pick(PERCENTS), n

    p, n = draw.from_split(make)
    frame = draw.expand(draw.pick(PERCENT_FRAMES))
    text = frame.replace("{p}", str(p)).replace("{n}", str(n))
    unit = 100 if n % 100 == 0 else 10
    part = n // unit
    product = p * part
    result = str(product)
    steps = f"{n} / {unit} = {part}; {sums.multiply_steps(p, part)}"
    if unit == 10:
        whole, tenth = divmod(product, 10)
        result = f"{whole}.{tenth}" if tenth else str(whole)
        steps += f"; {product} / 10 = {result}"
    thought = f"{p} % of {n}: {steps}. So {result}."
    return finished(text, thought, f"{p} % of {n} = {result}.")


def tenths(draw: Draw) -> Sample:
    """Return a sum or difference of numbers below ten with one decimal place."""

    def make() -> tuple[str, int, int]:
        a, b = draw.number(1, 99), draw.number(1, 99)
        return draw.pick("+-"), max(a, b), min(a, b)

    def decimal(number: int) -> str:
        return f"{number // 10}.{number % 10}"

    sign, a, b = draw.from_split(make)
    if sign == "+" and draw.chance(0.5):
        a, b = b, a
    left, right = decimal(a), decimal(b)
    question = draw.pick(TENTHS[sign]).replace("{a}", left).replace("{b}", right)
    problem = Sum(a, sign, b)
    result = decimal(problem.result)
    thought = f"{left} {sign} {right}, in tenths {problem}: {sums.steps(problem)}. "
    thought += f"That is {problem.result} tenths. So {result}."
    return finished(framed(draw, question), thought, f"{left} {sign} {right} = {result}.")


def zeros(draw: Draw) -> Sample:
    """Return a product of round numbers."""

    def make() -> Sum:
        sides = [draw.number(1, 12) * 10 ** draw.number(0, 3) for _ in range(2)]
        if draw.chance(0.3):
            sides = [10 ** draw.number(1, 3) for _ in range(2)]
        return Sum(sides[0], "*", sides[1])

    problem = draw.from_split(make)
    a, b = (str(side).rstrip("0") for side in (problem.a, problem.b))
    count = len(f"{problem.a}{problem.b}") - len(a + b)
    text = framed(draw, spoken(draw, "*", str(problem.a), str(problem.b)))
    places = "".join(" 0" for _ in range(count))
    thought = f"{problem}: {a} * {b} = {int(a) * int(b)}"
    thought += f"; {count} zeros{places}" if count else ""
    return finished(text, f"{thought}. So {problem.result}.", f"{problem} = {problem.result}.")


def divisor(number: int) -> int:
    """Return the smallest divisor above one."""
    return next(d for d in range(2, number + 1) if number % d == 0)


def prime(draw: Draw) -> Sample:
    n = draw.number(2, HIGHEST_PRIME)
    text = draw.expand(IS_IT + "(prime|a prime number|a prime)(?|)").replace("{n}", str(n))
    d = divisor(n)
    if d == n:
        thought = f"No smaller number divides {n}."
        return finished(text, thought, f"Yes, {n} is a prime number.")
    product = f"{d} * {n // d} = {n}"
    return finished(text, f"{product}.", f"No, {n} is not a prime number: {product}.")


def parity(draw: Draw) -> Sample:
    n, word = draw.from_split(lambda: (draw.number(0, 10 ** draw.number(1, 4)), draw.pick(WORDS)))
    text = draw.expand(IS_IT + "(an |){w}( number|)(?|)")
    text = text.replace("{n}", str(n)).replace("{w}", word)
    true = WORDS[n % 2]
    reply = "Yes" if word == true else "No"
    return finished(text, f"The last digit is {n % 10}.", f"{reply}, {n} is {true}.")


WORDS = ["even", "odd"]
SHARES = {
    below_zero: 6,
    longer: 3,
    three_digits: 3,
    remainder: 7,
    percent: 4,
    tenths: 3,
    zeros: 3,
    prime: 2,
}
CHOICES = [make for make, share in (SHARES | {parity: 1}).items() for _ in range(share)]


def harder(draw: Draw) -> Sample:
    return draw.pick(CHOICES)(draw)
