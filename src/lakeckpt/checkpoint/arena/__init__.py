"""Complete cuts in host memory that outlive the process which made them."""
