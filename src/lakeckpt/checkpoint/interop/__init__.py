"""This package reads a run as other tools do, and reads and writes the checkpoint formats of others.

::

    a run → [run_state]: a tree, tensors on request → [run_reader]: for torch.distributed.checkpoint
                 |
             [convert]: a state in one format → in another       [item]: a part of it, by its name
                 |
                 +-- [torch_files]         torch.save
                 +-- [safetensors_files]   safetensors
                 +-- [into_run]            the first checkpoint of a run
"""
