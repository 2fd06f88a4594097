"""This package records what the readers of a run have consumed. It never imports the ledger, which proves it.

::

    step(batch) → [tracks]: up to which receipt; [watch] warns of rows that nobody tracks; [sharing]: who reads the same
                     |
    a save →     [pending]: records since the last handed-over cut
                     |
                 if consumption depends on the data: [reports] of each rank; rows without training: [excluded]
                     |
    commit →     [pending] joined: one record since the parent → manifest

    a state → [rows]: rows of files at its positions → [rest_of_epoch]: an index without what was consumed
    manifests → [source_records]: what each says of a source → [steps_used]: the positions that steps used
                                                                  |
    a restore → [exclusions]: positions that leave the deal <-----+---- a micro-batch that ended the job
    a global batch → [accumulation]: micro-batches of a step
"""
