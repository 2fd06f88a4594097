"""This package measures the idle windows of a rank, and admits slices of a capture into them."""
