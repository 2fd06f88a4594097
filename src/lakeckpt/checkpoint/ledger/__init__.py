"""This package proves from the log of a run what was consumed, names rows, and checks every byte.

::

    log → history → what a manifest says of each source (consumed/source_records)
                        |
                     [walk]: stretch by stretch
                        |
                    [account] → [epoch_account]: rows once, twice or never; [tranches] → [audit_report]
                        |
                     [audit]: the proof, by the orders of [indexes]

    one step K → [explain] → its rows; its documents by [document_finder]
    every byte → [verify]
    an epoch   → [consumed_keys]: keys of its consumed rows, for another run
"""
