"""This package measures packed sequences and mixtures: lakeckpt, its peers and bare pyarrow, in one run."""
