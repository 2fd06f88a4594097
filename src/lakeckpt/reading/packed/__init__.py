"""This package reads documents of tokens as packed sequences: it counts tokens, and decodes windows of sequences."""
