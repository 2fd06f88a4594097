"""This package is the command ``lakeckpt demo``, which trains a small GPT, kills ranks, and counts every token."""
