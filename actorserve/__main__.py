import sys

from actorserve.cli import main

sys.exit(main())
