"""This package makes a page of a run: ``lakeckpt explore``.

::

    run → [command] → [facts]: plain values from log and index → page.html, which shows them in a browser
"""
