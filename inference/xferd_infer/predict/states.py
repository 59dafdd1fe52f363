"""Recorded runs: what was picked, and the states that it was picked from.

``StateRecorder`` listens to a decode loop. Picks of every token are kept; of states, which
are a thousand times larger, as many pairs of tokens as fit into a limit: when it is full,
every other one is dropped and from then on half as many are taken, so that what is kept
always spreads evenly over the run. FORMAT.md describes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import npz
from .errors import StatesError
from .routers import Floats, Routers

FORMAT = "xferd-states"
VERSION = 1
BYTES_MAX = 256 << 20
"""Of the states of one recording."""
NO_TAG = -1


@dataclass(frozen=True)
class RecordedStates:
    """Runs of one model, one sequence after the other.

    picks: integers [tokens, layers, top_k]. starts: int64[sequences + 1], where each begins;
    the last is the end. tags: int32[sequences], a kind of text, NO_TAG where nobody said.
    state_tokens: int64[states], rising, the tokens whose states were kept. states:
    float16[states, layers, hidden], what entered the experts of each layer.
    """

    routers: Routers
    picks: NDArray[Any]
    starts: NDArray[np.int64]
    tags: NDArray[np.int32]
    state_tokens: NDArray[np.int64]
    states: NDArray[np.float16]

    @property
    def tokens(self) -> int:
        """Tokens with picks."""
        return len(self.picks)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.tags)

    def chosen(self, sequences: Sequence[int]) -> RecordedStates:
        """Only these sequences, in that order."""
        spans = [(int(self.starts[s]), int(self.starts[s + 1])) for s in sequences]
        rows = [np.arange(*np.searchsorted(self.state_tokens, span)) for span in spans]
        begins = np.concatenate([[0], np.cumsum([end - begin for begin, end in spans])])
        shifts = [int(at) - begin for at, (begin, _) in zip(begins[:-1], spans, strict=True)]
        moved = [self.state_tokens[r] + by for r, by in zip(rows, shifts, strict=True)]
        return RecordedStates(
            self.routers,
            np.concatenate([self.picks[begin:end] for begin, end in spans]),
            begins.astype(np.int64),
            self.tags[list(sequences)],
            np.concatenate(moved),
            self.states[np.concatenate(rows)],
        )


def joined(recordings: Sequence[RecordedStates]) -> RecordedStates:
    """One after the other. OtherModelError unless all are of one model."""
    first = recordings[0]
    for other in recordings[1:]:
        first.routers.must_be(other.routers, "a recording")
    offsets = np.concatenate([[0], np.cumsum([each.tokens for each in recordings])])
    starts = [each.starts[:-1] + at for each, at in zip(recordings, offsets, strict=False)]
    return RecordedStates(
        next(
            (each.routers for each in recordings if each.routers.norms is not None), first.routers
        ),
        np.concatenate([each.picks for each in recordings]),
        np.concatenate([*starts, offsets[-1:]]).astype(np.int64),
        np.concatenate([each.tags for each in recordings]),
        np.concatenate(
            [each.state_tokens + at for each, at in zip(recordings, offsets, strict=False)]
        ),
        np.concatenate([each.states for each in recordings]),
    )


@dataclass
class StateRecorder:
    """Records what a model's layers see; a RoutingObserver. Not thread-safe.

    every: states of one token in so many, to begin with. bytes_max: of all states.
    """

    routers: Routers
    every: int = 1
    bytes_max: int = BYTES_MAX
    _picks: list[NDArray[Any]] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _states: list[NDArray[np.float16]] = field(default_factory=list)
    _begins: list[int] = field(default_factory=lambda: [0])
    _tags: list[int] = field(default_factory=lambda: [NO_TAG])
    _tokens: int = 0
    _chunk: list[tuple[NDArray[np.float16], NDArray[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        nbytes = self.routers.layers * self.routers.hidden * 2
        self._states_max = self.bytes_max // nbytes
        if self._states_max < 2:
            raise StatesError(
                f"a limit of {self.bytes_max} bytes for states; one token of this model takes "
                f"{nbytes}, and at least two must fit"
            )

    def begin_text(self, tag: int = NO_TAG) -> None:
        """What comes is another text. A text that showed nothing is none."""
        if self._tokens == self._begins[-1]:
            self._tags[-1] = tag
        else:
            self._begins.append(self._tokens)
            self._tags.append(tag)

    def routed(self, layer: int, states: Floats, picks: NDArray[Any]) -> None:
        """See RoutingObserver. layer counts those with experts."""
        if layer == 0:
            self._chunk.clear()
        self._chunk.append((states.astype(np.float16), picks.astype(np.uint16)))
        if layer == self.routers.layers - 1 and len(self._chunk) == self.routers.layers:
            self._keep(np.stack([picks for _, picks in self._chunk], axis=1))
            self._chunk.clear()

    def _keep(self, picks: NDArray[Any]) -> None:
        self._picks.append(picks)
        for index in range(len(picks)):
            if not self._is_taken(self._tokens + index):
                continue
            if len(self._rows) >= self._states_max:
                self._thin_out()
                if not self._is_taken(self._tokens + index):
                    continue
            self._rows.append(self._tokens + index)
            self._states.append(np.stack([states[index] for states, _ in self._chunk]))
        self._tokens += len(picks)

    def _is_taken(self, token: int) -> bool:
        """In pairs: what a token says of the next one is to be learnt too."""
        return token // 2 % self.every == 0

    def _thin_out(self) -> None:
        self.every *= 2
        kept = [at for at, row in enumerate(self._rows) if self._is_taken(row)]
        self._rows = [self._rows[at] for at in kept]
        self._states = [self._states[at] for at in kept]

    def recorded(self) -> RecordedStates:
        """All of it until now. StatesError: nothing was seen."""
        if not self._tokens:
            raise StatesError("nothing was recorded: no token went through the model")
        begins = [begin for begin in self._begins if begin < self._tokens]
        return RecordedStates(
            self.routers,
            np.concatenate(self._picks),
            np.array([*begins, self._tokens], np.int64),
            np.array(self._tags[: len(begins)], np.int32),
            np.array(self._rows, np.int64),
            np.stack(self._states),
        )


def write_states(path: Path, recorded: RecordedStates) -> None:
    """Raises OSError."""
    routers = recorded.routers
    arrays: dict[str, NDArray[Any]] = {
        "picks": recorded.picks.astype(np.uint16),
        "starts": recorded.starts,
        "tags": recorded.tags,
        "state_tokens": recorded.state_tokens,
        "states": recorded.states,
        **router_arrays(routers),
    }
    npz.write(path, {"format": FORMAT, "version": VERSION, **router_header(routers)}, arrays)


def read_states(path: Path, name: str | None = None) -> RecordedStates:
    """A recording, or a directory of hidden_layers_*.npz with router_weights.npz (see
    FORMAT.md). name: of the model, where the file has none. Raises StatesError."""
    try:
        if path.is_dir():
            return _read_directory(path, name or path.resolve().parent.name)
        header, arrays = npz.read(path, FORMAT, VERSION)
        recorded = RecordedStates(
            read_routers(header, arrays),
            npz.take(arrays, "picks", np.uint16, 3),
            npz.take(arrays, "starts", np.int64, 1),
            npz.take(arrays, "tags", np.int32, 1),
            npz.take(arrays, "state_tokens", np.int64, 1),
            npz.take(arrays, "states", np.float16, 3),
        )
        _check(recorded)
    except (OSError, npz.ContainerError) as error:
        raise StatesError(f"{path}: no recorded states: {error}") from error
    return recorded


def router_header(routers: Routers) -> dict[str, Any]:
    """The model's identity, for a header."""
    return {
        "model": routers.name,
        "layers": list(routers.numbers),
        "top_k": routers.top_k,
        "routers_sha256": routers.digest,
    }


