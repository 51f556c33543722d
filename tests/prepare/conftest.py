"""A folder to be prepared, beside which nothing may be left."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.prepared import control


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "some" / "data"
    yield target
    assert not control(target).exists() or list(control(target).glob("*.failed")), list(control(target).iterdir())
