"""The documentation builds strictly, as a site that needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="scripts/install docs: the documentation is NOT tested")
ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*(?:src|href)=["']?(https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as scripts/docs does; a link that leads nowhere, or a page without a place, fails."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([ROOT / "scripts/docs", "--site-dir", folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    assert [found[0] for page in site.rglob("*.html") for found in FOREIGN.finditer(page.read_text())] == []


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("pier-node", ["pier-node start", "--advertise", "pier-node export"]),
        ("pier-coordinator", ["pier-coordinator invite", "pier-coordinator experts plan"]),
        ("run-toml", ["inner_steps", "[[data.mixture]]"]),
        ("experts-toml", ["[[domains]]"]),
        ("python", ["pier.join", "step_tokens", "pier.lightning.PierCallback"]),
        (
            "http",
            ["GET /status", "POST /api/actions/{name}", "pier_site_loss", "/v1/completions", "pier_serve_tokens_total"],
        ),
        ("messages", ["message HelloRequest", "peer.proto"]),
    ],
)
def test_the_reference_has_what_the_sources_have(site: Path, page: str, words: list[str]) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference" / f"{page}.html").read_text())
    assert [word for word in words if word not in text] == []
