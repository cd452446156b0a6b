"""From the user's Python function to one FX graph."""
