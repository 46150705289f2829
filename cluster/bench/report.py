"""`pdcluster bench report`: result files as one HTML page that needs nothing but itself.

Everything that comes from a file is escaped. Knows nothing about how the numbers were measured; docs/bench.md says what
they mean.
"""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.bench.plots import Charts
from cluster.bench.report_parts import engine_part, isolation_part, serve_part, served_part
from cluster.bench.summary import Numbers

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>pdcluster bench</title>
<style>{style}</style>
</head>
<body>
<h1>pdcluster bench</h1>
{body}
</body>
</html>
"""
CSS = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse;margin:1em 0}"
    "th,td{border:1px solid #bbb;padding:.25em .6em;text-align:right}th,td:first-child{text-align:left}"
    "figure{display:inline-block;margin:.5em}.failed{color:#b00020}pre{overflow:auto;background:#f4f4f4;padding:1em}"
)
LISTS_IN_CONFIG_MAX = 20


def render_report(results: Sequence[tuple[str, Numbers]]) -> str:
    """The page of these results, each with the name of its file."""
    charts, parts = Charts(), []
    serve = [(name, result) for name, result in results if result["kind"] in ("serve", "serve-rounds")]
    if serve:
        parts.append(serve_part(serve, charts))
    for kind, part in (("isolation", isolation_part), ("engine", engine_part), ("served", served_part)):
        parts += [part(name, result, charts) for name, result in results if result["kind"] == kind]
    parts.append("<h2>Configurations</h2>")
    parts += [_configuration(name, result) for name, result in results]
    return PAGE.format(style=CSS, body="\n".join(parts))


def _configuration(name: str, result: Numbers) -> str:
    text = json.dumps(_without_long_lists(result), indent=1)
    return f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"


def _without_long_lists(value: Any) -> Any:
    """Samples and curves are in the file; here they would only hide the rest."""
    if isinstance(value, Mapping):
        return {key: _without_long_lists(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_long_lists(v) for v in value] if len(value) <= LISTS_IN_CONFIG_MAX else f"{len(value)} entries"
    return value
