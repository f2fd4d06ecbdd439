"""/docs/metrics: what each metric means, as one page without a script or an address outside it."""

import base64
import hashlib
import itertools
from functools import cache
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from markdown_it import MarkdownIt
from markdown_it.token import Token

from services.aggregator.catalogue import groups_of
from services.aggregator.documentation import TITLE, anchor, markdown
from services.aggregator.metric import Catalogue

STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5b6570; --line: #d8dee4;
  --shade: #f3f5f7; --back: #ffffff; --link: #0b5cad; --found: #fff3bf; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --soft: #9aa5b1; --line: #343b43;
  --shade: #1f242a; --back: #14181c; --link: #79b8ff; --found: #4d4310; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; color: var(--text);
  background: var(--back); font: 16px/1.55 system-ui, sans-serif; }
p, li { max-width: 46rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); }
h3 { margin-top: 2rem; }
a { color: var(--link); }
nav { color: var(--soft); }
code, pre { font: 0.875em/1.5 ui-monospace, monospace; }
a code { color: inherit; }
pre { padding: 0.75rem 1rem; background: var(--shade); overflow-x: auto; }
td em { color: var(--soft); }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
td { min-width: 5rem; }
td:last-child { min-width: 16rem; }
td code[id] { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
:target { background: var(--found); scroll-margin-top: 1rem; }
"""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing but the page and its own style."""


def router(catalogue: Catalogue) -> APIRouter:
    """The page of a catalogue."""
    routes = APIRouter(include_in_schema=False)
    page_of = cache(rendered)

    @routes.get("/docs/metrics")
    def page() -> HTMLResponse:
        """The document; the same for everyone, like the other documentation."""
        return HTMLResponse(
            page_of(catalogue),
            headers={
                "Content-Security-Policy": CONTENT_SECURITY_POLICY,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
            },
        )

    return routes


def rendered(catalogue: Catalogue) -> str:
    """The page: headings and keys can be linked to, and a key in the text leads to its row."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown(groups_of(catalogue)))
    _name_headings(tokens)
    _link_keys(tokens, catalogue)
    body = parser.renderer.render(tokens, parser.options, {})
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE} · Headrace</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<nav><a href="../docs">The REST interface</a></nav>\n'
        f"<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _name_headings(tokens: list[Token]) -> None:
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", anchor(inline.content))


def _link_keys(tokens: list[Token], catalogue: Catalogue) -> None:
    """Give a key's own row an id, and let every other mention of the key lead there."""
    declared = {metric.key for metric in catalogue.metrics}
    for index, token in enumerate(tokens):
        starts_row = [before.type for before in tokens[index - 2 : index]] == ["tr_open", "td_open"]
        children: list[Token] = []
        for child in token.children or ():
            text = child.content if child.type == "code_inline" else ""
            found = catalogue.find(text)
            # Of `kl/0` it is the row of `kl/{lag}`.
            key = text if text in declared else found.metric.key if found is not None else None
            if key is None:
                children.append(child)
            elif starts_row and token.content == f"`{key}`":
                child.attrSet("id", key)
                children.append(child)
            else:
                opening = Token("link_open", "a", 1, attrs={"href": f"#{quote(key)}"})
                children += [opening, child, Token("link_close", "a", -1)]
        if token.children is not None:
            token.children = children
