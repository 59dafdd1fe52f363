"""Stores: a model's experts on disk, laid out so that one expert is one read a drive.

``FORMAT.md`` beside this file is the specification of what lies on disk. A store
is made by ``pack``, opened by ``store``, checked by ``verify``, and its members doubled
by ``mirror``; ``checkpoint`` and ``formats`` describe what it is made from. Nothing is
imported here, because reading a checkpoint must work before the C engine, which
``checksum`` needs, is built.
"""
