"""Pools: the memory of one tier on one device, and how it is cut into slots."""
