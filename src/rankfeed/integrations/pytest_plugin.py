"""The pytest plugin: the ``rankfeed`` fixture, which asserts that a loader delivers each sample once.

Loaded by pytest where rankfeed is installed; imports nothing until a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rankfeed.diagnostics.doctor import Examination


class Rankfeed:
    """The fixture ``rankfeed``."""

    def examine(
        self, factory: str | Callable[..., Iterable[Any]], *, ranks: int = 2, workers: int = 2, **options: Any
    ) -> Examination:
        """Examine a loader: see `rankfeed.diagnostics.doctor.examine`."""
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
        """Fail the test unless the loader is sound in every configuration that is run.

        It also fails if soundness is not proven. Warnings and notes are no failures.

        Args:
            factory: a function at the top of a module (such as that of the test), or its name.
            ranks: processes that read the loader.
            workers: of each rank.
            allow: as of the doctor: "shared-samples" (or "shared") if ranks read the same samples on purpose,
                "shared-batches" if they do step by step (tensor-parallel peers), "replacement" if samples are
                drawn with replacement on purpose, "partial" if each epoch reads another part of the dataset on
                purpose. Also "not proven", and codes of findings that are no failure ("uneven-steps").
            options: of `rankfeed.diagnostics.doctor.examine`.

        Raises:
            AssertionError: the loader is diseased or not proven; lists the findings.
            ArgumentError: an argument is invalid.
        """
        from rankfeed._util.validate import check_choice
        from rankfeed.diagnostics.doctor.examination import ALLOWED
        from rankfeed.diagnostics.findings import REMEDIES

        __tracebackhide__ = True
        names = (*ALLOWED, "not proven", *REMEDIES)
        allowed = {check_choice("allow", name, names) for name in ([allow] if isinstance(allow, str) else allow)}
        examination = self.examine(factory, ranks=ranks, workers=workers, allow=allowed & {*ALLOWED}, **options)
        if failures := examination.failures(allowed):
            raise AssertionError("\n".join([examination.factory, *map(str, failures), examination.summary]))
        return examination


@pytest.fixture(scope="session")
def rankfeed() -> Rankfeed:
    """Checks what loaders deliver: ``rankfeed.assert_exactly_once(factory, ranks=2, workers=2)``."""
    return Rankfeed()
