"""What a pack writes down of how far it got."""

from __future__ import annotations

import msgspec

from rankfeed.columns import Field
from rankfeed.storage import Manifest, ShardInfo
from rankfeed.storage.decodable import decodable


@decodable
class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of finished rows.

    Args:
        own: fields as its rows ask for.
        fields: as they are stored, which differs where other parts asked for more.
        shard: its entry in the manifest; the path is that in the staging folder.
    """

    own: dict[str, Field]
    fields: dict[str, Field]
    shard: ShardInfo


@decodable
class Stretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stretch of the input, all of whose parts are there.

    Args:
        job: whose it is.
        parts: in order; none where a function left no rows.
    """

    job: str
    parts: list[Part]


@decodable
class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last moves.

    Args:
        manifest: what is to be there at the end.
        staged: names of what is moved, in the order of the manifest's last shards.
        nameless: whether they were appended, and nothing but their rows can tell which they are.
    """

    manifest: Manifest
    staged: list[str]
    nameless: bool = False

    @property
    def old(self) -> list[ShardInfo]:
        """Shards that stay where they are."""
        return self.manifest.shards[: len(self.manifest.shards) - len(self.staged)]

    @property
    def new(self) -> list[ShardInfo]:
        """Shards that are moved."""
        return self.manifest.shards[len(self.manifest.shards) - len(self.staged) :]
