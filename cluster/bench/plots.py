"""Charts as SVG text that can stand inside an HTML page: no link to anything outside, no id that another chart has.

The only module that imports matplotlib, and only to draw: the import takes a second, the first on a machine many, while
it looks for fonts. Knows nothing about benches: it gets labels and numbers.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By label: x and y of points in order of x."""

WIDTH_INCHES, HEIGHT_INCHES, BAR_INCHES = 6.0, 3.4, 0.2
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pdcluster",
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
LABEL_CHARS_MAX = 60

_NAMESPACE = re.compile(r'\s+xmlns(?::\w+)?="[^"]*"')
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_ID = re.compile(r'(\bid="|"#|url\(#)')


class Charts:
    """Draws one chart after the other for one page."""

    def __init__(self) -> None:
        self._num_drawn = 0

    def lines(self, title: str, x_label: str, y_label: str, series: Series, *, has_points: bool = True) -> str:
        """One line per label."""
        figure, axes = self._open(title, x_label, y_label)
        for label, (x, y) in series.items():
            axes.plot(x, y, marker="o" if has_points else "", markersize=4, label=_short(label))
        axes.set_ylim(bottom=0)
        return self._close(figure, axes, has_legend=len(series) > 1)

    def bars(self, title: str, x_label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
        """Horizontal bars: one group per name, in it one bar per label."""
        figure, axes = self._open(title, x_label, "", num_bars=len(groups) * len(series))
        height = 0.8 / max(len(series), 1)
        for place, (label, values) in enumerate(series.items()):
            y = [group + (place - (len(series) - 1) / 2) * height for group in range(len(groups))]
            axes.barh(y, values, height, label=_short(label))
        return self._close_groups(figure, axes, groups, has_legend=len(series) > 1)

    def stacks(self, title: str, x_label: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
        """One horizontal bar per group, made of one part per label."""
        figure, axes = self._open(title, x_label, "", num_bars=len(groups))
        left = [0.0] * len(groups)
        for label, values in series.items():
            axes.barh(range(len(groups)), values, left=left, label=_short(label))
            left = [before + value for before, value in zip(left, values, strict=True)]
        return self._close_groups(figure, axes, groups, has_legend=True)

    def _open(self, title: str, x_label: str, y_label: str, num_bars: int = 0) -> "tuple[Figure, Axes]":
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(STYLE):
            height = max(HEIGHT_INCHES, num_bars * BAR_INCHES)
            figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
            axes = figure.add_subplot()
            axes.set(title=_plain(title), xlabel=_plain(x_label), ylabel=_plain(y_label))
        return figure, axes

    def _close_groups(self, figure: "Figure", axes: "Axes", groups: Sequence[str], *, has_legend: bool) -> str:
        axes.set_yticks(range(len(groups)), [_short(group) for group in groups])
        axes.invert_yaxis()
        return self._close(figure, axes, has_legend=has_legend)

    def _close(self, figure: "Figure", axes: "Axes", *, has_legend: bool) -> str:
        import matplotlib

        text = io.StringIO()
        with matplotlib.rc_context(STYLE):
            if has_legend:
                axes.legend(fontsize=7)
            figure.savefig(text, format="svg", metadata={"Date": None})
        self._num_drawn += 1
        svg = text.getvalue()
        svg = _METADATA.sub("", svg[svg.index("<svg") :])
        return _ID.sub(rf"\g<1>chart{self._num_drawn}-", _NAMESPACE.sub("", svg))


def _short(label: str) -> str:
    cut = label if len(label) <= LABEL_CHARS_MAX else label[: LABEL_CHARS_MAX - 3] + "..."
    return _plain(cut)


def _plain(text: str) -> str:
    """Dollar signs would begin a formula, and a leading underscore hides a label."""
    return text.replace("$", r"\$") if not text.startswith("_") else " " + text.replace("$", r"\$")
