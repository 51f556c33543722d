"""PyTorch Geometric datasets."""
