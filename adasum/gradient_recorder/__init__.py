"""A recorder of every rank's gradients: norms, directions, noise, and which rank is faulty.

From the Gram matrices that Adasum by `direct` makes anyway, without a look at a tensor or a
message: each rank's norm, how orthogonal the gradients are, the gradient noise scale, and alarms
for a rank whose gradients are scaled, zero, duplicated, stuck, wild or flipped. It reports, and
steers nothing. ::

    recorder = adasum.GradientRecorder()
    optimizer.set_observer(recorder)
    ...
    recorder.alarms  # [Alarm(step=31, kind="scaled", ranks=(2,), names=("all layers",), value=4.1)]
    recorder.to_csv("gradients.csv")
"""

from adasum.gradient_recorder.alarms import Alarm
from adasum.gradient_recorder.recorder import GradientRecorder as GradientRecorder
from adasum.gradient_recorder.rows import RecordedStep, Row
from adasum.gradient_recorder.sinks import TensorBoardSink, WandbSink

# The recorder itself is listed as `adasum.GradientRecorder`.
__all__ = ["Alarm", "RecordedStep", "Row", "TensorBoardSink", "WandbSink"]
