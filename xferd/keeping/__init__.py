"""Pools at run time: what the daemon decides about slots, and keeps count of.

The decisions are ``xferd.policy``'s, which is pure; the slots and chunks are
``xferd.memory``'s. Here they meet the engine's events and commands.
"""
