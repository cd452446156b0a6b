"""Measurements: synthetic input graphs, a paired timer, a trace audit, a memory oracle, and a benchmark of them all."""
