"""Byte floors and step timing, for ``bench`` and ``tune``; decoding imports none of it."""
