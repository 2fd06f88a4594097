"""The torch side of reading: `LakeDataset`, `LakeLoader` and what they yield."""
