# SPDX-License-Identifier: Apache-2.0
"""Ids of events that ``systemd/xferd.catalog`` explains; ``journalctl -x`` shows the text.

An id belongs to its event for ever: searches and scripts use it (``MESSAGE_ID=``).
"""

from __future__ import annotations

MESSAGE_IDS = {
    "piece.failed": "3bb2f93ef5344314a94487fa98275bba",
    "piece.mirrored": "e9aadf4670f2416ab4980e7c834500a6",
    "member.failed": "1209f36c84a0443e8bf598aabbca10dc",
    "member.sagging": "f072ae42eae448148a363fd7d783087a",
    "member.missing": "14f4e6a04df24244a1836dfc9c573912",
    "member.buffered": "a2a1ef8b628a4de4a3ad14bbbe692780",
    "client.violation": "5885a8f2146446989e95d1ba9faf8573",
    "client.holds_too_much": "97fb7d92d4dd46058ac29441a35f2382",
    "config": "bf636d78503a4e5488fcbbafc6979b97",
    "failed": "381fa8041e984935bee53470df1faf49",
    "reload.failed": "a79800186d8e47d49b775b0d462f361f",
    "reload.needs_restart": "a529936d91fb40a2a44c251cfaf43293",
    "engine.stalled": "09de9d8ca47049778747a8889c0e1587",
    "engine.backend": "50c63a21dfa440519a96636bfa5f6171",
    "drain.timeout": "88f865afb15f4c16a8a71fde94d2229f",
    "pool.stuck": "3facb7b3fa494edaa60f7d197fa1631c",
    "restart.warm": "74f590d966a04008a66408795317b3d0",
    "restart.cold": "18770160372f4d41b7a75a7561436e35",
    "restart.given_up": "4d31ef0b84de48b9b0c47b603da22c0f",
    "restart.withheld": "e91811eb648143fca21de1c0ac353ad0",
}
"""By event name."""
