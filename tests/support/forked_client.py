"""Run Python in a process that a server forks, for commands that a shell starts.

python -m tests.support.forked_client SOCKET [-m MODULE | SCRIPT] ARGUMENT ...
"""

import sys

from tests.support.forked import ForkedPopen

if __name__ == "__main__":
    sys.exit(ForkedPopen([sys.executable, *sys.argv[2:]], server=sys.argv[1]).wait())
