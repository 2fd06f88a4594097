"""The process that persists cuts beside the trainers of a node, and outlives them."""
