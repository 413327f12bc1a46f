import signal
import sys

# The imports below take a while. A Ctrl-C in that time ends the process without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from actorserve.cli import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
