"""This package is the command ``lakeckpt demo``: it trains a small GPT while ranks are killed, and counts every row."""
