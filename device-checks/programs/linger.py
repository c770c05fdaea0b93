"""Leave a grandchild in a session of its own that ignores SIGTERM, ignore it too, and wait for ever."""

import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["loopd-check-grandchild", "86400"])
    os._exit(0)
os.wait()
os.execvp("sleep", ["loopd-check-child", "86400"])
