"""Steps of an optimizer repeated elsewhere from gradients, bit for bit.

`calibrate` finds an optimizer's arithmetic, `GradientSender` encodes its gradients, `Replica` repeats its steps.
"""

from evermoe.replay.calibrate import calibrate, powers
from evermoe.replay.replica import Replica
from evermoe.replay.sender import GradientSender

__all__ = ["GradientSender", "Replica", "calibrate", "powers"]
