"""Pad-safety rules: what keeps the rows below the count right for every ATen op with a dynamic dimension."""
