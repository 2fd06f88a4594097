"""This package holds the command ``lakeckpt plan``.

::

    table, topology → [command] → [columns]: bytes of the wanted columns → [facts]: steps, memory, warnings → text, JSON
"""
