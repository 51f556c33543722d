"""The error for data in no known format: it names what is at a path, and how to read that."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

from rankfeed.errors import SourceError, listed
from rankfeed.sources.formats import FORMATS, detect_format
from rankfeed.sources.paths import Paths, escape, files_in, natural, walk

#: The format of a path; None for an unknown one.
Detect = Callable[[str], str | None]

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_TEXTS = (".txt", ".text", ".md")
_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval")
#: Subfolders that are examined for data.
_MAX_EXAMINED = 16


def unknown_format_error(where: Paths, paths: Sequence[str], format: str | None) -> SourceError:
    """The error for data at paths that no format fits, or not the given one."""
    if format is not None and (other := detect_format(where)) is not None:
        return SourceError(
            "the data are in another format",
            expected=FORMATS[format].description,
            found=FORMATS[other].description,
            where=", ".join(paths[:4]),
            remedy=f"leave format out, or pass format={other!r}",
        )
    expected = ", ".join(entry.description for name, entry in FORMATS.items() if format in (None, name))
    detect = partial(detect_format, format=format)
    if len(paths) == 1 and os.path.isdir(paths[0]):
        return _folder_error(paths[0], expected, detect)
    suffixes = [os.path.splitext(path)[1].lower() for path in paths]
    remedy = _remedy_for(max(suffixes, key=suffixes.count), paths[0]) if paths else None
    if len(paths) == 1:
        return SourceError(
            "unknown format", expected=expected, found=suffixes[0] or "no suffix", where=paths[0], remedy=remedy
        )
    return SourceError(
        "the files are not all of one known format", expected=expected, found=str(paths[:4]), remedy=remedy
    )


def data_folders(folder: str, detect: Detect) -> dict[str, str]:
    """Name and format of the subfolders that are datasets themselves, of the first ones."""
    formats: dict[str, str] = {}
    for name in islice(_subfolders(folder), _MAX_EXAMINED):
        with suppress(SourceError, OSError):
            if (format := detect(os.path.join(folder, name))) is not None:
                formats[name] = format
    return formats


def _folder_error(folder: str, expected: str, detect: Detect) -> SourceError:
    files = files_in(folder, ("",), skip=())  # raises for a broken link
    names = [*_subfolders(folder), *map(os.path.basename, files)]
    if not names:
        return SourceError("the folder is empty", expected=expected, where=folder)
    if formats := data_folders(folder, detect):
        return SourceError(
            "the folder is not a dataset, but its subfolders are",
            expected=expected,
            found=listed([f"{name} ({format})" for name, format in formats.items()]),
            where=folder,
            remedy=f"open one of them: rankfeed.open({os.path.join(folder, next(iter(formats)))!r}); "
            "rankfeed.concat joins several",
        )
    suffix, depth = _common_suffix(folder)
    pattern_remedy = _pattern_remedy(folder, files, detect)
    return SourceError(
        "the folder holds no data that rankfeed reads"
        if pattern_remedy is None
        else "the files of the folder are not all of one format",
        expected=expected,
        found=listed(names) + (f"; {suffix} files in subfolders" if depth and suffix else ""),
        where=folder,
        remedy=pattern_remedy or _remedy_for(suffix, folder, depth),
    )


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(names, key=natural)


def _common_suffix(folder: str) -> tuple[str, int]:
    """The suffix of most files in a folder, and how many levels below the folder they are."""
    counts: Counter[tuple[str, int]] = Counter()
    for here, names in walk(folder):
        depth = 0 if here == folder else os.path.relpath(here, folder).count(os.sep) + 1
        counts.update((os.path.splitext(name)[1].lower(), depth) for name in names)
    return counts.most_common(1)[0][0] if counts else ("", 0)


def _pattern_remedy(folder: str, files: Sequence[str], detect: Detect) -> str | None:
    """How to open the files of each format in a folder that also has other files; None if there are none."""
    patterns: dict[str, str] = {}
    for suffix, path in {os.path.splitext(path)[1]: path for path in reversed(files)}.items():
        with suppress(SourceError, OSError):
            if suffix and detect(path) is not None:
                patterns[suffix] = f"rankfeed.open({os.path.join(escape(folder), f'*{suffix}')!r})"
    if not patterns:
        return None
    calls = " or ".join(patterns[suffix] for suffix in sorted(patterns))
    return f"open the {' or '.join(sorted(patterns))} files by a pattern: {calls}"


def _remedy_for(suffix: str, path: str, depth: int = 0) -> str:
    """How to read files with a suffix that are ``depth`` levels below a path."""
    if suffix in _IMAGES:
        split = next((name for name in _subfolders(path) if name.lower() in _SPLITS), None) if depth else None
        if split is not None:
            path, depth = os.path.join(path, split), depth - 1
        if depth and len(_subfolders(path)) > 1:
            return (
                "open the classes, which are subfolders, by torchvision, with a transform that returns tensors: "
                f"rankfeed.from_dataset(torchvision.datasets.ImageFolder({path!r}, transform))"
            )
        return "read the images in a Dataset that returns tensors: rankfeed.from_dataset(dataset)"
    if suffix in _TEXTS:
        return (
            "for a text per file, read the files in a Dataset: rankfeed.from_dataset(dataset); for a text per "
            'line, write the lines once: rankfeed.write(({"text": line} for line in file), "texts")'
        )
    if suffix == ".mds":
        return (
            "open the folder that has the index.json of these shards: copy it there, or write the dataset again "
            "(MDSWriter writes it last, when it is closed)"
        )
    return "read it in a Dataset: rankfeed.from_dataset(dataset)"
