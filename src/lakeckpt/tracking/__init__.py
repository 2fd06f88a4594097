"""What did the whole job consume, and do its ranks agree?  Tallies, the exchange between ranks, records of steps."""
