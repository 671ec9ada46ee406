"""Charts as SVG text: rows of ``points`` in, a drawing out. Needs the extra ``report``.

Altair describes them, vl-convert draws them with the Vega that it carries: nothing is fetched,
and no script is left in what comes out. All colours are those of ``SERIES``, ``WORDS`` and the
constants below; ``themed`` turns them into CSS variables, so that a page can change them.

Example:
    >>> svg = speedups(ratios(reading))                            # doctest: +SKIP
    >>> svg[:4]                                                    # doctest: +SKIP
    '<svg'
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import altair as alt
import vl_convert

from browndwarf.report.points import PLAIN, Accepted, Cycle, Probe, Ratio, Speed

#: Okabe and Ito's colours, which people of any colour vision tell apart, in an order that also
#: differs in lightness. Further heads begin again; their shapes differ.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "stroke")
INK, GRID, GREY = "#333333", "#DDDDDD", "#7F7F7F"
WORDS = {"faster": SERIES[0], "inconclusive": GREY, "slower": SERIES[1]}
#: A tag of an SVG, and those of its attributes that a page has no use for.
TAG = re.compile(r'<(?:[^<>"]|"[^"]*")+>')
NEEDLESS = re.compile(r'\s(?:xmlns(?::\w+)?|role|aria-\w+)="[^"]*"')
#: Pixels of all panels side by side, and how many stand there at most, unless names are long.
WIDE, COLUMNS = 760, 4

#: What Altair says that layers become; here they are never facets.
Layered = alt.LayerChart | alt.FacetChart

CONFIG: dict[str, Any] = {
    "aria": False,  # the page names the chart as a whole
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": GRID},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "domainColor": GREY,
        "tickColor": GREY,
        "gridColor": GRID,
        "labelLimit": 320,
    },
    "header": {"labelColor": INK, "titleColor": INK, "labelFontWeight": "bold"},
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "orient": "top",
        "titleFontWeight": "normal",
        "symbolOpacity": 1,
    },
    "title": {"color": INK, "anchor": "start", "fontSize": 12},
}


def speedups(rows: Sequence[Ratio]) -> str:
    """Each configuration's speed-up with its interval, a panel per group, and a line at 1."""
    groups = dict.fromkeys(row.group for row in rows)
    panels = [_ratio_panel(group, [r for r in rows if r.group == group]) for group in groups]
    return _svg(alt.vconcat(*panels, spacing=14).resolve_scale(x="shared", color="shared"))


def _ratio_panel(group: str, rows: Sequence[Ratio]) -> Layered:
    title = "times the speed without MTP (95% interval)"
    scale = alt.Scale(zero=False, padding=12)  # else the line at 1 may lie upon the axis
    base = _chart(rows).encode(
        y=alt.Y("label:N", title=None, scale=alt.Scale(domain=[r.label for r in rows])),
        color=alt.Color(
            "word:N",
            title="verdict",
            scale=alt.Scale(domain=list(WORDS), range=list(WORDS.values())),
        ),
    )
    dots = base.encode(x=alt.X("mean:Q", title=title, scale=scale))
    return alt.layer(
        _rule().encode(x=alt.XDatum(1.0)),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=title), x2="high:Q"),
        _only(dots, "shown", "confirmed").mark_point(filled=True, size=80, opacity=1),
        _only(dots, "shown", "measured").mark_point(filled=False, size=60, strokeWidth=2),
        _only(dots, "shown", "not counted").mark_point(shape="cross", size=60),
    ).properties(title=group, width=WIDE - 200, height=alt.Step(18))


def speeds(rows: Sequence[Speed]) -> str:
    """tok/s over n_max: a panel per workload. Filled with a line: measured. Hollow on a band:
    predicted. A rule: the baseline."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    heads = _heads(rows)
    base = alt.Chart().encode(
        x=alt.X("n_max:O", title="n_max", axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("head:N", scale=alt.Scale(domain=heads)),
        color=_colour(heads),
    )
    spot, ends = _tok_s("tok_s:Q"), _tok_s("low:Q")
    dots = base.encode(y=spot, shape=_shape(heads))
    rule = alt.Chart().encode(y=spot)
    chart = alt.layer(
        _only(base, "kind", "predicted")
        .mark_rule(strokeWidth=6, opacity=0.3)
        .encode(y=ends, y2="high:Q"),
        _only(base, "kind", "measured").mark_rule(strokeWidth=1.5).encode(y=ends, y2="high:Q"),
        _only(dots, "kind", "predicted").mark_point(filled=False, size=35),
        _only(dots, "kind", "measured").mark_point(filled=True, size=45, opacity=1),
        _only(base.encode(y=spot), "kind", "not counted").mark_text(text="×", fontSize=13),
        _only(rule, "kind", "baseline").mark_rule(color=INK),
        _only(rule, "kind", "predicted baseline").mark_rule(color=INK, strokeDash=[4, 3]),
        data=_data(rows),
    )
    return _svg(_panels(chart, "workload", workloads, height=220))


def acceptances(rows: Sequence[Accepted]) -> str:
    """Acceptance per position: a panel per workload, a line per head."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    heads = _heads(rows)
    base = alt.Chart().encode(
        x=alt.X("position:O", title="position of the draft token", axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            "rate:Q",
            title="accepted, of all drafts",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format="%"),
        ),
        color=_colour(heads),
    )
    chart = alt.layer(
        base.mark_line(strokeWidth=1.5),
        base.mark_point(filled=True, size=45, opacity=1).encode(shape=_shape(heads)),
        data=_data(rows),
    )
    return _svg(_panels(chart, "workload", workloads, height=180))


