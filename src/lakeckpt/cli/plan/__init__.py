"""The command `lakeckpt plan`."""
