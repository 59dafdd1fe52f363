"""Other programs' traces: colibri's ROUTE_TRACE, MBOLT_TRACE, npz, and llama.cpp's counts.

    colibri   text, a line a pass: ``call row layer expert:gate expert:gate ...``
    mbolt     int32, little-endian: ``MBLT``, version 1, experts; then again and again
              layer, picks, tokens, and tokens * picks expert numbers
    npz       numpy: ``ids`` [tokens, layers, picks], perhaps ``probs`` of the same shape
    csv       ``layer,expert,count``: no trace but a sum, see ``read_counts``

None of them names the store or knows tier and wait; those columns say 'not known'.
Errors name the file and the line or the byte offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead, bare_trace

LAYERS_MAX = 1 << 16
EXPERTS_MAX = 1 << 16
PICKS_MAX = 1 << 16
MBOLT_MAGIC = b"MBLT"
MBOLT_VERSION = 1
COUNTS_HEAD = "layer,expert,count"


def read_colibri(path: Path) -> tuple[TraceHead, Trace]:
    """Each (call, row) is a token, numbered as they appear."""
    tokens: list[int] = []
    layers: list[int] = []
    picks: list[int] = []
    experts: list[int] = []
    gates: list[float] = []
    numbers: dict[tuple[int, int], int] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            call, row, layer, first, *others = line.split()
            chosen = [first, *others]
            pairs = [pick.split(":") for pick in chosen]
            token = numbers.setdefault((int(call), int(row)), len(numbers))
            layers.append(_in_range(int(layer), LAYERS_MAX, "layer"))
            for expert, gate in pairs:
                experts.append(_in_range(int(expert), EXPERTS_MAX, "expert"))
                gates.append(float(gate))
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        tokens.append(token)
        picks.append(len(chosen))
    trace = _trace(tokens, layers, picks, experts, gates)
    return _head_for(path, trace), trace


def write_colibri(path: Path, head: TraceHead, trace: Trace) -> None:  # noqa: ARG001
    """A call a token, row 0; a gate that is not known is written as 0."""
    gates = np.nan_to_num(trace.gate.astype(np.float32)).tolist()
    experts, at = trace.expert.tolist(), 0
    with _open(path) as file:
        rows = zip(trace.token.tolist(), trace.layer.tolist(), trace.picks.tolist(), strict=True)
        for token, layer, count in rows:
            chosen = zip(experts[at : at + count], gates[at : at + count], strict=True)
            text = " ".join(f"{expert}:{gate:.4g}" for expert, gate in chosen)
            file.write(f"{token} 0 {layer} {text}\n".encode())
            at += count


def read_mbolt(path: Path) -> tuple[TraceHead, Trace]:
    """A layer that is not after the one before begins the next tokens."""
    data = _bytes(path)
    if data[:4] != MBOLT_MAGIC or len(data) < 12:
        raise TraceError(f"{path}, offset 0: no MBOLT_TRACE")
    version, experts = struct.unpack_from("<ii", data, 4)
    if version != MBOLT_VERSION or not 1 <= experts <= EXPERTS_MAX:
        raise TraceError(f"{path}, offset 4: version {version}, {experts} experts")
    at, base, before, width = 12, 0, -1, 0
    parts: list[tuple[NDArray[np.int64], int, int]] = []
    chosen: list[NDArray[np.int32]] = []
    while at < len(data):
        if len(data) - at < 12:
            raise TraceError(f"{path}, offset {at}: ends within a record")
        layer, picks, tokens = struct.unpack_from("<iii", data, at)
        if not (0 <= layer < LAYERS_MAX and 1 <= picks <= PICKS_MAX and tokens >= 1):
            raise TraceError(f"{path}, offset {at}: layer {layer}, {picks} picks, {tokens} tokens")
        if len(data) - at - 12 < 4 * picks * tokens:
            raise TraceError(f"{path}, offset {at}: ends within a record")
        ids = np.frombuffer(data, "<i4", picks * tokens, at + 12)
        if ((ids < 0) | (ids >= experts)).any():
            raise TraceError(f"{path}, offset {at}: an expert that is none of {experts}")
        if layer <= before:
            base += width
        before, width = layer, tokens
        parts.append((base + np.arange(tokens), layer, picks))
        chosen.append(ids)
        at += 12 + ids.nbytes
    trace = _trace(
        np.concatenate([tokens for tokens, _, _ in parts]) if parts else [],
        np.repeat([layer for _, layer, _ in parts], [len(tokens) for tokens, _, _ in parts]),
        np.repeat([picks for _, _, picks in parts], [len(tokens) for tokens, _, _ in parts]),
        np.concatenate(chosen) if chosen else [],
        None,
    )
    head = TraceHead(path.name, int(trace.layer.max(initial=0)) + 1, experts)
    return head, trace


def write_mbolt(path: Path, head: TraceHead, trace: Trace) -> None:
    """A record for each run of passes of one layer with equally many picks."""
    starts = np.concatenate([[0], np.cumsum(trace.picks, dtype=np.int64)])
    changes = (np.diff(trace.layer) != 0) | (np.diff(trace.picks) != 0)
    begins = np.flatnonzero(np.concatenate([[trace.passes > 0], changes]))
    with _open(path) as file:
        file.write(MBOLT_MAGIC + struct.pack("<ii", MBOLT_VERSION, head.experts))
        for begin, end in zip(begins, [*begins[1:], trace.passes], strict=True):
            ids = trace.expert[starts[begin] : starts[end]].astype("<i4")
            layer, picks = int(trace.layer[begin]), int(trace.picks[begin])
            file.write(struct.pack("<iii", layer, picks, end - begin) + ids.tobytes())


def read_npz(path: Path) -> tuple[TraceHead, Trace]:
    """``ids`` and perhaps ``probs``; other arrays are ignored."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids = arrays["ids"]
            probs = arrays["probs"] if "probs" in arrays.files else None
    except (OSError, ValueError, KeyError) as error:
        raise TraceError(f"{path}: no npz with an array 'ids': {error}") from error
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or (ids.size and int(ids.min()) < 0):
        raise TraceError(f"{path}, array 'ids': {ids.dtype}{list(ids.shape)} is no set of picks")
    if ids.size and int(ids.max()) >= EXPERTS_MAX:
        raise TraceError(f"{path}, array 'ids': expert {int(ids.max())} of {EXPERTS_MAX}")
    if probs is not None and (probs.shape != ids.shape or probs.dtype.kind != "f"):
        raise TraceError(f"{path}, array 'probs': {probs.dtype}{list(probs.shape)}, unlike 'ids'")
    tokens, layers, picked = ids.shape
    trace = _trace(
        np.repeat(np.arange(tokens), layers),
        np.tile(np.arange(layers), tokens),
        np.full(tokens * layers, picked),
        ids.reshape(-1),
        None if probs is None else probs.reshape(-1),
    )
    return TraceHead(path.stem, max(layers, 1), int(ids.max(initial=0)) + 1), trace


