import signal
import sys

# Importing takes a while. A Ctrl-C during it ends the process silently.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from actorserve.cli import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
