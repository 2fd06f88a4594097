"""The command line: thin commands over the layers below, each printing tables for people or JSON for programs."""
