"""Render a document as one HTML file, without scripts or external resources."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from typing import Any

from xla_amp.cli.documents import Document
from xla_amp.cli.graph_drawing import draw_graph
from xla_amp.stablehlo.passes.report import Report, location


def page(document: Document, module: Any = None, why: Callable[[Any], str] | None = None) -> str:
    """The HTML text, with the graph of `module`.

    Raises:
        ImportError: jinja2 is not installed.
    """
    import jinja2
    import markupsafe

    source = importlib.resources.files(__package__).joinpath("templates", "report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    graph = None if module is None else draw_graph(module, why)
    if graph is not None:
        graph = graph._replace(svg=markupsafe.Markup(graph.svg))  # graph_drawing escapes its texts
    return environment.from_string(source).render(document=document, graph=graph)


def reasons(report: Report) -> Callable[[Any], str]:
    """A function: operation -> the pass's decision about operations with the same name and location."""
    known: dict[tuple[str, str], str] = {}
    for each in report.operations:
        name = each.operation.partition("#")[0].partition(".")[0]
        known.setdefault((name, each.location), f"{each.colour}: {each.why}")

    def why(operation: Any) -> str:
        name = str(operation.name).removeprefix("stablehlo.").partition(".")[0]
        return known.get((name, location(operation)), "")

    return why
