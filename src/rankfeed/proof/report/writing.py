"""A page on disk."""

from __future__ import annotations

import os
from pathlib import Path

from rankfeed.errors import ArgumentError
from rankfeed.proof.report.html import html_of
from rankfeed.proof.report.page import Page
from rankfeed.proof.report.png import png_of
from rankfeed.storage import write_atomic


def write(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write a page as one HTML file, or its charts as a PNG where the name ends in that; returns where.

    Raises:
        ArgumentError: it cannot be written there.
        MissingExtraError: a PNG, and Pillow is not installed.

    Examples:
        >>> import tempfile
        >>> page = Page(title="Nothing", word="good", verdict="Fine.", facts={}, findings=[], parts=[])
        >>> write(page, Path(tempfile.mkdtemp(), "report.html")).read_text()[:15]
        '<!DOCTYPE html>'
    """
    target = Path(path)
    content = png_of(page) if target.suffix.lower() == ".png" else html_of(page).encode()
    try:
        write_atomic(target, content)
    except OSError as error:
        raise ArgumentError(
            "the report cannot be written there",
            found=error.strerror or error,
            where=target,
            remedy="name a file in a folder that is there and may be written to",
        ) from error
    return target
