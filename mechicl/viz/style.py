"""One look for all figures."""

from collections.abc import Sequence

import plotly.graph_objects as go

COLORS = {
    "gradient descent": "#222222",
    "GD++": "#7b4fb0",
    "trained": "#1f6fb4",
    "interpolated": "#e07b00",
    "closed form": "#2a9d4a",
    "other": "#b0413e",
}
"""Who is who, the same in every figure."""


def figure(title: str, x_title: str, y_title: str, *, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """An empty figure with titles and axes."""
    fig = go.Figure()
    fig.update_layout(
        title={"text": title, "x": 0.01, "font": {"size": 16}},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 70, "r": 20, "t": 50, "b": 55},
        height=380,
        legend={"bgcolor": "rgba(255,255,255,0.7)"},
    )
    fig.update_xaxes(title_text=x_title, type="log" if log_x else "linear")
    fig.update_yaxes(title_text=y_title, type="log" if log_y else "linear", exponentformat="power")
    return fig


def add_line(
    fig: go.Figure,
    x: Sequence[float],
    y: Sequence[float | None],
    name: str,
    color: str,
    *,
    dash: str = "solid",
    width: float = 2,
    **options,
) -> None:
    """A line with a name and a colour; None leaves a gap."""
    line = {"color": color, "dash": dash, "width": width}
    fig.add_trace(go.Scatter(x=list(x), y=list(y), name=name, mode="lines", line=line, **options))


def add_band(fig: go.Figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], color: str) -> None:
    """A shaded interval around a line."""
    fig.add_trace(
        go.Scatter(
            x=[*x, *reversed(list(x))],
            y=[*high, *reversed(list(low))],
            mode="lines",  # by default few points would show markers
            fill="toself",
            fillcolor=_transparent(color),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
    )


def on_log_axis(steps: Sequence[int]) -> list[float]:
    """Steps as they are, but 0, which has no place on a logarithmic axis, at half of the next."""
    first = steps[1] / 2 if len(steps) > 1 else 1
    return [step or first for step in steps]


def _transparent(color: str) -> str:
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},0.18)"
