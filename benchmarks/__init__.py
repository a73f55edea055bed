"""Benchmarks: `python -m benchmarks.<name> [--out DIR]`, one JSON of rows each.

Each module declares CODE, the paths that it measures: a row whose commit is older than
the last change there is marked in the report (`python -m benchmarks.report`).
"""
