import gc
import sys


def _main() -> int:
    gc.disable()  # until the worker has loaded: what it loads stays, and looking for garbage takes a tenth of the time

    from actorserve.processes.child import run_child
    from workers.worker import main

    return run_child("actorserve worker", sys.argv[1:], main)


sys.exit(_main())
