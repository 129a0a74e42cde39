"""The report's HTML: small helpers that escape what they are given, and the style of the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# By model, in this order: Okabe and Ito's colours, which colour-blind readers tell apart, as they are on light and on dark.
PALETTE = (
    ("#0072b2", "#58aee8"),
    ("#d55e00", "#ff8f4d"),
    ("#009e73", "#35c99c"),
    ("#b0578d", "#e79ac9"),
    ("#c98a00", "#f0bb45"),
    ("#3b9bd6", "#9ad8ff"),
)
INK, MUTED, GRID, BEYOND = "#1b1f24", "#5c6670", "#d5dbe1", "#f1f4f7"
GREYS = ("#6b7480", "#949ca6")
# What a colour of a figure is called in the style sheet, and what it is on dark.
ON_DARK = {
    INK: ("ink", "#e8ebee"),
    MUTED: ("muted", "#a3adb8"),
    GRID: ("grid", "#3a424b"),
    BEYOND: ("beyond", "#1f262d"),
    GREYS[0]: ("grey0", "#a5aeb8"),
    GREYS[1]: ("grey1", "#7a838d"),
    **{light: (f"c{index}", dark) for index, (light, dark) in enumerate(PALETTE)},
}


def escape(text: object) -> str:
    return html.escape(str(text))


class Markup(str):
    """HTML that is ready; anything else given to the helpers is escaped."""


def markup(content: object) -> Markup:
    return content if isinstance(content, Markup) else Markup(escape(content))


class Cell(NamedTuple):
    """A table's cell: what it says, a second and smaller line, and a class of the style sheet."""

    text: object
    small: object = ""
    kind: str = ""


def cell(content: object, tag: str = "td", scope: str = "") -> Markup:
    given = content if isinstance(content, Cell) else Cell(content)
    small = f"<small>{markup(given.small)}</small>" if given.small else ""
    attributes = (f' scope="{scope}"' if scope else "") + (f' class="{given.kind}"' if given.kind else "")
    return Markup(f"<{tag}{attributes}>{markup(given.text)}{small}</{tag}>")


def table(
    caption: object,
    header: Sequence[object],
    groups: Sequence[tuple[object, Iterable[Sequence[object]]]],
    kind: str = "",
) -> Markup:
    """A table in a box of its own that scrolls where it is too wide; `groups` are headings (or "") and their rows."""
    parts = [f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(_plain(caption))}">']
    parts += [f'<table class="{kind}"><caption>{markup(caption)}</caption><thead><tr>']
    parts += [cell(content, "th", "col") for content in header]
    parts.append("</tr></thead>")
    for heading, rows in groups:
        parts.append("<tbody>")
        if heading:
            parts.append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(header)}"><span>{markup(heading)}</span></th></tr>'
            )
        for first, *rest in rows:
            parts.append(f"<tr>{cell(first, 'th', 'row')}{''.join(cell(content) for content in rest)}</tr>")
        parts.append("</tbody>")
    parts.append("</table></div>")
    return Markup("".join(parts))


def _plain(content: object) -> str:
    """A caption as an attribute: what stands before its first tag."""
    text = str(content)
    return html.unescape(text.partition("<")[0]).strip() if isinstance(content, Markup) else text


def figure(svg: str, caption: object, numbers: Markup | None = None, wide: bool = False) -> Markup:
    folded = fold("The numbers", numbers) if numbers else ""
    kind = ' class="wide"' if wide else ""
    return Markup(f"<figure{kind}>{svg}<figcaption>{markup(caption)}</figcaption>{folded}</figure>")


def figures(*given: Markup) -> Markup:
    return Markup(f'<div class="figures">{"".join(given)}</div>') if any(given) else Markup("")


def fold(summary: object, content: Markup) -> Markup:
    return Markup(f"<details><summary>{markup(summary)}</summary>{content}</details>")


def section(identity: str, heading: str, *content: Markup) -> Markup:
    inner = "".join(content)
    return Markup(f'<section id="{identity}"><h2>{escape(heading)}</h2>{inner}</section>') if inner else Markup("")


def paragraph(content: object, kind: str = "") -> Markup:
    attribute = f' class="{kind}"' if kind else ""
    return Markup(f"<p{attribute}>{markup(content)}</p>")


def subheading(content: object) -> Markup:
    return Markup(f"<h3>{markup(content)}</h3>")


def swatch(colour: str) -> Markup:
    """A mark in a model's colour before its name."""
    name = ON_DARK[colour][0]
    return Markup(f'<span class="swatch" style="background:var(--{name})"></span>')


def definitions(entries: Iterable[tuple[object, object]]) -> Markup:
    inner = "".join(f"<div><dt>{markup(name)}</dt><dd>{markup(value)}</dd></div>" for name, value in entries)
    return Markup(f"<dl>{inner}</dl>")


def page(title: str, head: Markup, sections: Sequence[tuple[str, str, Markup]]) -> str:
    """The whole file. `sections` are (id, name in the contents, HTML); the policy in its head forbids any request."""
    links = "".join(f'<li><a href="#{identity}">{escape(name)}</a></li>' for identity, name, _ in sections)
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
        f"<header>{head}{contents}</header>\n<main>\n{chr(10).join(inner for *_, inner in sections)}\n</main>\n</body>\n</html>\n"
    )