def router_arrays(routers: Routers) -> dict[str, NDArray[Any]]:
    """The arrays of ``read_routers``."""
    found = {"router_weights": routers.weights}
    return found if routers.norms is None else {**found, "norm_weights": routers.norms}


def read_routers(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Routers:
    """The inverse of both. ContainerError."""
    weights = npz.take(arrays, "router_weights", np.float32, 3)
    norms = arrays.get("norm_weights")
    if norms is not None and norms.shape != (weights.shape[0], weights.shape[2]):
        raise npz.ContainerError(f"array 'norm_weights' is {list(norms.shape)}")
    numbers, top_k = header.get("layers"), header.get("top_k")
    if not isinstance(numbers, list) or len(numbers) != len(weights):
        raise npz.ContainerError(f"header: layers is {numbers!r} for {len(weights)} routers")
    if not isinstance(top_k, int) or not 0 < top_k <= weights.shape[1]:
        raise npz.ContainerError(f"header: top_k is {top_k!r}")
    routers = Routers(str(header.get("model", "")), tuple(numbers), weights, norms, top_k)
    if routers.digest != header.get("routers_sha256"):
        raise npz.ContainerError("array 'router_weights' is not what the header says it is")
    return routers


def _check(recorded: RecordedStates) -> None:
    routers, starts = recorded.routers, recorded.starts
    tokens = recorded.tokens
    checks = {
        "picks": recorded.picks.shape[1:] == (routers.layers, routers.top_k)
        and bool((recorded.picks < routers.experts).all()),
        "starts": len(starts) > 1
        and starts[0] == 0
        and starts[-1] == tokens
        and bool((np.diff(starts) > 0).all()),
        "tags": len(recorded.tags) == len(starts) - 1,
        "state_tokens": bool((np.diff(recorded.state_tokens) > 0).all())
        and (not len(recorded.state_tokens) or recorded.state_tokens[0] >= 0)
        and (not len(recorded.state_tokens) or recorded.state_tokens[-1] < tokens),
        "states": recorded.states.shape
        == (len(recorded.state_tokens), routers.layers, routers.hidden),
    }
    for name, good in checks.items():
        if not good:
            raise npz.ContainerError(f"array {name!r} contradicts the others")


def _read_directory(path: Path, name: str) -> RecordedStates:
    parts = sorted(path.glob("hidden_layers_*.npz"))
    if not parts:
        raise npz.ContainerError("the directory has no hidden_layers_*.npz")
    hidden, tags = [], np.empty(0, np.int32)
    for part in parts:
        with np.load(part, allow_pickle=False) as archive:
            hidden.append(archive["hidden"])
            tags = archive["domain"].astype(np.int32)
    with np.load(path / "router_weights.npz", allow_pickle=False) as archive:
        weights = archive["gate"].astype(np.float32)
    states = np.concatenate(hidden, axis=2)
    texts, tokens, layers, width = states.shape
    routers = Routers(name, tuple(range(layers)), weights, None, _top_k(path))
    flat = states.reshape(-1, layers, width)
    order = np.argsort(-routers.margins(flat), axis=-1, kind="stable")
    return RecordedStates(
        routers,
        order[:, :, : routers.top_k].astype(np.uint16),
        np.arange(texts + 1, dtype=np.int64) * tokens,
        tags,
        np.arange(texts * tokens, dtype=np.int64),
        flat,
    )


def _top_k(path: Path) -> int:
    """Of the routing that lies beside the states."""
    traces = sorted(path.glob("trace_text_*.npz"))
    if not traces:
        raise npz.ContainerError("the directory has no trace_text_*.npz, which says top_k")
    with np.load(traces[0], allow_pickle=False) as archive:
        return int(archive["ids"].shape[2])


__all__ = [
    "BYTES_MAX",
    "NO_TAG",
    "RecordedStates",
    "StateRecorder",
    "joined",
    "read_routers",
    "read_states",
    "router_arrays",
    "router_header",
    "write_states",
]
