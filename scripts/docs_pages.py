"""A hook of MkDocs: makes the pages of the reference from the sources, whenever the documentation is built.

Links to files outside docs/, which people follow in a clone, become plain text: the site does not have these files.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pier_coordinator.commands.experts import experts_toml
from pier_coordinator.page import app
from pier_node.config.commented import run_toml
from pier_node.experts.serving import app as serving
from pier_node.site import report

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((\.\./[^)]+)\)")
SERVERS = {
    "node/pier_node/site/report.py": "A site",
    "coordinator/pier_coordinator/page/app.py": "The coordinator's page",
    "coordinator/pier_coordinator/page/actions.py": "The operator's actions",
    "node/pier_node/experts/serving/app.py": "pier-node serve",
}
"""The modules that register routes, and what the reference calls their programs."""

COMMAND = (
    "# {name}\n\n::: mkdocs-click\n    :module: {module}\n    :command: main\n    :prog_name: {name}\n    :depth: 1\n"
)
PYTHON = """\
# import pier

[Your own program](../program.md) says how these are used.

::: pier.join
::: pier.Site
    options:
      members: [step_index, state, step, log, shard, close]
::: pier.State
::: pier.StopTraining
::: pier.PierError
::: pier.simulate
::: pier.load
::: pier.describe
::: pier.hf.PierCallback
::: pier.lightning.PierCallback
"""
SETTINGS = "# {file}\n\n`{command}` writes this file. Every key may be left out.\n"
MESSAGES = """\
# Messages

The `.proto` files of what sites and a coordinator send each other. [The protocol](../protocol.md) says how it is used.
"""
HTTP = """\
# HTTP and metrics

A site answers on 127.0.0.1, at the port that `pier-node status` prints (`pier-node start --http PORT` chooses it). The
coordinator's page is at 127.0.0.1:7780 (`pier-coordinator start --page`), and `pier-node serve` at 127.0.0.1:7720.
Actions need the operator's token, as `Authorization: Bearer TOKEN`.
With `--private`, reading needs that token or the viewer's; `POST /api/login`, with either, gives a browser a cookie.
The `--public` page answers GET only.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "pier-node": COMMAND.format(name="pier-node", module="pier_node.cli"),
        "pier-coordinator": COMMAND.format(name="pier-coordinator", module="pier_coordinator.cli"),
        "run-toml": SETTINGS.format(file="run.toml", command="pier-node init") + settings(run_toml()),
        "experts-toml": SETTINGS.format(file="experts.toml", command="pier-coordinator experts init")
        + settings(experts_toml("llama-1m")),
        "python": PYTHON,
        "http": HTTP + "".join([*routes(), *metrics()]),
        "messages": MESSAGES + "".join(messages()),
        "changes": re.sub(r"\]\(docs/", "](../", (ROOT / "CHANGELOG.md").read_text()),
    }
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make links that leave docs/ plain text."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return LINK.sub(inside, markdown)


def settings(toml: str) -> str:
    """A heading for each table of a commented TOML file, and its lines."""
    head, *tables = re.split(r"\n(?=# [^\n]+\n(?:# [^\n]+\n)*#?\[)", toml)
    parts = [f"\n```toml\n{head.strip()}\n```\n"]
    for table in tables:
        name = re.search(r"^#?(\[+.+?\]+)$", table, re.MULTILINE)
        assert name
        parts.append(f"\n## {name[1]}\n\n```toml\n{table.strip()}\n```\n")
    return "".join(parts)


def routes() -> Iterator[str]:
    """A table for each program that answers over HTTP: its routes, with the docstrings of what answers them."""
    for source, title in SERVERS.items():
        yield f"\n## {title}\n\n| route | what it answers |\n|---|---|\n"
        yield from registered(ast.parse((ROOT / source).read_text()))


def registered(module: ast.Module) -> Iterator[str]:
    """A row for each call of web.get and web.post."""
    places: list[ast.Module | ast.ClassDef] = [node for node in module.body if isinstance(node, ast.ClassDef)]
    said = dict(item for place in [*places, module] for item in docstrings(place))
    for call in ast.walk(module):
        match call:
            case ast.Call(ast.Attribute(ast.Name("web"), "get" | "post" as method), [where, handler, *_]):
                path = ast.unparse(where).removeprefix("f").strip("'")
                name = re.sub(r"\(.*?\)", "", ast.unparse(handler)).lower()
                about = said.get(name) or said.get(name.rpartition(".")[2], "")
                yield f"| `{method.upper()} {path}` | {' '.join(about.split())} |\n"


def docstrings(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The docstring of each function by its name, and as handlers are written: `stream.answer`."""
    owner = f"{node.name.strip('_').lower()}." if isinstance(node, ast.ClassDef) else ""
    for function in node.body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((name, ast.get_docstring(function) or "") for name in (function.name, owner + function.name))


def metrics() -> Iterator[str]:
    """A table of the metrics of each program."""
    rows = {
        "A site's metrics": [(f"pier_{name}", text) for name, text in report.METRICS.items()],
        "The coordinator's metrics": [
            *((f"pier_run_{name}", text) for name, text in app.RUN.items()),
            *((f"pier_site_{name}", text) for name, (text, _) in app.SITE.items()),
        ],
        "Metrics of pier-node serve": [
            (f"{family.name}_total" if family.type == "counter" else family.name, family.documentation)
            for family in serving.Metrics(in_work=lambda: 0, lost=lambda: 0).registry.collect()
        ],
    }
    for title, names in rows.items():
        yield f"\n## {title}\n\n| `/metrics` | what it is |\n|---|---|\n"
        yield from (f"| `{name}` | {text} |\n" for name, text in names)


def messages() -> Iterator[str]:
    """Each .proto file, as it is."""
    for path in sorted((ROOT / "protos/pier_proto/v1").glob("*.proto")):
        yield f"\n## {path.name}\n\n```protobuf\n{path.read_text().strip()}\n```\n"
