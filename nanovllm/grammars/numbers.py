"""Automata and texts of numbers within bounds, of multiples, and without excluded values.

A number with any constraint is written without an exponent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from nanovllm.grammars.automata import Dfa, PatternError, TooLargeError, explored
from nanovllm.grammars.facts import Number

MAX_MULTIPLE = 2000  # largest divisor after scaling to integers
MAX_DIGITS = 400
EXACT_DOUBLES = 2**53  # all integers up to this one are doubles
ZERO, POINT, MINUS = 0x30, 0x2E, 0x2D
DigitPlace = tuple[str, int, tuple[int, ...], int]  # phase, digits read, comparisons, remainder


def automaton(number: Number) -> Dfa:
    """Return the automaton of all constraints except `values`.

    Raise PatternError if it has too many states.
    """
    digits = _Digits(number)
    return explored(("", False, None), digits.edges_of, digits.is_final)


def written(value: Fraction) -> list[str]:
    """Return the texts of one number: its digits, and for an integer also with `.0` appended.

    JSON readers parse a number with a point as a double, so integers above 2**53 have no such form.
    Raise PatternError for more decimals than any double has.
    """
    scale = _decimals(value)
    before, after = _split(abs(value), scale)
    sign = "-" if value < 0 else ""
    if after:
        return [f"{sign}{before}.{after}"]
    whole = f"{sign}{before}"
    return [whole, f"{whole}.0"] if abs(value) <= EXACT_DOUBLES else [whole]


class _Digits:
    """A digit-by-digit reader of a number that compares it with all bounds at once."""

    def __init__(self, number: Number) -> None:
        self._number = number
        bounds = [(*bound, side) for bound, side in ((number.low, -1), (number.high, 1)) if bound]
        self._values = [*(bound[0] for bound in bounds), *sorted(number.excluded)]
        self._limits = [_digits(abs(value)) for value in self._values]
        # Refused comparisons of a number with each value: below (-1), equal (0), above (1).
        self._refused = [{side, 0} if is_out else {side} for _, is_out, side in bounds]
        self._refused += [{0}] * len(number.excluded)
        counted = number.multiples | number.no_multiples
        scale = max(map(_decimals, counted), default=0)
        if number.no_multiples and not number.multiples and not number.is_integer:
            # Two more decimals are allowed. Otherwise `not multipleOf 1` would exclude all numbers.
            scale += 2
        self._scale = scale if counted else None
        self._modulus = math.lcm(*(int(multiple * 10**scale) for multiple in counted))
        if self._modulus > MAX_MULTIPLE:
            raise TooLargeError(f"multiples above {MAX_MULTIPLE} times their last decimal")

    def edges_of(
        self, at: tuple[str, bool, DigitPlace | None]
    ) -> Iterator[tuple[int, int, object]]:
        sign, is_done, place = at
        if place is None:
            if not sign and (self._number.low is None or self._number.low[0] < 0):
                yield MINUS, MINUS, ("-", False, None)
            start: DigitPlace = ("int", 0, (0,) * len(self._limits), 0)
            for digit in range(10):
                yield ZERO + digit, ZERO + digit, (sign, digit == 0, self._next(start, digit))
            return
        phase, count, orders, rest = place
        if phase == "int" and not self._number.is_integer and self._scale != 0:
            settled = tuple(
                order if len(limit[0]) == count else -1 if count < len(limit[0]) else 1
                for order, limit in zip(orders, self._limits, strict=True)
            )
            yield POINT, POINT, (sign, False, ("frac", 0, settled, rest))
        if not is_done and not (phase == "frac" and count == self._scale):
            for digit in range(10):
                to = self._next(place, digit)
                if not self._is_beyond(sign, to):
                    yield ZERO + digit, ZERO + digit, (sign, False, to)

    def _next(self, place: DigitPlace, digit: int) -> DigitPlace:
        phase, count, orders, rest = place
        known = []
        for order, (before, behind) in zip(orders, self._limits, strict=True):
            digits = before if phase == "int" else behind
            if phase == "int" and count >= len(before):
                known.append(1)
            elif order:
                known.append(order)
            else:
                other = int(digits[count]) if count < len(digits) else 0
                known.append((digit > other) - (digit < other))
        most = max((len(limit[phase != "int"]) for limit in self._limits), default=0) + 1
        most = max(most, (self._scale or 0) + 1 if phase == "frac" else 2)
        rest = (10 * rest + digit) % self._modulus if self._scale is not None else 0
        return phase, min(count + 1, most), tuple(known), rest

    def _is_beyond(self, sign: str, place: DigitPlace) -> bool:
        """Return True if the number already has more digits than the bound on its side."""
        high = self._number.low if sign else self._number.high
        at = 0 if sign or self._number.low is None else 1
        return bool(high and place[1] > len(self._limits[at][0]) and place[0] == "int")

    def is_final(self, at: tuple[str, bool, DigitPlace | None]) -> bool:
        sign, _, place = at
        if place is None or (place[0] == "frac" and place[1] == 0):
            return False
        phase, count, orders, rest = place
        if self._scale is not None:
            missing = self._scale - (count if phase == "frac" else 0)
            value = Fraction(rest * 10**missing, 10**self._scale)
            if any(value % multiple for multiple in self._number.multiples):
                return False
            if any(value % multiple == 0 for multiple in self._number.no_multiples):
                return False
        limits = zip(orders, self._limits, self._values, self._refused, strict=True)
        for order, limit, value, refused in limits:
            final = _final(order, phase, count, limit)
            if (sign and value > 0) or (not sign and value < 0):
                final = -1 if sign else 1  # the signs differ; -0 is not written here
            elif sign:
                final = -final
            if final in refused:
                return False
        return True


def _final(order: int, phase: str, count: int, limit: tuple[str, str]) -> int:
    before, behind = limit
    if phase == "int":
        if count != len(before):
            return -1 if count < len(before) else 1
        return order or (-1 if behind else 0)
    return order or (-1 if behind[count:] else 0)


def _digits(value: Fraction) -> tuple[str, str]:
    """Return the digits before and after the point. Raise PatternError."""
    if value >= 10**MAX_DIGITS:
        raise PatternError(f"numbers of more than {MAX_DIGITS} digits")
    before, after = _split(value, _decimals(value))
    if len(before) + len(after) > MAX_DIGITS:
        raise PatternError(f"numbers of more than {MAX_DIGITS} digits")
    return before, after


def _split(value: Fraction, scale: int) -> tuple[str, str]:
    """Return the digits before and after the point, of which there are `scale`."""
    text = str(int(value * 10**scale)).rjust(scale + 1, "0")
    return (text[:-scale], text[-scale:]) if scale else (text, "")


def _decimals(value: Fraction) -> int:
    """Return how many decimals a number has. Raise PatternError if there are too many."""
    scale = 0
    while value.denominator != 1:
        value, scale = value * 10, scale + 1
        if scale > MAX_DIGITS:
            raise PatternError(f"numbers of more than {MAX_DIGITS} digits")
    return scale
