"""Serving engines that read shardconv's files: plugins that run inside them, and checks against them."""
