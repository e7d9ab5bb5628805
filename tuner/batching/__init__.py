"""Who is batched with whom: pure strategies from lengths to a plan.

Knows lengths and config, nothing else.
"""
