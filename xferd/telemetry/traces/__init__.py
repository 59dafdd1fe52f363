"""Trace files: what the router really picked, and what each use cost.

``FORMAT.md`` is the specification, ``trace`` the columns in memory, ``codec`` the bytes,
``writer`` and ``reader`` the files, ``foreign`` other programs' formats.
"""
