"""TrainStep: forward, backward, sync and optimizer update as one compiled program."""

from jaxsync.step.options import Optimizer
from jaxsync.step.train_step import TrainStep, make_train_step

__all__ = ["Optimizer", "TrainStep", "make_train_step"]
