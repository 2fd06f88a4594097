"""One small file for each reader, as that reader's own documentation recommends. See `benchmarks.readers.reader`."""
