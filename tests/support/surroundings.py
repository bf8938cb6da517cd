"""Makes tests independent of how they are started: in a terminal, in the background, by a script or by a service.

A process inherits from its parent which signals it ignores: a shell without job control starts what runs in the
background with SIGINT ignored, and nohup with SIGHUP. The tests send such signals to programs that they start,
which must get them. A user's settings of pipar and of the terminal are inherited, too.
"""

from __future__ import annotations

import os
import signal

_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
}
#: Variables that change what pipar prints, or where it writes.
_VARIABLES = (
    "CI", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PIPAR_DASHBOARD_TOKEN", "PIPAR_RUNS", "PIPAR_TRACEBACK",
)  # fmt: skip


def forget() -> None:
    """Give this process, and so all that it starts, the signals and variables of a plain terminal."""
    for number, handler in _DEFAULTS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEFAULTS)
    for name in _VARIABLES:
        os.environ.pop(name, None)
        os.unsetenv(name)  # readline, which pytest imports, sets COLUMNS where os.environ does not see it
