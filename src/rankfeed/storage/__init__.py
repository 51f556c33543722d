"""Files: memory-mapped data, Arrow shards, the manifest, atomic commits, checksums, the ledger format."""

from rankfeed.storage.checksum import digest_of, file_digest
from rankfeed.storage.commit import atomic_file, fsync_dir, make_directory, write_atomic
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.file_errors import check_shard_size, file_errors
from rankfeed.storage.manifest import MANIFEST_NAME, Manifest, ShardInfo, load_manifest
from rankfeed.storage.mapped import check_not_truncated, map_file
from rankfeed.storage.network_fs import is_gone, refresh_path, stat_uncached
from rankfeed.storage.safe_names import check_data_name, resolve_data_name

__all__ = [
    "MANIFEST_NAME",
    "DataFiles",
    "Manifest",
    "ShardInfo",
    "atomic_file",
    "check_data_name",
    "check_not_truncated",
    "check_shard_size",
    "digest_of",
    "file_digest",
    "file_errors",
    "fsync_dir",
    "is_gone",
    "load_manifest",
    "make_directory",
    "map_file",
    "refresh_path",
    "resolve_data_name",
    "stat_uncached",
    "write_atomic",
]
