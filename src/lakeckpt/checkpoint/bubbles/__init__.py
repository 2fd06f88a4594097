"""Where a rank's idle windows are, measured, and the gate that lets slices of a capture through in them."""
