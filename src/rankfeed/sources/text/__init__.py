"""The source of CSV files and files of JSON lines."""
