"""Conversations of two peers over one stream: requests, exchanges, channels."""
