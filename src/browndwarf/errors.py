"""The one exception tree of browndwarf.

Every error says what happened, why, and what to do next, and knows the exit code of a
command that ends with it. Foreign exceptions are translated where they are met, with
``raise ... from exc``; nothing but these leaves a public function for an expected fault.

    BrowndwarfError                      exit code
    +-- UsageError                       2    the command line or a file the user wrote
    +-- EnvironmentFault                 3    engine, device, model, disk
    |   +-- EngineError
    |   |   +-- EngineNotFound                no llama.cpp build where we looked
    |   |   +-- EngineUnsupported             the build lacks a feature or has a known fault
    |   |   +-- ToolFailed                    llama-quantize, -imatrix, ... ended with an error
    |   |   +-- ServerError
    |   |       +-- ServerCrashed             ended by itself or by a signal of its own making
    |   |       +-- ServerOutOfMemory         the log says that an allocation failed
    |   |       +-- ServerHung                alive, but no progress within the limit
    |   |       +-- ServerKilled              ended by a signal from outside
    |   |       +-- ModelUnsupported          the build does not know the architecture or a tensor
    |   |       +-- PortTaken
    |   |       +-- RequestFailed             the server answered with an error
    |   +-- ModelError
    |   |   +-- ModelNotFound
    |   |   +-- BadModelFile                  not a GGUF, truncated, inconsistent
    |   |   +-- HeadMismatch                  the drafter does not belong to the target
    |   +-- DeviceError
    |   +-- MachineBusy                       other work would spoil the measurement
    |   +-- StorageError
    |       +-- DiskFull
    |       +-- RunFormatError                a run directory of another version, or damaged
    |       +-- RunChanged                    a model, engine or setting differs from the run's
    +-- CheckFailed                      1    the run worked and found a problem
    +-- Interrupted                    130    Ctrl-C, or SIGTERM

Example:
    >>> err = ModelNotFound("no file at m.gguf", why="the path does not exist", fix="check it")
    >>> err.exit_code
    3
"""

from __future__ import annotations

from typing import ClassVar


class BrowndwarfError(Exception):
    """An expected fault: ``what`` happened, ``why``, and how to ``fix`` it."""

    exit_code: ClassVar[int] = 3

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    @property
    def kind(self) -> str:
        """Stable name for machine-readable output, e.g. ``ServerOutOfMemory``."""
        return type(self).__name__

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"Why: {self.why}")
        if self.fix:
            parts.append(f"Next: {self.fix}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not pickle by themselves,
        # and cells may be measured in another process.
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(cls: type[BrowndwarfError], what: str, why: str, fix: str) -> BrowndwarfError:
    return cls(what, why=why, fix=fix)


class UsageError(BrowndwarfError):
    """The command line, or a file that the user wrote, asks for something impossible."""

    exit_code = 2


class EnvironmentFault(BrowndwarfError):
    """Something outside browndwarf is missing, broken or too small."""


class EngineError(EnvironmentFault):
    """llama.cpp is missing, unfit, or failed."""


class EngineNotFound(EngineError):
    """No llama.cpp build in any of the places that were searched."""


class EngineUnsupported(EngineError):
    """The build lacks a needed feature, or has a known fault that forbids its use."""


class ToolFailed(EngineError):
    """A llama.cpp command-line tool ended with an error."""


class ServerError(EngineError):
    """llama-server did not start, died, or answered with an error."""


class ServerCrashed(ServerError):
    """llama-server ended by itself: abort, segmentation fault or an error exit."""


class ServerOutOfMemory(ServerError):
    """llama-server's log says that an allocation failed."""


class ServerHung(ServerError):
    """llama-server lives but made no progress within the limit."""


class ServerKilled(ServerError):
    """llama-server was ended by a signal from outside, such as the kernel's OOM killer."""


class ModelUnsupported(ServerError):
    """The build does not know the model's architecture, or finds its tensors wrong."""


class PortTaken(ServerError):
    """The port that llama-server should listen on belongs to another process."""


class RequestFailed(ServerError):
    """llama-server answered a request with an error, or cut the connection."""


class ModelError(EnvironmentFault):
    """A model file is missing, unreadable or unfit."""


class ModelNotFound(ModelError):
    """No model file at the given place."""


class BadModelFile(ModelError):
    """The file is not a GGUF, is truncated, or contradicts itself."""


class HeadMismatch(ModelError):
    """The drafter does not belong to the target."""


class DeviceError(EnvironmentFault):
    """A device is missing or unreadable."""


class MachineBusy(EnvironmentFault):
    """Other work on the machine would spoil the measurement."""


class StorageError(EnvironmentFault):
    """The disk or a run directory refuses."""


class DiskFull(StorageError):
    """No space, or a quota, on the file system being written."""


class RunFormatError(StorageError):
    """A run directory of another version, or damaged."""


class RunChanged(StorageError):
    """A model, the engine or a setting differs from what the run was started with."""


class CheckFailed(BrowndwarfError):
    """The command worked, and what it checked did not hold."""

    exit_code = 1


class Interrupted(BrowndwarfError):
    """Ctrl-C or SIGTERM: what was finished is kept."""

    exit_code = 130