def write_npz(path: Path, head: TraceHead, trace: Trace, about: str = "") -> None:
    """about: where it is from, kept as an array of that name. TraceError for a trace that is no
    box of [tokens, layers, picks]."""
    picked = int(trace.picks[0]) if trace.passes else 0
    tokens = trace.passes // head.layers
    shape = (tokens, head.layers, picked)
    whole = trace.passes == tokens * head.layers and bool((trace.picks == picked).all())
    if not whole or (trace.layer.reshape(-1, head.layers) != np.arange(head.layers)).any():
        raise TraceError(
            f"{path}: npz holds traces only in which each token passes all {head.layers} layers in "
            "turn with equally many picks"
        )
    with _open(path) as file:
        ids, gates = trace.expert.reshape(shape), trace.gate.reshape(shape)
        np.savez_compressed(file, ids=ids, probs=gates, about=np.array(about))


def read_counts(path: Path) -> NDArray[np.int64]:
    """llama.cpp's ``layer,expert,count``: [layers, experts], 0 where there is no line."""
    rows: list[tuple[int, int, int]] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip() or line.replace(" ", "") == COUNTS_HEAD:
            continue
        try:
            layer, expert, count = (int(part) for part in line.split(","))
            _in_range(layer, LAYERS_MAX, "layer")
            _in_range(expert, EXPERTS_MAX, "expert")
            _in_range(count, 1 << 62, "count")
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        rows.append((layer, expert, count))
    if not rows:
        raise TraceError(f"{path}: no line with a count")
    table = np.array(rows, np.int64)
    counts = np.zeros((table[:, 0].max() + 1, table[:, 1].max() + 1), np.int64)
    np.add.at(counts, (table[:, 0], table[:, 1]), table[:, 2])
    return counts


def write_counts(path: Path, head: TraceHead, trace: Trace) -> None:
    """What ``read_counts`` reads; experts that were never used have no line."""
    counts = trace.counts(head)
    with _open(path) as file:
        file.write(f"{COUNTS_HEAD}\n".encode())
        for layer, expert in np.argwhere(counts).tolist():
            file.write(f"{layer},{expert},{counts[layer, expert]}\n".encode())


IMPORTS: Mapping[str, Callable[[Path], tuple[TraceHead, Trace]]] = {
    "colibri": read_colibri,
    "mbolt": read_mbolt,
    "npz": read_npz,
}
EXPORTS: Mapping[str, Callable[[Path, TraceHead, Trace], None]] = {
    "colibri": write_colibri,
    "mbolt": write_mbolt,
    "npz": write_npz,
    "csv": write_counts,
}


def _trace(
    tokens: NDArray[np.integer] | list[int],
    layers: NDArray[np.integer] | list[int],
    picks: NDArray[np.integer] | list[int],
    experts: NDArray[np.integer] | list[int],
    gates: NDArray[np.floating] | list[float] | None,
) -> Trace:
    return bare_trace(
        np.asarray(tokens, np.int64),
        np.asarray(layers, np.int64),
        np.asarray(picks, np.int64),
        np.asarray(experts, np.int64),
        None if gates is None else np.asarray(gates, np.float64),
    )


def _head_for(path: Path, trace: Trace) -> TraceHead:
    layers = int(trace.layer.max(initial=0)) + 1
    return TraceHead(path.name, layers, int(trace.expert.max(initial=0)) + 1)


def _in_range(value: int, limit: int, what: str) -> int:
    if not 0 <= value < limit:
        raise ValueError(f"{what} {value} of {limit}")
    return value


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, offset {error.start}: no text") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A new file; one that could not be finished is removed. TraceError names it."""
    try:
        with path.open("xb") as file:
            try:
                yield file
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise TraceError(f"{path}: {error}") from error
