"""The source of Parquet files."""
