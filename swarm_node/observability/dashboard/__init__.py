"""A local web page that shows runs. It only reads their files, and only the command line imports it.

tail      whole lines of a growing JSONL file
view      one run as its files show it: curves, key figures, status, events
gallery   the runs of a machine, and what has changed since a page was last updated
app       HTTP: the page, JSON, server-sent events, access control
serve     the address, and the command's main loop
"""
