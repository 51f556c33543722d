"""WebDataset tar shards."""
