"""Plots of an experiment, each with its conditions below it. Needs matplotlib, an extra."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_spec.bench.client import extra
from sgl_spec.bench.plan import NONE
from sgl_spec.bench.tables import Summary

_WIDTH, _HEIGHT = 8.0, 5.0
_MOST_SERIES = 6  # of histograms over each other, for one to be told from another
Axes = Any  # matplotlib is imported when a plot is drawn


def draw(found: Sequence[Summary], conditions: str, directory: Path) -> list[Path]:
    """Every plot for which the experiment has data, as PNG; their paths."""
    extra("matplotlib").use("Agg")
    pyplot = extra("matplotlib.pyplot")
    good = [one for one in found if one.tokens_per_s is not None]
    written = []
    for name, (panels, has_data) in _PLOTS.items():
        shown = [one for one in good if has_data(one)]
        if not shown or (name == "running" and len({s.max_running_requests for s in shown}) < 2):
            continue
        directory.mkdir(parents=True, exist_ok=True)
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(_WIDTH * len(panels) ** 0.5, _HEIGHT), squeeze=False
        )
        for panel, axis in zip(panels, axes[0], strict=True):
            panel(axis, shown)
        figure.text(0.01, 0.01, textwrap.fill(conditions, 130), fontsize=6, va="bottom")
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        written.append(directory / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
        pyplot.close(figure)
    return written


def _setting(one: Summary, *, running: bool = True) -> str:
    words = [word for word in one.setting.split() if running or not word.startswith("running=")]
    words += [f"T={one.temperature:g}"] if one.temperature else []
    return " ".join(words)


def _lines(
    axis: Axes,
    shown: Sequence[Summary],
    name: Callable[[Summary], str],
    x: Callable[[Summary], float],
    y: Callable[[Summary], float | None],
) -> None:
    """A line for each name; points with one x (groups, say) are averaged."""
    series: dict[str, dict[float, list[float]]] = {}
    for one in shown:
        value = y(one)
        if value is not None:
            series.setdefault(name(one), {}).setdefault(x(one), []).append(value)
    for label, points in series.items():
        xs = sorted(points)
        axis.plot(xs, [sum(points[at]) / len(points[at]) for at in xs], marker="o", label=label)
    ticks = sorted({at for points in series.values() for at in points})
    if len(ticks) > 1 and ticks[-1] > 4 * ticks[0]:
        axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{at:g}" for at in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def _speedup(axis: Axes, shown: Sequence[Summary]) -> None:
    speculating = [one for one in shown if one.speculation != NONE]
    _lines(
        axis, speculating, _setting, lambda one: float(one.concurrency or 0), lambda s: s.speedup
    )
    axis.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axis.annotate("break-even", (axis.get_xlim()[0], 1.0), fontsize=7, va="bottom")
    axis.set_xlabel("concurrency")
    axis.set_ylabel("tokens/s over no speculation")
    axis.set_title("Where speculation pays")


def _running(field: str, label: str) -> Callable[[Axes, Sequence[Summary]], None]:
    def panel(axis: Axes, shown: Sequence[Summary]) -> None:
        def name(one: Summary) -> str:
            return f"{_setting(one, running=False)}, concurrency {one.load}"

        _lines(
            axis,
            shown,
            name,
            lambda one: float(one.max_running_requests or 0),
            lambda one: getattr(one, field),
        )
        axis.set_xlabel("--max-running-requests")
        axis.set_ylabel(label)

    return panel


def _bars(
    axis: Axes, shown: Sequence[Summary], value: Callable[[Summary], float | None], label: str
) -> None:
    """Bars by group of prompts, one colour for each setting."""
    groups = sorted({one.group or "all prompts" for one in shown})
    settings = list(dict.fromkeys(_setting(one) for one in shown))
    width = 0.8 / len(settings)
    for number, setting in enumerate(settings):
        heights = []
        for group in groups:
            values = [
                found
                for one in shown
                if _setting(one) == setting
                and (one.group or "all prompts") == group
                and (found := value(one)) is not None
            ]
            heights.append(sum(values) / len(values) if values else 0.0)
        places = [at + number * width for at in range(len(groups))]
        bars = axis.bar(places, heights, width, label=setting)
        axis.bar_label(bars, fmt="%.2f", fontsize=6)
    middle = 0.4 - width / 2
    axis.set_xticks([at + middle for at in range(len(groups))], groups, fontsize=7)
    axis.set_ylabel(label)
    axis.legend(fontsize=7)


def _accept_by_group(axis: Axes, shown: Sequence[Summary]) -> None:
    _bars(axis, shown, lambda one: one.accept_length, "tokens of a round")
    axis.set_title("Accept length by group")


def _agreement(axis: Axes, shown: Sequence[Summary]) -> None:
    _bars(axis, shown, lambda one: one.agreement, "share of prompts with the same text")
    axis.set_ylim(0, 1.1)
    axis.set_title("Agreement with the text without speculation")


def _depths(axis: Axes, shown: Sequence[Summary]) -> None:
    means: dict[str, list[list[float]]] = {}
    for one in shown:
        means.setdefault(_setting(one), []).append(one.kept)
    for setting, lists in means.items():
        depth = max(map(len, lists))
        padded = [kept + [0.0] * (depth - len(kept)) for kept in lists]
        mean = [sum(column) / len(lists) for column in zip(*padded, strict=True)]
        axis.plot(range(1, depth + 1), mean, marker="o", label=setting)
    axis.set_xticks(range(1, max(len(one.kept) for one in shown) + 1))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("depth")
    axis.set_ylabel("share of rounds that kept a draft this deep")
    axis.set_title("Acceptance by depth")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def _histogram(field: str, label: str) -> Callable[[Axes, Sequence[Summary]], None]:
    def panel(axis: Axes, shown: Sequence[Summary]) -> None:
        names = [f"{_setting(one)}, load {one.load}" for one in shown]
        if len(set(names)) > _MOST_SERIES:
            names = [_setting(one) for one in shown]
        values: dict[str, list[float]] = {}
        for name, one in zip(names, shown, strict=True):
            values.setdefault(name, []).extend(getattr(one, field))
        axis.hist(list(values.values()), bins=24, histtype="step", linewidth=2, label=list(values))
        axis.set_xlabel(label)
        axis.set_ylabel("requests")
        axis.legend(fontsize=7)

    return panel


Panels = tuple[Callable[[Axes, Sequence[Summary]], None], ...]
_PLOTS: dict[str, tuple[Panels, Callable[[Summary], bool]]] = {
    "speedup": (
        (_speedup,),
        lambda one: bool(one.concurrency and one.speedup and one.speculation != NONE),
    ),
    "running": (
        (_running("tokens_per_s", "tokens/s"), _running("tpot_ms", "time per token, ms")),
        lambda one: one.max_running_requests is not None,
    ),
    "accept_by_group": ((_accept_by_group,), lambda one: one.accept_length is not None),
    "accept_by_depth": ((_depths,), lambda one: bool(one.kept)),
    "latency": (
        (
            _histogram("ttfts", "time to the first token, ms"),
            _histogram("tpots", "time per token, ms"),
        ),
        lambda one: bool(one.ttfts and one.tpots),
    ),
    "agreement": ((_agreement,), lambda one: one.agreement is not None),
}
