"""Rows of a table of cases that `make test` leaves out, as each of them is expensive."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A row that `make test-all` runs too."""
    return pytest.param(*values, marks=pytest.mark.slow)


def soak(*values: Any) -> Any:
    """A row that only `make soak` runs."""
    return pytest.param(*values, marks=pytest.mark.soak)