def _style() -> str:
    light = "".join(f"--{name}:{colour};" for colour, (name, _) in ON_DARK.items())
    dark = "".join(f"--{name}:{colour};" for name, colour in ON_DARK.values())
    return (
        f":root{{{light}--page:#fff;--card:#fff;--better:#0b5c97;--worse:#a34200;--better-on:#e3f0fa;--worse-on:#fdeadd}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}--page:#14181c;--card:#191e23;--better:#8cc8f5;--worse:#ffb183;"
        f"--better-on:#16303f;--worse-on:#3d2517}}}}\n{_RULES}"
    )


_RULES = """\
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;
overflow-wrap:anywhere}
header,main{max-width:68rem;margin:0 auto;padding:0 1rem}
header{padding-top:2rem}
h1{font-size:clamp(1.6rem,1.2rem + 2vw,2.3rem);line-height:1.15;letter-spacing:-.02em;margin:0 0 .7rem;text-wrap:balance}
h2{font-size:1.35rem;line-height:1.25;letter-spacing:-.01em;margin:0 0 .6rem}
h3{font-size:1.05rem;margin:2rem 0 .5rem}
section{padding:2.2rem 0 .6rem;border-top:1px solid var(--grid);margin-top:1.8rem}
p{margin:.5rem 0 1rem;max-width:44rem}
.lead{font-size:1.1rem}
.note,figcaption,caption{color:var(--muted);font-size:.875rem;line-height:1.45}
.warning{border-left:4px solid var(--c1);padding:.5rem .9rem;background:var(--beyond)}
a{color:var(--better)}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.4rem;padding:0;margin:1.2rem 0 0}
nav a{display:block;padding:.25rem .7rem;border:1px solid var(--grid);border-radius:1rem;text-decoration:none;font-size:.875rem}
nav a:hover{border-color:currentColor}
.swatch{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.45em}
ul.findings{list-style:none;padding:0;margin:1rem 0 1.6rem;display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr))}
.findings li{border:1px solid var(--grid);border-radius:.5rem;padding:.8rem 1rem;background:var(--card);font-size:.94rem}
.findings strong{display:block;margin-bottom:.4rem;line-height:1.3}
.findings dl{margin:0;display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem .8rem}
.findings dl div{display:block;padding:0;border:0}
.findings dt{font-size:.78rem}
.findings dd{font-size:1.15rem;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}
.findings dd small{display:block;color:var(--muted);font-size:.78rem;font-weight:400}
.findings dd.better{color:var(--better)}
.findings dd.worse{color:var(--worse)}
.scroll{overflow-x:auto;margin:1rem 0 1.4rem;max-width:100%}
.scroll:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;padding-bottom:.5rem;caption-side:top;position:sticky;left:0;width:min(100%,calc(100vw - 2rem))}
th,td{padding:.4rem .7rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid);white-space:nowrap}
thead th{vertical-align:bottom;border-bottom:2px solid var(--muted);font-weight:600}
th:first-child{text-align:left}
tbody th{font-weight:500;white-space:normal;max-width:17rem;overflow-wrap:anywhere;position:sticky;left:0;background:var(--page)}
tbody th .swatch{float:left;margin-top:.44em}
.group .swatch{float:none!important}
th small,td small{display:block;color:var(--muted);font-weight:400;font-size:.78rem;line-height:1.3}
tbody th:has(.swatch){min-width:7rem}
.group th{white-space:normal;padding-top:1rem;font-weight:650;position:static;max-width:none;color:var(--ink)}
.group span{position:sticky;left:.7rem}
td.better,td.worse{font-weight:600}
td.better{color:var(--better);background:var(--better-on)}
td.worse{color:var(--worse);background:var(--worse-on)}
td.better small,td.worse small{color:inherit}
th.beyond{background:var(--beyond)}
th.text,td.text{white-space:normal;text-align:left;min-width:11rem;overflow-wrap:anywhere}
.summary{width:100%}
.figures{display:grid;gap:1.6rem 2.2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));margin:1rem 0 1.4rem;align-items:start}
figure{margin:0;min-width:0}
figure.wide{grid-column:1/-1}
figure svg{display:block;width:100%;max-width:29rem;height:auto}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif!important}
figure svg text{pointer-events:none}
figcaption{margin-top:.5rem;max-width:29rem}
details{margin:.6rem 0}
summary{cursor:pointer;color:var(--better);font-size:.9rem;padding:.2rem 0}
dl{margin:.6rem 0;font-size:.9rem}
dl div{display:grid;grid-template-columns:minmax(6rem,9rem) minmax(0,1fr);gap:.8rem;padding:.25rem 0;border-bottom:1px solid var(--grid)}
dt{color:var(--muted)}
dd{margin:0}
code{font:.86em ui-monospace,SFMono-Regular,Menlo,"Liberation Mono",monospace;overflow-wrap:anywhere}
main{padding-bottom:3rem}
@media (max-width:30rem){th,td{padding:.35rem .24rem}table{font-size:.82rem}th small,td small{font-size:.74rem}thead small{white-space:normal}tbody th{max-width:7rem;font-size:.78rem}tbody th:has(.swatch){min-width:6.8rem}.group th{font-size:.82rem}.group span{left:.24rem}header{padding-top:1.3rem}section{padding-top:1.6rem}}
@media print{section{break-inside:avoid-page}nav{display:none}}
"""
