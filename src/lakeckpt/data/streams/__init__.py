"""This package defines what language models read: documents packed into sequences, and mixtures.

::

    dataset of documents → [pack] → dataset of sequences

    datasets and weights → [mix] → mixture → [mixed_source]: takes each row from its source → micro-batches
"""
