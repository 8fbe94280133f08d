"""Commands of the command line that are more than a few lines, and what commands have in common."""
