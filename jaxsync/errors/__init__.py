"""Every exception jaxsync raises.

    JaxsyncError
    ├── ConfigError            (ValueError)           a configuration that cannot be meant
    ├── ArgumentError          (TypeError)            an argument of another kind or value
    ├── MissingExtraError      (ImportError)          an optional dependency is not installed
    ├── BackendStartedError    (RuntimeError)         devices asked for after JAX had made its own
    ├── DeviceCountError       (RuntimeError)         fewer devices than the mesh needs
    ├── MeshError              (ValueError)           an axis the mesh does not have, or has in another size
    ├── RegistrationError      (ValueError)           a leaf that is no array
    ├── SpecError              (ValueError)           a PartitionSpec that does not fit its leaf or the mesh
    ├── DataShardedError       (ValueError)           a parameter that must be whole, and is sharded
    ├── ReplicaMismatchError   (ValueError)           replicas of one array that hold different values
    ├── TreeMismatchError      (ValueError)           gradients that do not fit the plan
    ├── UnboundAxisError       (NameError)            a collective outside shard_map and pmap
    ├── AlreadyReducedError    (ValueError)           gradients that were summed before
    ├── NotReducedError        (ValueError)           gradients that should have been summed before
    ├── UncheckedModelError    (ValueError)           model parallelism that JAX cannot check
    ├── LossError              (ValueError)           a loss function that returns something else
    ├── NotElementwiseError    (ValueError)           an optimizer that cannot work on parts of arrays
    ├── DeletedArrayError      (RuntimeError)         an array whose buffer was donated before
    ├── AliasedArrayError      (ValueError)           one array at two places of a donated tree
    ├── BatchError             (ValueError)           a batch that cannot be divided
    ├── DispatchError          (ValueError)           a dispatch window that cannot work
    ├── ClosedError            (RuntimeError)         a client that is closed, or was never started
    ├── StartConflictError     (RuntimeError)         a second start with another mesh or config
    ├── NotRegisteredError     (RuntimeError)         a sync before any parameters were registered
    ├── UnknownNameError       (LookupError)          a device, leaf or step that does not exist
    ├── DuplicateError         (ValueError)           the same registration or gradient twice
    ├── SubmissionError        (ValueError)           a gradient of another shape, dtype or device
    ├── TracedSubmissionError  (TypeError)            a host call inside a traced function
    ├── StepOverlapError       (RuntimeError)         a device that is two steps ahead
    ├── SetMismatchError       (ValueError)           devices that announce different leaves
    ├── MissingGradientError   (ValueError)           a sync without a gradient that was announced
    ├── SyncTimeoutError       (TimeoutError)         a sync that was not completed in time
    ├── TicketTimeoutError     (TimeoutError)         a wait that ended before the answer came
    ├── SyncFailedError        (RuntimeError)         a device or a launch broke; the cause is attached
    ├── CallbackError          (RuntimeError)         a deferred callback raised; the cause is attached
    ├── WrongThreadError       (RuntimeError)         a wait on the thread that would have to answer
    ├── ForkedProcessError     (RuntimeError)         a call in a forked child
    ├── InitializationError    (RuntimeError)         several processes that cannot be made one job
    ├── AbsentProcessError     (TimeoutError)         a process that did not come in time
    ├── PeerLostError          (ConnectionError)      a process that died or stopped while others needed it
    ├── DisagreementError      (ValueError)           processes that do not run the same job
    ├── ForeignDeviceError     (ValueError)           a device that another process owns
    ├── LaunchError            (OSError)              processes that cannot be started
    ├── CheckpointReadError    (OSError)              a checkpoint that is not there, or cannot be read
    ├── CheckpointWriteError   (OSError)              a checkpoint that cannot be written
    ├── CheckpointMismatchError (ValueError)          a checkpoint of other leaves
    ├── RunReadError           (OSError)              a run's files that are not there, or are damaged
    ├── RunWriteError          (OSError)              a run's files that cannot be written
    ├── ReportWriteError       (OSError)              a page or trace that cannot be written
    ├── SubjectError           (ValueError)           a function of the user's own that cannot be audited
    ├── GradientMismatchError  (AssertionError)       gradients that are not what one device computes
    ├── ReplicasDifferError    (AssertionError)       devices that hold different values
    ├── CollectiveCountError   (AssertionError)       a program with other collectives than expected
    ├── RecompiledError        (AssertionError)       a program compiled where none should be
    ├── LeakError              (AssertionError)       what a test left behind
    ├── MeshMarkError          (AssertionError)       a mark that asks for more devices than there are
    ├── TooFewDevicesError     (AssertionError)       a test on too few devices to show anything
    └── FaultMissedError       (AssertionError)       an injected fault that never struck

Each class owns its text: what happened, where (one line a place), and what to do. A raise gives only
the facts, as keyword fields, which stay readable on the exception and survive pickling.
"""

