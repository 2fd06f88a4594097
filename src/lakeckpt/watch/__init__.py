"""This package watches ranks from outside, and explains faults: values and pure functions, without torch.

::

    the training thread → [beat]: the page of a rank, a file in memory → other processes of the node
    pages, ``/proc`` ([facts]), stacks ([stacks]), collectives ([recorder]), GPUs ([system/]) → [rank_looks]: looks at
        ranks ([looks])
    looks of all nodes → [verdict]: which ranks hold up the others, and why
    gaps between beats → [limits]: when to look, when to act → [watcher]: reports and acts on stalls ([stalls])
    time of each phase, in windows → [slow]: ranks that are slower than their peers
    a code, a signal, a text, the kernel's log and events → [system/] → cause, remedy;  [avoid]: the mark of a node
"""
