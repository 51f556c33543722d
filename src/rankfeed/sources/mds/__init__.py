"""MosaicML Streaming (MDS) datasets."""
