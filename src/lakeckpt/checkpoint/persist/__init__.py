"""From host memory to objects, and the commit."""
