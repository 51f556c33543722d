"""The pytest plugin: a fixture that holds a project's own loaders to what they should deliver.

Loaded by pytest where rankfeed is installed; costs nothing until a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rankfeed.proof.doctor import Examination


#: What the machine does that runs the tests, and not the loader.
_OF_THE_MACHINE = {"too-many-workers", "slow-first-batch"}


class Rankfeed:
    """What the fixture ``rankfeed`` is."""

    def examine(
        self, factory: str | Callable[..., Iterable[Any]], *, ranks: int = 2, workers: int = 2, **options: Any
    ) -> Examination:
        """What the doctor says of a loader: see `rankfeed.proof.doctor.examine`."""
        from rankfeed.proof.doctor import examine

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
        """Fail the test unless each sample comes once an epoch, in equal steps, and nothing else is wrong.

        It fails as well where that cannot be told: samples without ids whose content changes, and an epoch that
        was cut. How many CPUs the machine has, and how long it takes to begin, is no failure.

        Args:
            factory: a function at the top of a module (the test's own will do), or its name.
            ranks: processes that read the loader.
            workers: of each.
            allow: codes of findings that are no failure.
            options: as of `rankfeed.proof.doctor.examine`.

        Raises:
            AssertionError: there are errors or warnings, or not all was counted; the text has all of them.
        """
        from rankfeed.proof.doctor import UNPROVEN

        __tracebackhide__ = True
        found = self.examine(factory, ranks=ranks, workers=workers, **options)
        allowed = {*allow} | _OF_THE_MACHINE
        wanted = [each for each in found.findings if each.code not in allowed]
        grave = [each for each in wanted if each.severity != "note" or each.code in UNPROVEN]
        if grave:
            raise AssertionError("\n".join([found.factory, *map(str, grave), found.summary]))
        return found


@pytest.fixture(scope="session")
def rankfeed() -> Rankfeed:
    """Holds loaders to what they should deliver: ``rankfeed.assert_exactly_once(factory, ranks=2, workers=2)``."""
    return Rankfeed()
