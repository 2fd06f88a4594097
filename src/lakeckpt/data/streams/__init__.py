"""This package defines what language models read: documents packed into sequences, and mixtures.

::

    dataset of documents → [pack] → dataset of sequences
    mixture of documents → [pack] → [packed_mixture]: mixture whose sequences have documents of several sources

    datasets and weights → [mix] → mixture → [mixed_source]: takes each row from its source → micro-batches
                                                  ^
              raw text, documents, rows of a transform: [mixed_flows] takes what lanes have next
"""
