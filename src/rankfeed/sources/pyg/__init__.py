"""The source of PyTorch Geometric datasets."""
