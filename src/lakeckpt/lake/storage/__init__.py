"""Where bytes lie: local disks, object stores, file systems of fsspec."""
