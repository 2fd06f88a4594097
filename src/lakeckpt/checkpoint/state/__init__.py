"""This package takes live objects apart into trees and tensors, and puts them together again.

::

    live objects → [snapshot] → [names]: canonical → [tree]: plain values, with references to tensors
                       |                                |
                [random_states]              [tensors] → bytes; [shards]: the part of a DTensor
                       |                                |
                       +-----------> [staged]: in host memory, with digests → persist

    saved parts → [wholes]: which parts make up a tensor → [loaded]: trees, tensors on request → restore
                                                              |
         [rank_differences]: state of other ranks that is refused; [optimizer_states]: places of moments;
         [own_loading]: modules that load themselves
"""
