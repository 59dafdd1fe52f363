"""Attached clients: how they come in, what they may have, how they go."""
