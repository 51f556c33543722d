"""CSV files and files of JSON lines."""
