"""What lakeckpt costs, beside its peers and the physical limit: one module, one command each."""
