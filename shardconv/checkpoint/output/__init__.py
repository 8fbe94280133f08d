"""New checkpoints: checks of the destination, staging, the journal, and atomic appearance."""
