"""Charts as SVG, drawn without any other package: curves, steps and bars over two axes.

The text of a chart takes the colour of the page around it, so that it can be read on a light and
on a dark one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

WIDTH, HEIGHT = 600, 290
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 12, 48
# Told apart by people who see colours differently, on light and dark pages (Okabe and Ito's).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#b0a800")


@dataclass(frozen=True)
class Curve:
    """What is drawn.

    Attributes:
        name: for the legend.
        x, y: its points. Bars have one edge more than heights.
        shape: "line" joins the points, "steps" goes up at each of them, "bars" stand between edges.
    """

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    shape: Literal["line", "steps", "bars"] = "line"


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        label: what is on it.
        log: whether equal ratios take equal lengths; what is not positive is then left out.
        whole: ticks at whole numbers only.
        ends: where it begins and ends, whatever the points are; None leaves that to them.
        percent: ticks are shown as percentages.
    """

    label: str
    log: bool = False
    whole: bool = False
    ends: tuple[float | None, float | None] = (None, None)
    percent: bool = False


def chart(curves: Sequence[Curve], x: Axis, y: Axis, mark: float | None = None) -> str:
    """An SVG element.

    Args:
        curves: with at least one point among them.
        x, y: the axes.
        mark: where on the horizontal axis a line goes up.
    """
    curves = [_drawable(curve, x) for curve in curves]
    across = _Scale(x, [curve.x for curve in curves], LEFT, WIDTH - RIGHT)
    up = _Scale(y, [curve.y for curve in curves], HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up)]
    if mark is not None and across.low <= mark <= across.high:
        at = _n(across(mark))
        parts.append(
            f"<line x1='{at}' x2='{at}' y1='{TOP}' y2='{HEIGHT - BOTTOM}' stroke='currentColor'/>"
        )
    for curve, colour in zip(curves, _colours(len(curves)), strict=True):
        parts += _drawn(curve, colour, across, up)
    if len(curves) > 1:
        parts += _legend(curves)
    return (
        f"<svg class='chart' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' font-size='13' "
        f"font-family='system-ui, sans-serif'>{''.join(parts)}</svg>"
    )


def number(value: float) -> str:
    """A number on an axis, written out: 0.4, 25, 30,000; very large and small ones as 2e-07."""
    if value == 0:
        return "0"
    if not 1e-5 <= abs(value) < 1e7:
        return f"{value:.3g}"
    text = f"{value:,.10f}".rstrip("0").rstrip(".")
    return text


class _Scale:
    """From numbers to places along an axis, with ticks."""

    def __init__(self, axis: Axis, values: list, begin: float, end: float):
        self.axis, self.begin, self.end = axis, begin, end
        every = np.concatenate([np.asarray(one, float) for one in values] or [np.zeros(0)])
        every = every[np.isfinite(every)]
        low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
        low = low if axis.ends[0] is None else axis.ends[0]
        high = high if axis.ends[1] is None else axis.ends[1]
        if axis.log:
            low, high = (low / 1.5, high * 1.5) if low == high else (low, high)
        elif low == high:
            low, high = low - 0.5, high + 0.5
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.axis.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round numbers between both ends."""
        found = self._log_ticks() if self.axis.log else []
        return found if len(found) > 1 else self._even_ticks()

    def _log_ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1,)):
            found = [d * 10.0**p for p in powers for d in digits]
            found = [t for t in found if self.low <= t * (1 + 1e-9) and t <= self.high * (1 + 1e-9)]
            if len(found) <= 8:
                return found
        return found[:: math.ceil(len(found) / 8)]

    def _even_ticks(self) -> list[float]:
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * d for d in (1, 2, 5, 10) if power * d >= rough * (1 - 1e-9))
        if self.axis.whole:
            step = max(step, 1.0)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]

    def text(self, tick: float) -> str:
        return f"{number(round(100 * tick, 8))} %" if self.axis.percent else number(tick)


def _drawable(curve: Curve, x: Axis) -> Curve:
    """Without what a logarithmic axis has no place for."""
    if not x.log or curve.shape == "bars":
        return curve
    across, up = np.asarray(curve.x, float), np.asarray(curve.y, float)
    return Curve(curve.name, across[across > 0], up[across > 0], curve.shape)


def _colours(count: int) -> list[str]:
    return [COLOURS[k % len(COLOURS)] for k in range(count)]


def _grid(across: _Scale, up: _Scale):
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in up.ticks():
        at = _n(up(tick))
        yield (
            f"<line x1='{LEFT}' x2='{right}' y1='{at}' y2='{at}' stroke='currentColor' "
            "stroke-opacity='.18'/>"
        )
        yield _text(LEFT - 8, float(at) + 4, up.text(tick), "end")
    for tick in across.ticks():
        at = _n(across(tick))
        yield (
            f"<line x1='{at}' x2='{at}' y1='{TOP}' y2='{bottom}' stroke='currentColor' "
            "stroke-opacity='.18'/>"
        )
        yield _text(float(at), bottom + 18, across.text(tick), "middle")
    yield _text((LEFT + right) / 2, HEIGHT - 8, across.axis.label, "middle")
    middle = (TOP + bottom) / 2
    yield _text(14, middle, up.axis.label, "middle", f" transform='rotate(-90 14 {_n(middle)})'")


def _drawn(curve: Curve, colour: str, across: _Scale, up: _Scale):
    if curve.shape == "bars":
        for low, high, height in zip(curve.x[:-1], curve.x[1:], curve.y, strict=True):
            left, top = across(low), up(height)
            yield (
                f"<rect x='{_n(left)}' y='{_n(top)}' width='{_n(across(high) - left)}' "
                f"height='{_n(HEIGHT - BOTTOM - top)}' fill='{colour}' fill-opacity='.8'/>"
            )
        return
    points = [(across(a), up(b)) for a, b in zip(curve.x, curve.y, strict=True)]
    if not points:
        return
    path = f"M{_n(points[0][0])} {_n(points[0][1])}"
    if curve.shape == "steps":
        # From the axis up, so that a curve with a single point can be seen as well.
        path = f"M{_n(points[0][0])} {_n(up(up.low))}V{_n(points[0][1])}"
    for a, b in points[1:]:
        path += f"H{_n(a)}V{_n(b)}" if curve.shape == "steps" else f"L{_n(a)} {_n(b)}"
    yield f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
    marked = points if curve.shape == "line" else points[-1:]
    for a, b in marked:
        yield f"<circle cx='{_n(a)}' cy='{_n(b)}' r='3.5' fill='{colour}'/>"


def _legend(curves: list[Curve]):
    # Steps go up to the right, so that their upper left is free; lines fall, from above.
    left, top = LEFT + 12, TOP + 14
    if curves[0].shape == "line":
        top = HEIGHT - BOTTOM - 10 - 18 * (len(curves) - 1)
    for k, (curve, colour) in enumerate(zip(curves, _colours(len(curves)), strict=True)):
        at = top + 18 * k
        yield f"<rect x='{left}' y='{at - 9}' width='12' height='10' fill='{colour}'/>"
        yield _text(left + 18, at, curve.name, "start")


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return (
        f"<text x='{_n(x)}' y='{_n(y)}' text-anchor='{anchor}' fill='currentColor'{more}>"
        f"{escape(text)}</text>"
    )


def _n(value: float) -> str:
    return f"{value:.1f}"
