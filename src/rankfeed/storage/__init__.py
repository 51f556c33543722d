"""Files: memory-mapped data, Arrow shards, the manifest, atomic commits, checksums, the ledger format."""
