"""The copy engine: stripes from readers to sinks in one pass and in bounded memory, with checksums."""
