"""Requests go to cached prefixes and to the least loaded engine, and are spread out."""

from __future__ import annotations

from collections import Counter

import pytest

from nanovllm.server.router import RequestRouter, Routed

PAGE = 10
SYSTEM = list(range(1000, 1200))  # 20 pages that many prompts begin with


def router(num_engines: int = 4, num_pages: int = 1000, first: int = 0) -> RequestRouter:
    sizes = [num_pages] * num_engines
    return RequestRouter(sizes, PAGE, prefill_weight=1.0, load_weight=20.0, first=first)


class Fleet:
    """Requests in flight, as engines would count them."""

    def __init__(self, router: RequestRouter, num_engines: int = 4) -> None:
        self.router = router
        self.loads: list[float | None] = [0] * num_engines

    def send(self, ids: list[int], salt: str = "", owner: str = "") -> Routed:
        routed = self.router.route(ids, salt, owner, self.loads)
        self.router.sent(routed)
        self.loads[routed.engine] += 1  # type: ignore[operator]
        return routed

    def end(self, routed: Routed, num_cached: int | None = None) -> None:
        self.router.done(routed, num_cached)
        self.loads[routed.engine] -= 1  # type: ignore[operator]

    def ask(self, ids: list[int], salt: str = "", owner: str = "") -> int:
        """Return the engine of a request that ends at once."""
        routed = self.send(ids, salt, owner)
        self.end(routed)
        return routed.engine


def prompt(seed: int, num_tokens: int = 200) -> list[int]:
    return [seed * 10_000 + at for at in range(num_tokens)]


def test_what_is_equal_is_shared_out_in_turn() -> None:
    fleet = Fleet(router())
    assert Counter(fleet.ask(prompt(at, 5)) for at in range(40)) == dict.fromkeys(range(4), 10)
    begins = {Fleet(router(first=worker)).ask(prompt(1, 5)) for worker in range(4)}
    assert begins == {0, 1, 2, 3}  # API processes start with different engines


def test_the_least_loaded_gets_a_new_prompt() -> None:
    fleet = Fleet(router())
    fleet.loads = [3, 2, 1, 2]
    assert fleet.send(prompt(1)).engine == 2


def test_a_prefix_draws_unless_its_engine_is_far_busier() -> None:
    """190 cached tokens outweigh 9 requests of 20, but not 10."""
    fleet = Fleet(router(2), 2)
    fleet.loads = [0, 1]
    assert fleet.ask(prompt(1)) == 0
    fleet.loads = [9, 0]
    assert fleet.ask([*prompt(1), 7]) == 0
    fleet.loads = [11, 0]
    assert fleet.ask([*prompt(1), 7]) == 1
    fleet.loads = [1, 0]
    assert fleet.ask([*prompt(1), 7]) == 1  # which has it by now


def test_the_longest_prefix_wins() -> None:
    fleet = Fleet(router(3), 3)
    fleet.loads = [0, 5, 5]
    assert fleet.ask(prompt(1)[:100]) == 0
    fleet.loads = [5, 0, 5]
    assert fleet.ask([*prompt(1)[:50], *prompt(2)]) == 1
    fleet.loads = [1, 1, 1]
    assert fleet.ask(prompt(1)) == 0
    assert fleet.ask([*prompt(1)[:50], *prompt(2)[:90]]) == 1


def test_salts_part_prefixes() -> None:
    fleet = Fleet(router(2), 2)
    fleet.loads = [0, 1]
    fleet.ask(prompt(1), "a")
    fleet.loads = [1, 0]
    assert fleet.ask(prompt(1), "a") == 0
    assert fleet.ask(prompt(1), "b") == 1


def test_a_prefix_that_all_share_does_not_pile_them_on_one_engine() -> None:
    fleet = Fleet(router())
    for at in range(64):
        fleet.send([*SYSTEM, *prompt(at, 25)])
    assert max(fleet.loads) - min(fleet.loads) <= 1  # type: ignore[type-var, operator]
    few = Fleet(router())
    for at in range(3):
        few.send([*SYSTEM, *prompt(at, 25)])
    assert sorted(few.loads) == [0, 0, 0, 3]  # type: ignore[type-var]


