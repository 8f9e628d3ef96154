"""A nvidia-cuda-mps-control of our own: daemon, server and command line, without a GPU.

It keeps to what scripts/mps relies on: `-d` daemonises, with a pid file and a socket in the pipe
directory and a log in the log directory; without arguments it passes commands from stdin to the
daemon; a server is another process, started on demand; a daemon that ends removes its pid file and
leaves its socket. $FAKE_MPS says what goes wrong:

    refuses    -d fails                         dies      the daemon ends at once, -d succeeds
    hangs      -d never becomes a daemon        mute      the daemon answers nothing
    stays      the daemon takes `quit`, stays   undying   and survives SIGTERM as well

Daemons add what they are told, and the variables that they see, to the file $FAKE_MPS_RECORD.
"""

import os
import signal
import socket
import sys
import time

MODE = os.environ.get("FAKE_MPS", "")
PIPE = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
PID_FILE = f"{PIPE}/nvidia-cuda-mps-control.pid"


def log(text):
    with open(f"{os.environ['CUDA_MPS_LOG_DIRECTORY']}/control.log", "a") as file:
        file.write(f"[Control {os.getpid():5}] {text}\n")


def record(text):
    if path := os.environ.get("FAKE_MPS_RECORD"):
        with open(path, "a") as file:
            file.write(f"{text}\n")


def server():
    """One process more, which ends when it is told to, not when its daemon does."""
    pid = os.fork()
    if pid == 0:
        os.closerange(0, 100)
        while True:
            time.sleep(60)
    return pid


def serve(listening):
    servers = []
    while True:
        connection, _ = listening.accept()
        with connection:
            command = connection.recv(1000).decode().split()
            record(command[0])
            if MODE == "mute":
                time.sleep(60)
            if command[0] == "start_server":
                servers.append(server())
            connection.sendall("".join(f"{pid}\n" for pid in servers).encode())
        if command[0] == "quit" and not MODE:
            for pid in servers:
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
            os.unlink(PID_FILE)
            return


def daemonise():
    if MODE == "refuses":
        sys.exit("cannot: refused")
    if MODE == "hangs":
        time.sleep(60)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{PIPE}/control")
    listening.listen()
    if os.fork():
        # As the real one may: gone before the daemon has its files.
        os._exit(0)
    os.setsid()
    log(f"Starting control daemon using socket {PIPE}/control")
    if MODE == "dies":
        log("cannot: died")
        os._exit(1)
    if MODE == "undying":
        signal.signal(signal.SIGTERM, lambda *_: record("SIGTERM"))
    for name, value in os.environ.items():
        if name.startswith("CUDA_"):
            record(f"{name}={value}")
    with open(PID_FILE, "w") as file:
        file.write(f"{os.getpid()}\n")
    serve(listening)
    os._exit(0)


def command_line():
    for line in sys.stdin:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(f"{PIPE}/control")
            except OSError:
                sys.exit("Cannot find MPS control daemon process")
            connection.sendall(line.encode())
            while reply := connection.recv(1000):
                print(reply.decode(), end="")


if sys.argv[1:] == ["-d"]:
    daemonise()
else:
    command_line()
