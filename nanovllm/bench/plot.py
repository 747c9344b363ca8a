"""Line charts side by side as one SVG file: scales, ticks, grid, markers, legend, labels.

Knows nothing of what is plotted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 540, 330  # of one panel's axes; pixels, as all sizes here
LEFT, GAP, RIGHT, BOTTOM = 76, 96, 36, 62
LINE = 20  # height of a line of text
HEAD = 78  # height of title and subtitle
LETTER = 7.5  # width of a letter, on average at least
LOG_ABOVE = 20.0  # an axis whose values differ by more than this factor is logarithmic
MOST_TICKS = 7
MOST_LOG_TICKS = 12
# Told apart by colour-blind readers (Okabe and Ito), and by their markers in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5L5,4H-5z",
    "M0,-5.5L5.5,0L0,5.5L-5.5,0z",
)
# Of a label beside its point: first above left and last below right, where a rising curve is not.
PLACES = (("end", -6.0), ("end", 4.0), ("start", 4.0), ("start", 15.0))
STYLE = (
    "text{font:13px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#333}"
    ".title{font-size:19px;font-weight:600;fill:#111}.quiet{fill:#667}"
    ".head{font-weight:600;fill:#111}.grid{stroke:#e4e7eb}.axis{stroke:#99a;fill:none}"
    ".curve{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".label{font-size:11.5px;paint-order:stroke;stroke:#fff;stroke-width:3px}"
)


class Point(Struct, frozen=True):
    x: float
    y: float
    label: str


class Series(Struct, frozen=True):
    name: str
    points: tuple[Point, ...]


class Panel(Struct, frozen=True, kw_only=True):
    """Series of the same name look the same in every panel."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    also: Callable[[float], float] | None = None  # a second reading of x, along the top
    also_label: str = ""


class Box(Struct, frozen=True):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class Scale(Struct, frozen=True):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def scale_of(values: Sequence[float], start: float, end: float) -> Scale:
    """Round numbers around the values, with some room at the end; from 0 unless logarithmic."""
    least, most = min(values), 1.05 * max(values)
    if 0 < least * LOG_ABOVE < max(values):
        steps = [m * 10.0**e for e in range(-9, 13) for m in (1, 2, 5)]
        low = max(step for step in steps if step <= least)
        high = min(step for step in steps if step >= most)
        ticks = [step for step in steps if low <= step <= high]
        if len(ticks) > MOST_LOG_TICKS:
            ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
        return Scale(low, high, start, end, True, tuple(ticks))
    step = round_step(most / (MOST_TICKS - 1))
    count = max(1, math.ceil(most / step - 1e-9))
    return Scale(0.0, count * step, start, end, False, tuple(i * step for i in range(count + 1)))


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= least * (1 - 1e-9))


def shown(value: float) -> str:
    """`2.5`, `150`, `20k`: at most three digits where that is exact enough for an axis."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.4g}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The whole file."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    width = LEFT + len(panels) * WIDTH + (len(panels) - 1) * GAP + RIGHT
    legend, legend_height = draw_legend(names, width)
    top = HEAD + legend_height + 3.4 * LINE
    height = top + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(LEFT, 34, title, "title"),
        text(LEFT, 56, subtitle, "quiet"),
        *legend,
    ]
    for at, panel in enumerate(panels):
        parts += draw_panel(panel, names, LEFT + at * (WIDTH + GAP), top)
    return "\n".join([*parts, "</svg>\n"])


def draw_legend(names: Sequence[str], width: float) -> tuple[list[str], int]:
    """The entries and their height; they flow into as many lines as they need."""
    parts, x, y = [], float(LEFT), HEAD + LINE // 2
    for at, name in enumerate(names):
        entry = 34 + LETTER * len(name) + 22
        if x > LEFT and x + entry > width - RIGHT:
            x, y = float(LEFT), y + LINE
        parts += [
            f'<path class="curve" stroke="{colour(at)}" d="M{x:g},{y}h26"/>',
            marker(at, x + 13, y),
            text(x + 34, y + 4.5, name),
        ]
        x += entry
    return parts, y - HEAD + LINE // 2


def draw_panel(panel: Panel, names: Sequence[str], left: float, top: float) -> list[str]:
    right, bottom = left + WIDTH, top + HEIGHT
    points = [point for series in panel.series for point in series.points]
    x_scale = scale_of([point.x for point in points], left, right)
    y_scale = scale_of([point.y for point in points], bottom, top)
    parts = [text(left, top - 2 * LINE, panel.title, "head")]
    for tick in y_scale.ticks:
        y = y_scale.at(tick)
        parts.append(f'<path class="grid" d="M{left:g},{y:.1f}H{right:g}"/>')
        parts.append(text(left - 8, y + 4.5, shown(tick), "quiet", "end"))
    for tick in x_scale.ticks:
        x = x_scale.at(tick)
        parts.append(f'<path class="grid" d="M{x:.1f},{bottom:g}V{top:g}"/>')
        parts.append(text(x, bottom + 19, shown(tick), "quiet", "middle"))
        if panel.also and tick > 0:
            parts.append(text(x, top - 8, shown(panel.also(tick)), "quiet", "middle"))
    parts += [
        f'<path class="axis" d="M{left:g},{top:g}V{bottom:g}H{right:g}"/>',
        text((left + right) / 2, bottom + 44, panel.x_label, "", "middle"),
        text(right, top - 1.3 * LINE, panel.also_label, "quiet", "end"),
        f'<g transform="translate({left - 58:g},{(top + bottom) / 2:g}) rotate(-90)">'
        f"{text(0, 0, panel.y_label, '', 'middle')}</g>",
    ]
    placed = {
        (series.name, point): (x_scale.at(point.x), y_scale.at(point.y))
        for series in panel.series
        for point in series.points
    }
    taken = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in placed.values()]
    taken.append(Box(left, top - LINE, right, top - 4))  # the ticks along the top
    for series in panel.series:
        at = [placed[series.name, point] for point in series.points]
        parts += draw_series(series, names.index(series.name), at, taken)
    return parts


def draw_series(
    series: Series, index: int, at: Sequence[tuple[float, float]], taken: list[Box]
) -> list[str]:
    """Its points are at these pixels. A label takes a free place beside its point, or is left out:
    the marker's tooltip says the same."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts = [f'<polyline class="curve" stroke="{colour(index)}" points="{line}"/>']
    for (x, y), point in zip(at, series.points, strict=True):
        hint = f"{series.name}, {point.label}: {point.y:,.1f} at {point.x:,.2f}"
        parts.append(marker(index, x, y, hint))
        width = LETTER * len(point.label)
        for anchor, dy in PLACES if index % 2 == 0 else PLACES[::-1]:
            start = x - 8 - width if anchor == "end" else x + 8
            box = Box(start, y + dy - 9, start + width, y + dy)
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                edge = box.right if anchor == "end" else box.left
                parts.append(text(edge, y + dy, point.label, "label", anchor, colour(index)))
                break
    return parts


def marker(index: int, x: float, y: float, hint: str = "") -> str:
    title = f"<title>{escape(hint)}</title>" if hint else ""
    shape = MARKERS[index % len(MARKERS)]
    return (
        f'<path transform="translate({x:.1f},{y:.1f})" d="{shape}" fill="{colour(index)}" '
        f'stroke="#fff">{title}</path>'
    )


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def text(
    x: float, y: float, words: str, kind: str = "", anchor: str = "start", fill: str = ""
) -> str:
    style = f' style="fill:{fill}"' if fill else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{style}>'
        f"{escape(words)}</text>"
    )
