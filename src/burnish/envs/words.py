"""Plain English words and names for templates: short, common, one or two tokens each."""

from __future__ import annotations

_WORDS = """
apple river stone green table cloud music paper light horse bread chair ocean plant glass dream
field house smile train water winter summer garden window bridge forest silver golden market
letter number pocket rabbit rocket school spring street sunset ticket tunnel valley village
yellow animal autumn basket bottle butter button candle castle circle coffee corner cotton
desert dinner doctor dragon engine family farmer finger flower friend guitar hammer harbor
island jacket kitten ladder lemon magnet marble mirror monkey morning mother museum needle
nature office orange palace parrot pencil people pepper planet potato prince puzzle queen
ribbon saddle salmon secret shadow sister spider square statue string sugar temple thunder
tiger tomato tower travel turtle uncle velvet violin wagon walnut whale wheel whisper wizard
"""
_PEOPLE = """
Anna Ben Clara David Emma Felix Grace Henry Irene Jack Karen Leo Maria Noah Olivia Paul Rosa
Sam Tina Victor Wendy Alan Betty Carl Diana Eric Fiona George Helen Ivan
"""
_COMPANIES = """
Acme Orbit Nova Delta Summit Harbor Pioneer Vertex Falcon Cobalt Maple Granite Zenith Aurora
Beacon Cedar
"""
_ROOMS = "Hall Studio Library Lab Atrium Gallery Theater Lounge"
_MONTHS = "January March April June July August October November December"

WORDS = tuple(_WORDS.split())
"""Nouns and adjectives in lower case."""

PEOPLE = tuple(_PEOPLE.split())
"""First names."""

COMPANIES = tuple(_COMPANIES.split())
"""Company names."""

ROOMS = tuple(_ROOMS.split())
"""Kinds of rooms."""

MONTHS = tuple(_MONTHS.split())
"""Names of months (not "May", which is also a verb)."""
