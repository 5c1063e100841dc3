"""A recorder of every rank's gradients: norms, directions, noise and faulty ranks.

recorder = adasum.GradientRecorder()
optimizer.set_observer(recorder)
...
recorder.alarms  # [Alarm(step=31, kind="scaled", ranks=(2,), names=("all layers",), value=4.1)]
"""

from adasum.gradient_recorder.alarms import Alarm
from adasum.gradient_recorder.recorder import GradientRecorder as GradientRecorder
from adasum.gradient_recorder.recorder import RecordedStep
from adasum.gradient_recorder.statistics import Row

__all__ = ["Alarm", "RecordedStep", "Row"]
