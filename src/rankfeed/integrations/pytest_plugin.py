"""The pytest plugin: a fixture that checks what a project's loaders deliver.

Loaded by pytest where rankfeed is installed; imports nothing until a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rankfeed.diagnostics.doctor import Examination


#: Findings about the machine that runs the tests, not about the loader.
_MACHINE_FINDINGS = {"too-many-workers", "slow-first-batch"}


class Rankfeed:
    """The fixture ``rankfeed``."""

    def examine(
        self, factory: str | Callable[..., Iterable[Any]], *, ranks: int = 2, workers: int = 2, **options: Any
    ) -> Examination:
        """Examine a loader with the doctor: see `rankfeed.diagnostics.doctor.examine`."""
        from rankfeed.diagnostics.doctor import examine

        return examine(factory, ranks=ranks, workers=workers, **options)

    def assert_exactly_once(
        self,
        factory: str | Callable[..., Iterable[Any]],
        *,
        ranks: int = 2,
        workers: int = 2,
        allow: Iterable[str] = (),
        **options: Any,
    ) -> Examination:
        """Fail the test unless each sample comes once per epoch, in equal steps, and nothing else is wrong.

        It also fails where that cannot be determined: samples without ids whose content changes, or an incomplete
        epoch. The number of CPUs and the time to the first batch are no failures.

        Args:
            factory: a function at the top of a module (such as that of the test), or its name.
            ranks: processes that read the loader.
            workers: of each rank.
            allow: codes of findings that are no failure.
            options: of `rankfeed.diagnostics.doctor.examine`.

        Raises:
            AssertionError: there are errors or warnings, or not everything was counted; lists all of them.
        """
        from rankfeed.diagnostics.doctor import UNPROVEN

        __tracebackhide__ = True
        found = self.examine(factory, ranks=ranks, workers=workers, **options)
        allowed = {*allow} | _MACHINE_FINDINGS
        wanted = [each for each in found.findings if each.code not in allowed]
        grave = [each for each in wanted if each.severity != "note" or each.code in UNPROVEN]
        if grave:
            raise AssertionError("\n".join([found.factory, *map(str, grave), found.summary]))
        return found


@pytest.fixture(scope="session")
def rankfeed() -> Rankfeed:
    """Checks what loaders deliver: ``rankfeed.assert_exactly_once(factory, ranks=2, workers=2)``."""
    return Rankfeed()
