"""``tools/simulate``: experiments on simulated clusters."""

from tools.compiling import use_if_wanted

use_if_wanted()  # here, because each process of a run imports this package before the simulator
