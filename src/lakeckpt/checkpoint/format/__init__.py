"""What lies on disk and in memory: values only."""
