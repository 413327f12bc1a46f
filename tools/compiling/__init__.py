"""``tools/compile``: an optional build of the core and of the simulator's loop by mypyc, which does the same faster.

A build lies in the user's cache folder, named by a digest of everything that it is made from. ``tools/simulate`` uses
the build of just these sources if there is one, and runs interpreted otherwise.
"""

import os
import sys

from tools.compiling.builds import Finder, build_folder

SWITCH = "ACTORSERVE_COMPILED"
"""The environment variable that is 1 in programs that use a build."""


def use_if_wanted() -> bool:
    """Whether this process imports compiled modules, from now on, in place of the Python ones.

    That needs a build, and ``SWITCH``. Call it before any module of the core is imported. Raises: RuntimeError if one
    was, because two classes of one name would not be equal.
    """
    if os.environ.get(SWITCH) != "1":
        return False
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return True
    folder = build_folder()
    if folder is None or not folder.is_dir():
        return False
    early = [name for name in sys.modules if name.startswith(("actorserve.core.", "actorserve.sim."))]
    if early:
        raise RuntimeError(f"{early[0]} was imported before the compiled modules were asked for")
    sys.meta_path.insert(0, Finder(folder))
    return True
