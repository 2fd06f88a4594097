"""This package fits datasets and loaders to loaders and wrappers of other libraries."""
