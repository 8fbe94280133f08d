"""Development tools, which are not installed."""
