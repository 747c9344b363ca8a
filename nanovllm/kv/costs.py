"""Measured times that decide whether a request loads pages or computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MEASURED = 9  # latest measurements whose median is used
LEAST_MEASURED = 128  # least prompt tokens of a step that shows the cost of a token
START_S = 1e-3  # see TransferCosts
# Bytes per second between host and device, and from disk, before the first measurement.
HOST_RATE, DISK_RATE = 20e9, 1e9


class TransferCosts:
    """Time to load a page and to compute a token: the medians of the latest measurements.

    `page_s` (from host memory), `disk_page_s` (from disk to host memory) and `token_s` are assumed
    before the first ones. `start_s` is the time between the decision to load and the next step that
    can use the pages, without the copies.
    """

    def __init__(
        self,
        page_s: float = 1e-3,
        token_s: float = 5e-5,
        start_s: float = START_S,
        disk_page_s: float = 2e-2,
    ) -> None:
        self.start_s = start_s
        self.assumed_s = page_s, disk_page_s
        self._page_s = deque([page_s] * MEASURED, maxlen=MEASURED)
        self._disk_page_s = deque([disk_page_s] * MEASURED, maxlen=MEASURED)
        self._token_s = deque([token_s], maxlen=MEASURED)

    def loaded(self, num_pages: int, seconds: float) -> None:
        self._page_s.append(seconds / num_pages)

    def fetched(self, num_pages: int, seconds: float) -> None:
        """Record the time of pages from disk to host memory."""
        self._disk_page_s.append(seconds / num_pages)

    def declined(self, num_fetched: int) -> None:
        """Record a load that was not worth it. After some, one is tried and measured again."""
        page_s, disk_page_s = self.assumed_s
        self._page_s.append(page_s)
        if num_fetched:
            self._disk_page_s.append(disk_page_s)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record a step that computed prompts only."""
        if num_tokens >= LEAST_MEASURED and seconds > 0:
            self._token_s.append(seconds / num_tokens)

    def is_worth(self, num_tokens: int, num_pages: int, num_fetched: int) -> bool:
        """Return True if loading `num_pages`, in turn, is faster than computing the tokens.

        `num_fetched` of them come from disk.
        """
        load_s = self.start_s + num_pages * median(self._page_s)
        load_s += num_fetched * median(self._disk_page_s)
        return load_s < num_tokens * median(self._token_s)


def break_even(token_s: float, bytes_per_token: float, state_bytes: float = 0) -> dict[str, float]:
    """Return the length in tokens from which a load takes less time than computing, by source.

    `token_s` is the time to compute a token. A load that never pays is left out. A load from disk
    also reads the recurrent state after its pages, of `state_bytes`; the host has the state.
    """
    lengths = {}
    sources = ("host memory", [HOST_RATE], 0.0), ("disk", [HOST_RATE, DISK_RATE], state_bytes)
    for source, rates, fixed in sources:
        byte_s = sum(1 / rate for rate in rates)
        saved_s = token_s - bytes_per_token * byte_s
        if saved_s > 0:
            lengths[source] = (START_S + fixed * byte_s) / saved_s
    return lengths


def median(values: Iterable[float]) -> float:
    """Return the median; of an even number of values, the upper one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
