"""Peers that train the same weights from the same start average them, a fragment at a time.

live weights -> fragments -> codecs -> bytes  ~~~ partner ~~~  bytes -> codecs -> robust -> outer step -> live weights

docs/averaging.md says what it does and whom it trusts.
"""
