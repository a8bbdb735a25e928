"""Tells users that a program is being compiled, where that takes long."""

import threading
from collections.abc import Callable

# Seconds that a compilation takes before it is worth a word.
LONG = 1.0
TEXT = "compiling for this network (kept for later runs)"
_BEGINS = "/jax/compilation_cache/compile_requests_use_cache"
_ENDS = "/jax/core/compile/backend_compile_duration"


def announce(tell: Callable[[str], None]) -> None:
    """Calls `tell` in a thread of its own whenever a compilation has gone on for some time."""
    import jax.monitoring

    waiting: dict[int, threading.Timer] = {}

    def begins(event: str, **_) -> None:
        if event == _BEGINS:
            timer = threading.Timer(LONG, tell, [TEXT])
            timer.daemon = True
            waiting[threading.get_ident()] = timer
            timer.start()

    def ends(event: str, *_, **__) -> None:
        if event == _ENDS and (timer := waiting.pop(threading.get_ident(), None)) is not None:
            timer.cancel()

    jax.monitoring.register_event_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)
