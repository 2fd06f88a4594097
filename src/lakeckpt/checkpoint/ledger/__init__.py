"""This package proves from the log of a run what was consumed, names rows, and checks every byte."""
