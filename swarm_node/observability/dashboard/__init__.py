"""A local web page that shows runs. It reads their files and nothing else, and nobody but the command line imports it.

tail      whole lines of a growing JSONL file
view      one run as its files tell it: curves, key figures, status, events
gallery   the runs that there are; what has changed since a page was last told
app       HTTP: the page, JSON, server-sent events; who may look
serve     the address, the command's main loop
"""
