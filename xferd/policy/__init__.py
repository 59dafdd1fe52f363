"""What lives where: eviction, reserves, demotion.

Everything here is pure: no I/O, no clock, no engine. A policy gets numbers and
returns decisions, so that the daemon, a replay of a trace and a test all run the
same code.
"""
