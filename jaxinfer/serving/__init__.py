"""Requests through an engine: in a batch, in the calling thread, or in a background thread for event loops."""
