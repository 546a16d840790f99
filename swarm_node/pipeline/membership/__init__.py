"""Which peer of a crew holds which stage, and which peer leads.

No thread, no clock, no network: events come in with `now` (seconds, of any clock), actions are returned.
"""