from jaxsync.errors.base import JaxsyncError
from jaxsync.errors.base import _rebuild as _rebuild  # pickles name it here
from jaxsync.errors.checkpoints import CheckpointMismatchError, CheckpointReadError, CheckpointWriteError
from jaxsync.errors.client import (
    CallbackError,
    ClosedError,
    DuplicateError,
    ForkedProcessError,
    MissingGradientError,
    NotRegisteredError,
    SetMismatchError,
    StartConflictError,
    StepOverlapError,
    SubmissionError,
    SyncFailedError,
    SyncTimeoutError,
    TicketTimeoutError,
    TracedSubmissionError,
    UnknownNameError,
    WrongThreadError,
)
from jaxsync.errors.config import ArgumentError, ConfigError, MissingExtraError
from jaxsync.errors.devices import BackendStartedError, DeviceCountError, MeshError
from jaxsync.errors.gradients import (
    AlreadyReducedError,
    LossError,
    NotReducedError,
    UnboundAxisError,
    UncheckedModelError,
)
from jaxsync.errors.plan import (
    DataShardedError,
    RegistrationError,
    ReplicaMismatchError,
    SpecError,
    TreeMismatchError,
)
from jaxsync.errors.processes import (
    AbsentProcessError,
    DisagreementError,
    ForeignDeviceError,
    InitializationError,
    LaunchError,
    PeerLostError,
)
from jaxsync.errors.reports import ReportWriteError, RunReadError, RunWriteError, SubjectError
from jaxsync.errors.step import (
    AliasedArrayError,
    BatchError,
    DeletedArrayError,
    DispatchError,
    NotElementwiseError,
)
from jaxsync.errors.testing import (
    CollectiveCountError,
    FaultMissedError,
    GradientMismatchError,
    LeakError,
    MeshMarkError,
    RecompiledError,
    ReplicasDifferError,
    TooFewDevicesError,
)

__all__ = [
    "AbsentProcessError",
    "AliasedArrayError",
    "AlreadyReducedError",
    "ArgumentError",
    "BackendStartedError",
    "BatchError",
    "CallbackError",
    "CheckpointMismatchError",
    "CheckpointReadError",
    "CheckpointWriteError",
    "ClosedError",
    "CollectiveCountError",
    "ConfigError",
    "DataShardedError",
    "DeletedArrayError",
    "DeviceCountError",
    "DisagreementError",
    "DispatchError",
    "DuplicateError",
    "FaultMissedError",
    "ForeignDeviceError",
    "ForkedProcessError",
    "GradientMismatchError",
    "InitializationError",
    "JaxsyncError",
    "LaunchError",
    "LeakError",
    "LossError",
    "MeshError",
    "MeshMarkError",
    "MissingExtraError",
    "MissingGradientError",
    "NotElementwiseError",
    "NotReducedError",
    "NotRegisteredError",
    "PeerLostError",
    "RecompiledError",
    "RegistrationError",
    "ReplicaMismatchError",
    "ReplicasDifferError",
    "ReportWriteError",
    "RunReadError",
    "RunWriteError",
    "SetMismatchError",
    "SpecError",
    "StartConflictError",
    "StepOverlapError",
    "SubjectError",
    "SubmissionError",
    "SyncFailedError",
    "SyncTimeoutError",
    "TicketTimeoutError",
    "TooFewDevicesError",
    "TracedSubmissionError",
    "TreeMismatchError",
    "UnboundAxisError",
    "UncheckedModelError",
    "UnknownNameError",
    "WrongThreadError",
]
