"""The model server: its client, slots, the embedded and the scripted server, and the check of a model (SPEC 4)."""
