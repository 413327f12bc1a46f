"""Our simulator's speed, and other simulators beside it on the same requests."""

from tools.compiling import use_if_wanted

use_if_wanted()  # here, because the process of a run imports this package before the simulator
