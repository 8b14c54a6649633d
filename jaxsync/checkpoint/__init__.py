"""Checkpoints: a TrainState on disk, as the user's trees, so that it loads on other devices and shardings.

A directory holds a checkpoint a step, named by its number. What is being written has another name until it is
whole, so a directory that is called by a number is a good checkpoint, whenever the process was killed.
"""

from jaxsync.checkpoint.contents import CheckpointInfo
from jaxsync.checkpoint.reading import inspect_checkpoint, list_checkpoints, load_checkpoint
from jaxsync.checkpoint.saving import Checkpoint, save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "inspect_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]
