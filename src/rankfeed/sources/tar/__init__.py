"""The source of WebDataset tar shards."""
