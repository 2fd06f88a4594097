"""What all of ``lakeckpt.data`` stands on."""
