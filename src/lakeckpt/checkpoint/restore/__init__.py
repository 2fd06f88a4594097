"""From the log or host memory to live objects."""
