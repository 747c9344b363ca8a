"""Grammar rules as data, and the removal of rules that match nothing."""

from __future__ import annotations

Sequence = tuple[str, ...]  # of terminals, which begin with a quote or a bracket, and of rules
Rule = list[Sequence]  # alternatives


def productive(bodies: dict[str, Rule]) -> dict[str, Rule]:
    """Return the rules without alternatives that need a rule that matches nothing."""
    users: dict[str, list[tuple[str, int]]] = {}
    missing: dict[tuple[str, int], int] = {}
    good: set[str] = set()
    waiting: list[str] = []
    for name, body in bodies.items():
        for i, sequence in enumerate(body):
            needs = {bare(item) for item in sequence if is_rule(item) and "{0," not in item}
            missing[name, i] = len(needs)
            for need in needs:
                users.setdefault(need, []).append((name, i))
            if not needs and name not in good:
                good.add(name)
                waiting.append(name)
    while waiting:
        for name, i in users.get(waiting.pop(), ()):
            missing[name, i] -= 1
            if not missing[name, i] and name not in good:
                good.add(name)
                waiting.append(name)
    return {
        name: [
            tuple(item for item in sequence if not is_rule(item) or bare(item) in good) or ('""',)
            for i, sequence in enumerate(body)
            if not missing[name, i]
        ]
        for name, body in bodies.items()
    }


def renamed(item: str, same: dict[str, str]) -> str:
    """Replace a rule that only refers to another rule by that rule."""
    if not is_rule(item):
        return item
    name, brace, counts = item.partition("{")
    seen = set()
    while name in same and name not in seen:
        seen.add(name)
        name = same[name]
    return name + brace + counts


def is_rule(item: str) -> bool:
    return item[0] not in '"['


def bare(item: str) -> str:
    """Return a rule's name without its repetition counts."""
    return item.partition("{")[0]
