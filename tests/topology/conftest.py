"""The environment of no launcher."""

import os

import pytest
from tests.support.environ import PREFIXES


@pytest.fixture
def clean(monkeypatch):
    """Take every launcher's variables out of this process's environment."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
