"""Base of sources that present the samples of other sources."""

from __future__ import annotations

from typing import Literal

from rankfeed.sources.source import Annotate, Collate, Declared, Source


class SourceView(Source):
    """Samples of other sources, whose properties are combined here.

    Attributes:
        sources: at least one.
        splits: how often the samples were split at random; the next split uses another hash.
    """

    def __init__(self, *sources: Source, splits: int | None = None) -> None:
        self.sources = sources
        inherited = max((source.splits for source in sources if isinstance(source, SourceView)), default=0)
        self.splits: int = inherited if splits is None else splits

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """Windows if one source needs them: the others lose little by it."""
        return "window" if any(source.default_shuffle == "window" for source in self.sources) else "global"

    @property
    def best_window(self) -> int | None:  # type: ignore[override]
        """The smallest of all."""
        return min((each.best_window for each in self.sources if each.best_window is not None), default=None)

    @property
    def runs_user_code(self) -> bool:  # type: ignore[override]
        """Whether a source runs user code."""
        return any(source.runs_user_code for source in self.sources)

    @property
    def supports_batched_getitem(self) -> bool:  # type: ignore[override]
        """Whether all user code reads batches; otherwise each sample is seeded."""
        user = [source.supports_batched_getitem for source in self.sources if source.runs_user_code]
        return bool(user) and all(user)

    @property
    def collate(self) -> Collate | None:  # type: ignore[override]
        """That of all sources if it is the same."""
        first, *others = (source.collate for source in self.sources)
        return first if all(other == first for other in others) else None

    @property
    def annotate(self) -> Annotate | None:  # type: ignore[override]
        """That of all sources if it is the same."""
        first, *others = (source.annotate for source in self.sources)
        return first if all(other == first for other in others) else None

    @property
    def prefetch_distance(self) -> int:  # type: ignore[override]
        """The largest of all."""
        return max(source.prefetch_distance for source in self.sources)

    @property
    def identified(self) -> bool:
        """Whether all fingerprints depend on content."""
        return all(source.identified for source in self.sources)

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether all samples are dicts of columns."""
        return all(source.as_dicts for source in self.sources)

    @property
    def declared(self) -> Declared | None:  # type: ignore[override]
        """What was declared, if the fields of a source are learned by reading samples."""
        declared = [source.declared for source in self.sources]
        some = [each for each in declared if each is not None]
        if not some:
            return None
        ragged = {name for each in some for name in each.ragged}
        for source in self.sources:
            if source.declared is None and source.as_dicts:
                ragged |= {name for name, field in source.fields.items() if field.kind == "ragged"}
        layout = some[0].layout if all(each == declared[0] for each in declared) else None
        return Declared(some[0].what, some[0].call, layout, tuple(sorted(ragged)))

    def check_unchanged(self) -> None:
        for source in self.sources:
            source.check_unchanged()
