"""Where bytes lie: storage, Parquet footers, a table's pinned listing. Never decodes a row, never imports torch."""
