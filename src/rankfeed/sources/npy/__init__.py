"""The sources of NumPy `.npy` and `.npz` files."""
