from __future__ import annotations

from pathlib import Path

import pytest
from experts.serving.ensembles import make_ensemble


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An ensemble of three experts."""
    return make_ensemble(tmp_path / "mine")
