"""This package keeps the page of each rank, which says from outside where the rank is: values, without torch.

::

    the training thread → [beat]: the page of a rank, a file in memory → other processes of the node
"""
