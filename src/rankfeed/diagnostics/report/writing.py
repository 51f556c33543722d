"""A page on disk."""

import os
from pathlib import Path

from rankfeed.diagnostics.report.html import html_of
from rankfeed.diagnostics.report.page import Page
from rankfeed.diagnostics.report.png import png_of
from rankfeed.diagnostics.written import written


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
    as_picture = Path(path).suffix.lower() == ".png"
    return written(path, png_of(page) if as_picture else html_of(page).encode())
