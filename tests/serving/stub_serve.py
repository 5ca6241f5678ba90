"""`serve` with the engine made of Python."""

import functools
import sys

from serving import commands
from serving.http import server

if __name__ == "__main__":
    server.HttpServer = functools.partial(
        server.HttpServer, engine_module="tests.serving.stub_engine"
    )
    sys.exit(commands.main())
