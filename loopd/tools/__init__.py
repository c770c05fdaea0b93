"""Tools: the port that providers implement, the registry, the two tools a model sees, the built-in ones (SPEC 6)."""
