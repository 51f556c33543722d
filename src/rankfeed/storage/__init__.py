"""Where bytes lie: memory-mapped files, locks, checksums, atomic commit, the manifest."""

from rankfeed.storage.checksum import digest_of, file_digest
from rankfeed.storage.commit import atomic_file, make_durable, write_atomic
from rankfeed.storage.manifest import MANIFEST_NAME, Manifest, Shard, load_manifest
from rankfeed.storage.mapped import map_file, touched

__all__ = [
    "MANIFEST_NAME",
    "Manifest",
    "Shard",
    "atomic_file",
    "digest_of",
    "file_digest",
    "load_manifest",
    "make_durable",
    "map_file",
    "touched",
    "write_atomic",
]
