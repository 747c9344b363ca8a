"""The CUDA graphs of a runner by name, and the choice of those that a step replays.

    name                 captured work                             replayed
    decode               forward pass of decode rows               in steps without prompt chunks
    mixed                forward pass, without attention           in steps with prompt chunks
    draw                 draws, written to the slots, and drafts   after `decode`
    draw, 1/n rows       the same as `draw`                        after `decode`, if rows have n
                                                                   tokens on average, or more
    draw_without_drafts  draws, written to the slots, and keys     after `decode`, if the plan wants
                         and values of the draft model             no drafts (StepPlan.proposes)

Passes of a draft model take all rows of the graph, and a graph cannot know how its tokens are
divided into rows. So a draw has graphs for several numbers of rows.

A step whose size has no graph runs eagerly. A draw does so, too, if a row needs more than its seed
and temperature (Sampler.plain). Steps with a row that has an adapter have graphs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.runner.batch import StepRows
from nanovllm.runner.graphs import DecodeGraphs, PiecewiseGraphs, Size


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs of all parts of a step. Their tables are empty until they are captured."""

    decode: DecodeGraphs
    mixed: PiecewiseGraphs
    draw: Sequence[DecodeGraphs]  # those for the fewest rows first, those for any number last
    draw_without_drafts: DecodeGraphs | None  # None without a draft model

    @property
    def draws(self) -> dict[str, DecodeGraphs]:
        """The graphs that draw, by name. They read the results of `decode`."""
        *few, every = self.draw
        by_name = {"draw": every} | {f"draw, 1/{each.tokens_per_row} rows": each for each in few}
        if self.draw_without_drafts is not None:
            by_name["draw without drafts"] = self.draw_without_drafts
        return by_name

    def fit(self, rows: StepRows, num_tokens: int) -> int:
        """Return the tokens of the graph that runs the forward pass of such rows, or 0.

        `num_tokens` is that of the rows, or of the lane with most tokens.
        """
        if not rows.is_decode:
            return self.mixed.fit(num_tokens)
        fitting = self.decode.fit(num_tokens, rows.width)
        return 0 if fitting is None else fitting[0]

    def draw_after(
        self, size: Size, forwarded: object, *, num_rows: int, proposes: bool
    ) -> DecodeGraphs | None:
        """Return the graphs that draw after a forward pass, or None if that was not replayed.

        `forwarded` is the result of the pass. `proposes` is that of the plan.
        """
        captured = self.decode.captured.get(size)
        if captured is None or captured.output is not forwarded:
            return None
        if not proposes and self.draw_without_drafts is not None:
            return self.draw_without_drafts
        fits = (each for each in self.draw if each.takes(size, num_rows))
        return next(fits, self.draw[-1])

    def eager_reason(self, rows: StepRows) -> str | None:
        """Return the reason why a step of these rows replays no graph, or None if it does."""
        of_width = [tokens for tokens, width in self.decode.captured if width == rows.width]
        sizes = of_width if rows.is_decode else list(self.mixed.captured)
        if not sizes:
            return "no graph was captured"
        if rows.num_tokens > max(sizes):
            count = f"{rows.num_tokens} {'rows' if rows.is_decode else 'tokens'}"
            return f"{count} are more than the largest graph's {max(sizes)}"
        return None


@dataclass(frozen=True, slots=True)
class GraphSet:
    """All CUDA graphs of a runner."""

    plain: StepGraphs
    adapted: StepGraphs  # of steps in which a row has an adapter

    def of(self, *, adapted: bool) -> StepGraphs:
        """Return the graphs of steps with or without adapters."""
        return self.adapted if adapted else self.plain