def cycles(rows: Sequence[Cycle]) -> str:
    """Milliseconds of a cycle over n_max: a panel per group, points measured, lines modelled."""
    groups = list(dict.fromkeys(row.group for row in rows))
    heads = _heads(rows)
    base = alt.Chart().encode(
        x=alt.X("n_max:Q", title="n_max", axis=alt.Axis(format="d", tickMinStep=1)),
        y=alt.Y("ms:Q", title="ms per cycle"),
        color=_colour(heads),
    )
    chart = alt.layer(
        _only(base, "kind", "model").mark_line(strokeWidth=1.5),
        _only(base, "kind", "measured")
        .mark_point(filled=True, size=45, opacity=1)
        .encode(shape=_shape(heads)),
        data=_data(rows),
    )
    panels = _panels(chart, "group", groups, height=200, columns=2)  # groups have long names
    return _svg(panels.resolve_scale(y="independent"))


def probes(rows: Sequence[Probe], limit: float) -> str:
    """The probe's milliseconds over the run, with a line at ``limit``, the end of the fast pace."""
    points = (
        _chart(rows)
        .mark_point(filled=True, size=14, opacity=0.7)
        .encode(
            x=alt.X("minutes:Q", title="minutes since the first cell"),
            y=alt.Y("ms:Q", title="ms per probe", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "pace:N",
                title="pace",
                scale=alt.Scale(domain=["fast", "slow"], range=[SERIES[0], SERIES[1]]),
            ),
        )
    )
    rule = _rule().encode(y=alt.YDatum(limit))
    return _svg(alt.layer(points, rule).properties(width=WIDE, height=180))


def themed(svg: str) -> str:
    """A drawing for inside a page: each colour as ``var(--c-rrggbb, #RRGGBB)``, no namespace, which
    HTML knows by itself, and no roles and names of parts, which Vega gives to titles whatever
    ``CONFIG`` says: the page names the drawing as a whole."""
    for colour in (*SERIES, INK, GRID, GREY):
        svg = svg.replace(f'"{colour}"', f'"var(--c-{colour[1:].lower()}, {colour})"')
    return TAG.sub(lambda tag: NEEDLESS.sub("", tag[0]), svg)


def _chart(rows: Sequence[Any]) -> alt.Chart:
    return alt.Chart(_data(rows))


def _rule() -> alt.Chart:
    """A single line, without rows of its own."""
    nothing = alt.Chart(alt.InlineData(values=[{}]))
    rule: alt.Chart = nothing.mark_rule(color=INK, strokeDash=[4, 3])
    return rule


def _data(rows: Sequence[Any]) -> alt.InlineData:
    return alt.InlineData(values=[asdict(row) for row in rows])


def _only(chart: alt.Chart, field: str, value: str) -> alt.Chart:
    return chart.transform_filter(alt.FieldEqualPredicate(field=field, equal=value))


def _heads(rows: Sequence[Any]) -> list[str]:
    """In one order for all charts, so that a head keeps its colour; the plain step comes last."""
    return sorted({row.head for row in rows if row.head}, key=lambda head: (head == PLAIN, head))


def _colour(heads: Sequence[str]) -> alt.Color:
    colours = [SERIES[i % len(SERIES)] for i in range(len(heads))]
    return alt.Color("head:N", title="head", scale=alt.Scale(domain=list(heads), range=colours))


def _shape(heads: Sequence[str]) -> alt.Shape:
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(heads))]
    return alt.Shape("head:N", title="head", scale=alt.Scale(domain=list(heads), range=shapes))


def _tok_s(field: str) -> alt.Y:
    return alt.Y(field, title="tok/s", scale=alt.Scale(zero=False))


def _panels(
    chart: Layered, field: str, names: Sequence[str], *, height: int, columns: int = COLUMNS
) -> alt.FacetChart:
    """The chart once for each value of ``field``, side by side and then below each other, each with
    an x axis of its own: a shared one stands below the last row, also where that has gaps."""
    columns = min(max(len(names), 1), columns)
    width = WIDE // columns - 20
    facet = alt.Facet(
        f"{field}:N", title=None, sort=list(names), header=alt.Header(labelLimit=width)
    )
    sized = chart.properties(width=width, height=height)
    panels: alt.FacetChart = sized.facet(facet=facet, columns=columns).resolve_axis(x="independent")
    return panels


def _svg(chart: Layered | alt.VConcatChart) -> str:
    spec = chart.to_dict()
    spec["config"] = CONFIG
    return vl_convert.vegalite_to_svg(spec)
