"""This package finds and reads the bytes of tables: storage, pinned listings, Parquet files. It never imports torch."""
