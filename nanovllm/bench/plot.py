"""Line charts side by side in one file. Knows nothing of what is plotted."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from nanovllm.config import ConfigError

LOG_ABOVE = 20.0  # an axis whose values differ by more than this factor is logarithmic
INCHES = (7.0, 4.6)  # of a panel
# Told apart by colour-blind readers (Okabe and Ito), and by their markers in print.
LOOKS = (
    ("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "D"), ("#cc79a7", "^"), ("#e69f00", "v"),
    ("#56b4e9", "P"),
)  # fmt: skip


class Point(NamedTuple):
    x: float
    y: float
    label: str


class Panel(NamedTuple):
    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[Point]]  # one of the same name looks the same in every panel


def missing() -> str | None:
    """Why nothing can be drawn, or None."""
    return None if find_spec("matplotlib") else "plots need matplotlib: pip install nanovllm[plot]"


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write an SVG, PNG or PDF, by the path's suffix. Raises ConfigError when it cannot."""
    if problem := missing():
        raise ConfigError(problem)
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    figure = Figure((INCHES[0] * len(panels), INCHES[1] + 0.25 * len(names)), layout="constrained")
    figure.suptitle(title)
    for at, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), at + 1)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        for name, points in panel.lines.items():
            xs, ys, labels = zip(*points, strict=True)
            colour, marker = LOOKS[names.index(name) % len(LOOKS)]
            axes.plot(xs, ys, label=name, color=colour, marker=marker)
            for x, y, label in zip(xs, ys, labels, strict=True):
                axes.annotate(label, (x, y), (4, 4), textcoords="offset points", fontsize=8)
        points = [point for line in panel.lines.values() for point in line]
        axes.set_xscale(scale([point.x for point in points]))
        axes.set_yscale(scale([point.y for point in points]))
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left")
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or no such format
        raise ConfigError(f"--plot {path}: {error}") from None


def scale(values: Sequence[float]) -> str:
    return "log" if 0 < min(values) * LOG_ABOVE < max(values) else "linear"
