"""What the whole compiler speaks: programs, bounds, keyed draws."""
