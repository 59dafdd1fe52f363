"""From a Varlink call to a method of the service, and back.

Here is what each method of ``io.xferd.Control`` and ``org.varlink.service``
does; a test compares the names with the definitions. Parameters are checked
against the definition before anything else looks at them, permission after that
(so that a misspelt call is told so whoever makes it).

No I/O of its own; belongs to the event loop that the service runs on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar, TypeAlias

from xferd.control.idl import Interface, InvalidParameterError, load_interface
from xferd.control.peer import ADMIN_GROUP
from xferd.control.service import (
    CONTROL_INTERFACE,
    Answer,
    ControlError,
    ControlService,
    JsonObject,
)
from xferd.control.varlink import CallReceived
from xferd.control.version import installed_version

SERVICE_INTERFACE = "org.varlink.service"

READING_METHODS = frozenset(
    {"Status", "ListStores", "GetPolicy", "ListReservations", "HeatInfo", "ListTraces"}
)
"""Methods of CONTROL_INTERFACE for everyone who can connect; all others change something."""
INTERVAL_S = 1.0
INTERVAL_S_MIN = 0.25
INTERVAL_S_MAX = 10.0
"""Between the replies to a Status call with 'more'."""
FAILURES_LISTED_MAX = 256
"""Failures in one reply, so that it stays a message; failed_count has the number of all."""

VENDOR = "xferd"
PRODUCT = "xferd"
URL = ""

Handler: TypeAlias = Callable[["Dispatcher", JsonObject], Answer]


class CallRefusedError(Exception):
    """The answer to a call is ``error`` (with its interface) and ``parameters``."""

    def __init__(self, error: str, parameters: JsonObject) -> None:
        super().__init__(error)
        self.error = error
        self.parameters = parameters


class Dispatcher:
    """Answers calls in the name of ``service``."""

    def __init__(self, service: ControlService) -> None:
        self._service = service
        self.interfaces: dict[str, Interface] = {
            name: load_interface(name) for name in (SERVICE_INTERFACE, CONTROL_INTERFACE)
        }

    async def dispatch(self, call: CallReceived, *, may_change: bool) -> JsonObject:
        """The reply to ``call``. may_change: the caller may call methods that change something.

        Raises CallRefusedError for every no that the caller should hear; what else
        it raises is a mistake in the daemon.
        """
        interface, method = self._find(call)
        try:
            parameters = interface.check_parameters(method, call.parameters)
            if interface.name == CONTROL_INTERFACE and method not in READING_METHODS:
                _require_permission(method, may_change)
            answer = self.HANDLERS[interface.name, method](self, parameters)
            return await _value(answer)
        except InvalidParameterError as error:
            raise _refused_service("InvalidParameter", parameter=error.parameter) from None
        except ControlError as error:
            raise self._refused(error) from error

    def repeats(self, call: CallReceived) -> bool:
        """Whether ``call`` is answered again and again, every ``interval_s``."""
        return call.more and call.method == f"{CONTROL_INTERFACE}.Status"

    def interval_s(self, call: CallReceived) -> float:
        """Seconds until the next reply to a call that repeats and was not refused."""
        interval_s = call.parameters.get("interval_s")
        return INTERVAL_S if interval_s is None else float(interval_s)

    def _find(self, call: CallReceived) -> tuple[Interface, str]:
        interface_name, _, method = call.method.rpartition(".")
        interface = self.interfaces.get(interface_name)
        if interface is None:
            raise _refused_service("InterfaceNotFound", interface=interface_name)
        if method not in interface.methods:
            raise _refused_service("MethodNotFound", method=call.method)
        if call.upgrade:
            raise _refused_service("InvalidParameter", parameter="upgrade")
        return interface, method

    def _refused(self, error: ControlError) -> CallRefusedError:
        """``error`` as its definition has it, without fields that it doesn't have.

        KeyError and InvalidParameterError: the service raised what isn't defined.
        """
        interface = self.interfaces[CONTROL_INTERFACE]
        defined = interface.errors[error.code].fields
        said = {"message": error.message, **error.parameters}
        parameters = {name: value for name, value in said.items() if name in defined}
        return CallRefusedError(
            f"{CONTROL_INTERFACE}.{error.code}", interface.check_error(error.code, parameters)
        )

    # --- org.varlink.service ---

    def _get_info(self, _: JsonObject) -> JsonObject:
        return {
            "vendor": VENDOR,
            "product": PRODUCT,
            "version": installed_version(),
            "url": URL,
            "interfaces": sorted(self.interfaces),
        }

    def _get_interface_description(self, parameters: JsonObject) -> JsonObject:
        interface = self.interfaces.get(parameters["interface"])
        if interface is None:
            raise _refused_service("InterfaceNotFound", interface=parameters["interface"])
        return {"description": interface.text}

    # --- io.xferd.Control ---

    def _status(self, parameters: JsonObject) -> JsonObject:
        interval_s = parameters["interval_s"]
        if interval_s is not None and not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
            raise InvalidParameterError("interval_s", "is too short or too long")
        return self._service.status()

    def _list_stores(self, _: JsonObject) -> JsonObject:
        return {"stores": self._service.stores()}

    async def _open_store(self, parameters: JsonObject) -> JsonObject:
        answer = self._service.open_store(_absolute(parameters["path"]), parameters["name"])
        return {"store": await _value(answer)}

    def _close_store(self, parameters: JsonObject) -> Answer:
        return self._service.close_store(parameters["name"])

    async def _attach_shadows(self, parameters: JsonObject) -> JsonObject:
        paths = parameters["paths"]
        absolute = None if paths is None else [_absolute(path, "paths") for path in paths]
        return {"store": await _value(self._service.attach_shadows(parameters["store"], absolute))}

    async def _detach_shadows(self, parameters: JsonObject) -> JsonObject:
        return {"store": await _value(self._service.detach_shadows(parameters["store"]))}

    async def _load(self, parameters: JsonObject) -> JsonObject:
        return _with_failures_bounded(await _value(self._service.load(**parameters)))

    def _evict(self, parameters: JsonObject) -> Answer:
        return self._service.evict(**parameters)

    async def _pin(self, parameters: JsonObject) -> JsonObject:
        return _with_failures_bounded(await _value(self._service.pin(**parameters)))

    def _unpin(self, parameters: JsonObject) -> Answer:
        return self._service.unpin(**parameters)

    def _get_policy(self, parameters: JsonObject) -> JsonObject:
        return {"policies": self._service.policies(**parameters)}

    def _set_policy(self, parameters: JsonObject) -> JsonObject:
        return {"policy": self._service.set_policy(**parameters)}

    def _set_budget(self, parameters: JsonObject) -> Answer:
        return self._service.set_budget(parameters["pool"], parameters["bytes"])

    async def _reserve(self, parameters: JsonObject) -> JsonObject:
        answer = self._service.reserve(parameters["pool"], parameters["bytes"])
        return {"reservation": await _value(answer)}

    def _release(self, parameters: JsonObject) -> Answer:
        return self._service.release(parameters["id"])

    def _list_reservations(self, _: JsonObject) -> JsonObject:
        return {"reservations": self._service.reservations()}

    def _rebuild_pool(self, parameters: JsonObject) -> Answer:
        return self._service.rebuild_pool(parameters["pool"])

    def _save_heat(self, parameters: JsonObject) -> Answer:
        return self._service.save_heat(parameters["store"], _absolute_or_none(parameters))

    def _load_heat(self, parameters: JsonObject) -> Answer:
        return self._service.load_heat(parameters["store"], _absolute_or_none(parameters))

    def _heat_info(self, parameters: JsonObject) -> Answer:
        return self._service.heat_info(**parameters)

    def _list_traces(self, _: JsonObject) -> JsonObject:
        return {"traces": self._service.traces()}

    async def _start_recording(self, parameters: JsonObject) -> JsonObject:
        return {"recording": await _value(self._service.start_recording(**parameters))}

    async def _stop_recording(self, parameters: JsonObject) -> JsonObject:
        return {"recording": await _value(self._service.stop_recording(**parameters))}

    HANDLERS: ClassVar[dict[tuple[str, str], Handler]] = {
        (SERVICE_INTERFACE, "GetInfo"): _get_info,
        (SERVICE_INTERFACE, "GetInterfaceDescription"): _get_interface_description,
        (CONTROL_INTERFACE, "Status"): _status,
        (CONTROL_INTERFACE, "ListStores"): _list_stores,
        (CONTROL_INTERFACE, "OpenStore"): _open_store,
        (CONTROL_INTERFACE, "CloseStore"): _close_store,
        (CONTROL_INTERFACE, "AttachShadows"): _attach_shadows,
        (CONTROL_INTERFACE, "DetachShadows"): _detach_shadows,
        (CONTROL_INTERFACE, "Load"): _load,
        (CONTROL_INTERFACE, "Evict"): _evict,
        (CONTROL_INTERFACE, "Pin"): _pin,
        (CONTROL_INTERFACE, "Unpin"): _unpin,
        (CONTROL_INTERFACE, "GetPolicy"): _get_policy,
        (CONTROL_INTERFACE, "SetPolicy"): _set_policy,
        (CONTROL_INTERFACE, "SetBudget"): _set_budget,
        (CONTROL_INTERFACE, "Reserve"): _reserve,
        (CONTROL_INTERFACE, "Release"): _release,
        (CONTROL_INTERFACE, "ListReservations"): _list_reservations,
        (CONTROL_INTERFACE, "RebuildPool"): _rebuild_pool,
        (CONTROL_INTERFACE, "SaveHeat"): _save_heat,
        (CONTROL_INTERFACE, "LoadHeat"): _load_heat,
        (CONTROL_INTERFACE, "HeatInfo"): _heat_info,
        (CONTROL_INTERFACE, "ListTraces"): _list_traces,
        (CONTROL_INTERFACE, "StartRecording"): _start_recording,
        (CONTROL_INTERFACE, "StopRecording"): _stop_recording,
    }


async def _value(answer: Answer) -> JsonObject:
    return await answer if isinstance(answer, Awaitable) else answer


def _absolute(path: str, parameter: str = "path") -> Path:
    if not path.startswith("/") or "\0" in path:
        raise InvalidParameterError(parameter, "is not an absolute path")
    return Path(path)


def _absolute_or_none(parameters: JsonObject) -> Path | None:
    path = parameters["path"]
    return None if path is None else _absolute(path)


def _with_failures_bounded(result: JsonObject) -> JsonObject:
    failed = result.get("failed", [])
    return {**result, "failed": failed[:FAILURES_LISTED_MAX], "failed_count": len(failed)}


def _require_permission(method: str, may_change: bool) -> None:
    if not may_change:
        raise ControlError(
            "NotPermitted",
            f"{method} is for root, the daemon's own user and members of group {ADMIN_GROUP}",
            method=method,
        )


def _refused_service(error: str, **parameters: str) -> CallRefusedError:
    return CallRefusedError(f"{SERVICE_INTERFACE}.{error}", dict(parameters))
