"""This package fits lakeckpt into training frameworks: a module each, which imports its framework when it is loaded.

::

                        [common]: does this version of the framework fit?
                            |
    a framework's loop → [accelerate], [transformers], [lightning], [deepspeed], [torchtitan], [ray], [torchft]
                            |
                        LakeLoader (reader), CheckpointManager (cuts and saves)
"""
