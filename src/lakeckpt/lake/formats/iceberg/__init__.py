"""This package reads the metadata of Iceberg tables."""
