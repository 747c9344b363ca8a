"""Start the recorder in every Python process that inherits TRACED_FOLDER.

Python imports a module of this name at its start, so processes that the server spawns are recorded
without a change to the server.
"""

import os

if os.environ.get("TRACED_FOLDER"):
    from recorder import record_this_process

    record_this_process(os.environ["TRACED_FOLDER"])
