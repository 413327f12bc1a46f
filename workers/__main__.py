import sys

from actorserve.processes.child import run_child
from workers.worker import main

sys.exit(run_child("actorserve worker", sys.argv[1:], main))
