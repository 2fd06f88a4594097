"""This package captures the state beside training: planned once, copied in idle time, fenced before the next update.

::

    live objects → [sources], watched by [state_watch] → tensors, trees
                       |
                    [plan]: a place for each tensor; early or late → [store]: the arena → [moves]: copies of each slice
                       |
    cut of a step → [engine]: copies early tensors, [samples] some spots; [kept]: what lies there already is skipped
                       |
                    [copier] (a thread) → [slice_copier]: late slices, by [links] from a device
                       |                        ^
    next optimizer step → [fence] --------------+  the remaining slices, then the state may change
                       v
                 a complete generation in the arena
"""
