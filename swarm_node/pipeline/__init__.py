"""A policy spread over several peers (a crew): contiguous layers on each, microbatches in a pipeline.

compute     what one stage calculates          membership  which peer holds which stage
recovery    where a lost stage comes from      driver      the leader's end: a policy and an optimiser for `node`
"""
