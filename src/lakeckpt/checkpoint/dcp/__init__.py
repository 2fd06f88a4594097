"""Storage and planners for `torch.distributed.checkpoint` (DCP): resharding by torch, bytes by us, no pickle."""
