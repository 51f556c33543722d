"""Opens `.npy` and `.npz` files: finds whether they are one array, one sample per file, or columns of a table."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from rankfeed._util.validate import check_choice, check_name, check_names, check_optional, invalid
from rankfeed.errors import ArgumentError, RankfeedError, SourceError, printable
from rankfeed.sources.concat import concat
from rankfeed.sources.npy.arrays import ARRAY, Header, read_headers
from rankfeed.sources.npy.rows import NumpyRowsSource
from rankfeed.sources.npy.samples import LABELS_OF_TABLE, Labels, NumpySamplesSource, numpy_files
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import Source

Layout = Literal["rows", "samples", "columns"]

#: More files than these are samples: no table has as many columns.
_MOST_COLUMNS = 100


def open_numpy(
    where: Paths,
    *,
    columns: Sequence[str] | None = None,
    allow_pickle: bool = False,
    layout: Layout | None = None,
    labels: Labels = None,
    name_column: str | None = None,
) -> Source:
    """Open `.npy` or `.npz` files.

    With the layout "rows", each row of each file is a sample; with "samples", each file; with "columns", row i of
    all files is sample i. Without one, a single file has rows; of several files, shapes and dtypes decide, and if
    they allow two layouts it is an error.
    """
    check_optional(check_choice, "layout", layout, choices=get_args(Layout))
    check_optional(check_name, "name_column", name_column)
    if labels is not None and labels != "folder":
        if isinstance(labels, str):
            expected = '"folder", or a list of the names of the subdirectories'
            raise invalid("labels", expected, labels, LABELS_OF_TABLE)
        labels = check_names("labels", labels)
        if len({*labels}) < len(labels):
            raise invalid("labels", "each name once", labels)
    needs_samples = labels is not None or name_column is not None
    if needs_samples and layout not in (None, "samples"):
        raise ArgumentError(
            "labels= and name_column= need one sample per file",
            expected='layout="samples"',
            found=f"layout={layout!r}",
            remedy="leave labels= and name_column= out",
        )
    is_file = isinstance(where, str) and os.path.isfile(where)
    if layout is None and not needs_samples:
        layout = "rows" if is_file else _find_layout(where, *numpy_files(where), allow_pickle)
    if layout in (None, "samples"):
        return NumpySamplesSource(
            where, columns=columns, allow_pickle=allow_pickle, labels=labels, name_column=name_column
        )
    _, paths = numpy_files(where)
    if layout == "columns" and paths[0].endswith(".npy"):
        return NumpyRowsSource(paths, columns=columns, allow_pickle=allow_pickle, named_by_file=True)
    if layout == "columns" and len(paths) > 1:
        raise SourceError(
            ".npz files cannot be columns, since they contain columns",
            where=where,
            remedy='pass layout="rows" if their rows follow each other, or layout="samples" if each is a sample',
        )
    sources = [NumpyRowsSource([path], columns=columns, allow_pickle=allow_pickle) for path in paths]
    return sources[0] if len(sources) == 1 else concat(sources)


def _find_layout(where: Paths, root: str, paths: Sequence[str], allow_pickle: bool) -> Layout:
    """The only possible layout: an ArgumentError if there are two, a SourceError if there is none."""
    if len(paths) == 1:
        return _layout_of_one(where, paths[0], allow_pickle)
    if paths[0].endswith(".npz") or len(paths) > _MOST_COLUMNS:
        return "samples"
    # clip_0.npy, clip_1.npy: unusual names for columns, and their arrays often have the same shape.
    is_series = len({re.sub(r"[0-9]+", "0", os.path.relpath(path, root)) for path in paths}) == 1
    headers: dict[str, Header] = {}
    for path in paths:
        try:
            headers[path] = read_headers(path, allow_pickle=allow_pickle)[ARRAY]
        except RankfeedError:
            if is_series:
                return "samples"  # reading the sample reports the error
            raise
    no_samples, no_columns = _why_no_samples(headers), _why_no_columns(headers)
    if no_samples is None and (is_series or no_columns is not None):
        return "samples"
    if no_samples is None:
        first = next(iter(headers.values()))
        names = ", ".join(printable(Path(path).stem) for path in paths)
        raise ArgumentError(
            "the .npy files can be read in two ways",
            expected='layout="samples" or layout="columns"',
            found=f"{len(paths)} arrays {first}: {len(paths)} samples, one in each file, "
            f"or {first.shape[0]} samples with the columns {names[:200]}",
            where=where,
            remedy='pass one of them: rankfeed.open(..., layout="samples")',
        )
    if no_columns is None:
        return "columns"
    raise SourceError(
        "the .npy files are neither samples nor columns of one dataset",
        expected="arrays that agree in dtype and in all dimensions but the first (samples), "
        "or in the first (columns)",
        found=f"{no_samples}; {no_columns}",
        where=where,
        remedy="open those that belong together: rankfeed.open([path, path])"
        if isinstance(where, str)
        else "open those that agree, or combine the files in a Dataset: rankfeed.from_dataset(dataset)",
    )


def _layout_of_one(where: Paths, path: str, allow_pickle: bool) -> Layout:
    shapes = [header.shape for header in read_headers(path, allow_pickle=allow_pickle).values()]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        return "samples"  # the arrays have no rows in common
    raise ArgumentError(
        "a single file can be read in two ways",
        expected='layout="rows" or layout="samples"',
        found=f"{shapes[0][0]} samples, one in each row, or a single sample",
        where=where,
        remedy='pass one of them: rankfeed.open(..., layout="rows"); or open the file by its own path, '
        "which means its rows",
    )


def _why_no_samples(headers: dict[str, Header]) -> str | None:
    """Which array is unlike the others, if one is."""
    path, first = next(iter(headers.items()))
    for file, header in headers.items():
        same = len(header.shape) == len(first.shape) and header.shape[1:] == first.shape[1:]
        if not same or header.dtype.newbyteorder("=") != first.dtype.newbyteorder("="):
            return f"an array is unlike the others: {header} in {Path(file).name}, {first} in {Path(path).name}"
    return None


def _why_no_columns(headers: dict[str, Header]) -> str | None:
    """Which files cannot be columns of one table, if there are such files."""
    path, first = next(iter(headers.items()))
    for file, header in headers.items():
        if not header.shape:
            return f"there are no rows in {Path(file).name}"
        if header.shape[0] != first.shape[0]:
            return f"{header.shape[0]} rows in {Path(file).name}, {first.shape[0]} in {Path(path).name}"
    names = {Path(file).stem for file in headers}
    return None if len(names) == len(headers) else "two files have the same name"