@pytest.mark.parametrize("salted", [True, False])
def test_an_owner_stays_where_it_is_when_that_costs_nothing(salted: bool) -> None:
    def ask(fleet: Fleet, at: int, who: str) -> int:
        return fleet.ask(prompt(at, 5), who if salted else "", who)

    fleet, other = Fleet(router()), Fleet(router(first=2))
    homes = {who: ask(fleet, 0, who) for who in map(str, range(40))}
    for at in range(1, 5):
        assert {who: ask(fleet, at, who) for who in homes} == homes
    assert {who: ask(other, 0, who) for who in homes} == homes  # in every API process
    assert min(Counter(homes.values()).values()) >= 4
    home = homes["1"]
    fleet.loads = [1.0 * (at == home) for at in range(4)]
    assert ask(fleet, 9, "1") == home
    fleet.loads = [2.0 * (at == home) for at in range(4)]
    assert ask(fleet, 9, "1") != home
    fleet.loads = [0.0] * 4
    fleet.loads[home] = None
    away = ask(fleet, 9, "1")
    assert away != home
    elsewhere = [who for who in homes if homes[who] != home]
    assert all(ask(fleet, 9, who) == homes[who] for who in elsewhere)  # no other one moves


@pytest.mark.parametrize("num_engines", [2, 3, 5, 7])
def test_owners_are_shared_out_alike(num_engines: int) -> None:
    """Owners with names of equal length, like session ids, are distributed evenly."""
    fleet = Fleet(router(num_engines), num_engines)
    count = Counter(fleet.ask([at], owner=f"{at:08x}-0000") for at in range(500 * num_engines))
    assert min(count.values()) > 425 and max(count.values()) < 575


def test_an_owner_goes_where_its_prefix_is() -> None:
    fleet = Fleet(router(2), 2)
    home = fleet.ask(prompt(1, 5), owner="me")
    fleet.loads = [5.0 * (at == home) for at in range(2)]
    assert fleet.ask(prompt(2), owner="me") == 1 - home
    fleet.loads = [0, 0]
    assert fleet.ask([*prompt(2), 3], owner="me") == 1 - home


def test_one_that_must_not_be_asked_is_not() -> None:
    fleet = Fleet(router(2), 2)
    fleet.loads = [0, 1]
    assert fleet.ask(prompt(1)) == 0
    fleet.loads = [None, 50]
    assert fleet.ask(prompt(1)) == 1


def test_one_that_begins_anew_has_nothing() -> None:
    fleet = Fleet(router(2), 2)
    fleet.loads = [0, 1]
    assert fleet.ask(prompt(1)) == 0
    fleet.router.forget(0)
    fleet.loads = [1, 0]
    assert fleet.ask(prompt(1)) == 1


def test_memory_is_bounded_by_the_pages_of_each_engine_newest_first() -> None:
    small = RequestRouter([40, 0], PAGE, prefill_weight=1.0, load_weight=20.0)
    for at in range(10):
        small.sent(small.route([*prompt(at), 1], "", "", [0, None]))
        small.sent(small.route([*prompt(at), 1], "", "", [None, 0]))
    assert [len(cached) for cached in small._cached] == [40, 0]
    found = [small.route([*prompt(at), 1], "", "", [0, None]).num_cached for at in range(10)]
    assert found == [0] * 8 + [20, 20]
    # The end of the oldest prompt is dropped first, as in the engines; its beginning remains
    # useful.
    small.sent(small.route(prompt(11, 101), "", "", [0, None]))
    assert small.route([*prompt(8), 1], "", "", [0, None]).num_cached == 10


def test_what_an_engine_has_dropped_is_forgotten_with_others_of_its_age() -> None:
    fleet = Fleet(router(2), 2)
    fleet.loads = [0, None]
    for at in range(8):
        fleet.ask([*prompt(at), 1])
    routed = fleet.send([*prompt(7), 1])
    assert routed.num_cached == 20
    fleet.end(routed, num_cached=200)
    assert len(fleet.router._cached[0]) == 160
    fleet.end(fleet.send([*prompt(7), 1]), num_cached=30)
    assert len(fleet.router._cached[0]) == 120
    assert fleet.send([*prompt(0), 1]).num_cached == 0
    assert fleet.send([*prompt(7), 1]).num_cached == 20


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    fleet = Fleet(router())
    sent = [fleet.send(prompt(at % 3)) for at in range(9)]
    assert max(fleet.router._in_flight.values()) == 3
    for routed in sent:
        fleet.end(routed, None)
    assert not fleet.router._in_flight
