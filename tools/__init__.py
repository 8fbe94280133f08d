"""Tools for those who work on shardconv; none of them is installed."""
