"""Gradient synchronisation for JAX: a sync plan as data, compiled to all-reduces over a device mesh.

Importing this package starts no backend, no thread, and needs no extra.
"""

from jaxsync.audit import Audit, audit
from jaxsync.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    inspect_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from jaxsync.client import SyncClient, start
from jaxsync.config import SyncConfig
from jaxsync.devices import simulate_devices
from jaxsync.host.launcher import guard_dispatch
from jaxsync.ingraph.grads import sync_gradients, value_and_grad
from jaxsync.ingraph.norm import global_norm
from jaxsync.ingraph.sharded import shard_optimizer
from jaxsync.ingraph.transform import clip_by_global_norm, synchronize
from jaxsync.mesh import make_mesh
from jaxsync.multiprocess.runtime import initialize
from jaxsync.plan import SyncPlan, make_plan
from jaxsync.step import TrainStep, make_train_step
from jaxsync.train_state import TrainState
from jaxsync.versions import __version__ as __version__

__all__ = [
    "Audit",
    "Checkpoint",
    "CheckpointInfo",
    "SyncClient",
    "SyncConfig",
    "SyncPlan",
    "TrainState",
    "TrainStep",
    "audit",
    "clip_by_global_norm",
    "global_norm",
    "guard_dispatch",
    "initialize",
    "inspect_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "make_mesh",
    "make_plan",
    "make_train_step",
    "save_checkpoint",
    "shard_optimizer",
    "simulate_devices",
    "start",
    "sync_gradients",
    "synchronize",
    "value_and_grad",
]
