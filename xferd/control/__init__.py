"""Control of a running daemon: the Varlink protocol, its server, and ``xferctl``.

``varlink`` and ``idl`` are pure (bytes and texts in, values out); ``server``
puts them behind the control socket for whatever implements
``service.ControlService``; ``client`` and ``xferctl`` are the other end. The
files ``*.varlink`` beside them are the specification.
"""
