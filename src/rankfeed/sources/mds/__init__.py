"""The source of MosaicML Streaming (MDS) datasets."""
