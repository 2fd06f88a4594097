"""This package turns Arrow columns into numpy columns.

::

    Arrow columns → [forms]: joined, viewed → [convert] → columns: arrays, [ragged], dicts; nulls as masks
                                                 |
                                            [decimals]: to the nearest float64

    columns in parts, an order of rows → [gather] → one column in that order, in memory from [recycled]
"""
