"""The source of Lance tables."""
