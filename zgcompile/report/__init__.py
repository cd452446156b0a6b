"""What people read about a step: the tables of the command line."""
