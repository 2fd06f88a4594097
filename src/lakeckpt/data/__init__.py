"""This package holds the torch side of reading: `LakeDataset`, `LakeLoader` and the batches that they yield."""
