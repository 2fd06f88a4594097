"""This package records what the readers of a run have consumed. It never imports the ledger, which proves it."""
