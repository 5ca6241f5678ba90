"""Errors of the serving side; each says what a client or an operator can do about it."""


class ServingError(Exception):
    """Base of every error this package raises on purpose."""


class EngineStartError(ServingError):
    """The engine process could not start.

    Attributes:
      user_can_mend: a setting or the checkpoint is wrong, as opposed to a fault of the engine.
    """

    def __init__(self, message: str, user_can_mend: bool):
        self.user_can_mend = user_can_mend
        super().__init__(message)


class EngineDeadError(ServingError):
    """The engine process died or hung while this request was in flight."""


class NotReadyError(ServingError):
    """No engine can take a request now: it starts, restarts, or the server is shutting down."""


class RequestFailedError(ServingError):
    """A step failed on the device; the requests that ran in it are lost, the engine goes on."""


class RequestRefusedError(ServingError):
    """The engine refuses a request that can never run."""


class ControlError(ServingError):
    """A control function could not do what it was asked.

    Attributes:
      fault: "argument" (what was asked for is wrong), "state" (not now: requests run, the engine
        sleeps), "missing" (no such thing), "denied" (not allowed here) or "engine".
    """

    def __init__(self, message: str, fault: str):
        self.fault = fault
        super().__init__(message)


class OverloadedError(ServingError):
    """Admission control refuses a request.

    Attributes:
      reason: the limit that was reached, as the metric counts it.
      retry_after: seconds after which it makes sense to try again.
    """

    def __init__(self, message: str, reason: str, retry_after: int):
        self.reason = reason
        self.retry_after = retry_after
        super().__init__(message)
