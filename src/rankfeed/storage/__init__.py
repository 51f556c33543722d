"""Where bytes lie: memory-mapped files, locks, checksums, atomic commit, the manifest."""

from rankfeed.storage.afresh import is_gone, look_again, stat_afresh
from rankfeed.storage.checksum import digest_of, file_digest
from rankfeed.storage.commit import atomic_file, make_directory, make_durable, write_atomic
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.manifest import MANIFEST_NAME, Manifest, Shard, load_manifest
from rankfeed.storage.mapped import check_whole, map_file, touched
from rankfeed.storage.safe_names import check_data_name, resolve_data_name

__all__ = [
    "MANIFEST_NAME",
    "DataFiles",
    "Manifest",
    "Shard",
    "atomic_file",
    "check_data_name",
    "check_whole",
    "digest_of",
    "file_digest",
    "is_gone",
    "load_manifest",
    "look_again",
    "make_directory",
    "make_durable",
    "map_file",
    "resolve_data_name",
    "stat_afresh",
    "touched",
    "write_atomic",
]
