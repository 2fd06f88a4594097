"""Worker processes of a LakeLoader."""
